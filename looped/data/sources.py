"""Streams of plain documents for pretraining, read as they are needed: local files, folders, hub data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looped.errors import LoopedError

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
TEXT_DOCUMENT = 20_000
"""Characters of one document of a plain-text file, cut at paragraph ends."""


def is_hub_name(source: str) -> bool:
    """Whether a source is the name of a hub data set, such as `owner/name`, and not a path."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~")) and Path(source).suffix not in SUFFIXES


def find_files(source: str) -> list[Path]:
    """The files of a local source in order: itself, or those inside a folder. Raises LoopedError if there are none."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise LoopedError(f"the folder {source} holds no file that ends in {', '.join(SUFFIXES)}")
        return files
    if not path.is_file():
        raise LoopedError(f"there is no file or folder {source}; give one, or the name of a hub data set")
    if path.suffix.lower() not in SUFFIXES:
        raise LoopedError(f"cannot read {source}; data files end in {', '.join(SUFFIXES)}")
    return [path]


def read_texts(source: str, column: str, subset: str | None = None, split: str = "train") -> Iterator[str]:
    """Documents of one source in order. `column` holds the text of rows; `subset` and `split` are a hub data set's.

    Raises LoopedError for files that are missing or damaged, a column that is not there (naming those that are), or a
    hub that cannot be reached.
    """
    if Path(source).expanduser().exists() or not is_hub_name(source):
        for path in find_files(source):
            yield from _file_texts(path, column)
    else:
        for row in _hub_rows(source, subset, split):
            yield _text(row, column, source)


def _file_texts(path: Path, column: str) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from _jsonl_texts(path, column)
    elif suffix == ".parquet":
        yield from _parquet_texts(path, column)
    else:
        yield from _plain_texts(path)


def _plain_texts(path: Path) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            piece.append(line)
            length += len(line)
            if length >= TEXT_DOCUMENT and not line.strip():
                yield "".join(piece).strip()
                piece, length = [], 0
    if "".join(piece).strip():
        yield "".join(piece).strip()


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                raise LoopedError(f"{path}, line {number}, is not JSON; give one object a line") from None
            if not isinstance(row, dict):
                raise LoopedError(f"{path}, line {number}, is not a JSON object; give one object a line")
            yield _text(row, column, f"{path}, line {number},")


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise LoopedError(f"reading {path} needs the package pyarrow; install looped[train]") from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise LoopedError(f"{path} is not a Parquet file ({error})") from error
    names = file.schema_arrow.names
    if column not in names:
        raise LoopedError(_missing(column, names, str(path)))
    for batch in file.iter_batches(columns=[column]):
        for value in batch.column(0).to_pylist():
            yield _text({column: value}, column, str(path))


def _hub_rows(name: str, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise LoopedError(f"reading {name} needs the package datasets; install looped[train]") from error
    try:
        yield from datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # datasets raises a different class for every way a name or a network can fail
        reason = " ".join(str(error).split())[:160]
        raise LoopedError(
            f"cannot read the data set {name!r}, split {split!r} ({type(error).__name__}: {reason}); "
            "check the names and the network, or give local files"
        ) from error


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        if column in row:
            raise LoopedError(f"{where} has no text in the column {column!r}; name another with --data.column")
        raise LoopedError(_missing(column, sorted(map(str, row)), where))
    return value


def _missing(column: str, names: list[str], where: str) -> str:
    return f"{where} has no column {column!r}; it has {', '.join(names)}: name one with --data.column"
