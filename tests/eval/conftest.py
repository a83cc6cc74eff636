"""A random micro model with the shipped tokenizer, as a checkpoint folder, and data files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import looped
from looped.model import LoopedLM
from looped.model.loading import ASSETS
from tests.models import micro_ouro

TOKENIZER = ASSETS / "tokenizer"
ROWS = [
    {"question": "Ann has 3 pears and buys 4. How many has she? ", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs $1,500.\nWhat do two cost?", "answer": "It is 2 * 1500.\n#### 3,000"},
    {"question": "Bob’s café sells 12 cakes a day; in 5 days?", "answer": "12 * 5 = 60\n#### 60"},
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float64 micro Ouro whose context holds eight exemplars."""
    folder = tmp_path_factory.mktemp("micro") / "micro-ouro"
    vocab_size = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size()
    looped.save(micro_ouro(vocab_size=vocab_size, max_positions=1200), folder)
    for file in TOKENIZER.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> LoopedLM:
    return looped.load(checkpoint, device="cpu", dtype="float64")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """`jsonl(rows)`: a data file with them."""

    def write(rows: Iterable[dict[str, Any]] = ROWS, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
