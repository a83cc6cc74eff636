"""Files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from looped.files import whole, write_text


def test_a_file_appears_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with whole(path) as partial:
        partial.write_text("new")
        assert not path.exists()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.json", "new")]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError), whole(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("result.json", "old")]
