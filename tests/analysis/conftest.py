"""A micro Ouro checkpoint without a tokenizer, shared by the tests of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from looped.model import save
from tests.models import micro_ouro


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "micro-ouro"
    save(micro_ouro(exit_threshold=0.6), folder, "float32")
    return folder
