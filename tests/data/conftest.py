from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def gsm8k_folder(repository: Path) -> Path:
    folder = repository.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("GSM8K is not in ../shared/data")
    return folder
