"""Files that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from looped.errors import LoopedError
from looped.files import check_folder, find, read_object, whole, write_text


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


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "no JSON object"),
    ],
    ids=["cut", "binary", "deep", "list"],
)
def test_an_object_that_cannot_be_read_names_its_file(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(LoopedError, match=f"config.json.*{sentence}"):
        read_object(path)
    with pytest.raises(LoopedError, match="cannot be read"):
        read_object(tmp_path)


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "run")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(LoopedError, match="is a file; give a folder"):
            check_folder(folder)
    assert not (tmp_path / "new").exists()


def test_a_folder_is_not_suggested_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    with pytest.raises(LoopedError, match="give the path of a file"):
        find(tmp_path / "recipes", "configuration file")
