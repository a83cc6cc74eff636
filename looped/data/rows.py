"""Rows of data sources, one after another, from any place that was noted: local files, and data sets of the hub.

A `Reader` says where it stands as plain JSON; a source opened there goes on with the next row, without reading again
what is behind where the format allows: files go to a byte, a row group or a row, hub data sets to what `datasets`
notes.
"""

from __future__ import annotations

import glob
import itertools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looped.errors import LoopedError, one_line

Row = Mapping[str, Any]
State = dict[str, Any]
Placed = tuple[Row, Any, str]
"""A row of a file, the place behind it, and words for where it is."""
PLAIN = (".txt", ".md")
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", *PLAIN)
_CARDS = ("dataset_info.json", "dataset_dict.json", "state.json")  # what `datasets` saves beside rows
PIECE = 4_000
"""Characters at which a plain text file is cut, at the next blank line."""


class Reader(ABC, Iterator[Row]):
    """Rows in order. `where` names the last one; `state` is the place behind it."""

    where: str

    @abstractmethod
    def state(self) -> State:
        """The place behind the last row, as plain JSON."""


class Source(ABC):
    """Rows that can be read again, in another order of their parts every epoch."""

    name: str

    @abstractmethod
    def open(self, epoch: int, state: State | None = None) -> Reader:
        """Rows of an epoch, from a noted place on."""


class Files(Source):
    """Local files of any formats in `SUFFIXES`; the order of the files depends on seed and epoch."""

    def __init__(self, name: str, paths: list[Path], seed: int = 0) -> None:
        self.name, self.paths, self.seed = name, paths, seed

    def open(self, epoch: int, state: State | None = None) -> Reader:
        order = random.Random(f"{self.seed}/{epoch}").sample(self.paths, len(self.paths))
        return _FilesReader(order, state)


class _FilesReader(Reader):
    def __init__(self, paths: list[Path], state: State | None) -> None:
        self.paths, self.where = paths, ""
        self.file: int = state["file"] if state else 0
        self.at: Any = state["at"] if state else None
        self.rows: Iterator[Placed] | None = None

    def __next__(self) -> Row:
        while self.file < len(self.paths):
            if self.rows is None:
                self.rows = read_file(self.paths[self.file], self.at)
            found = next(self.rows, None)
            if found is not None:
                row, self.at, self.where = found
                return row
            self.file, self.at, self.rows = self.file + 1, None, None
        raise StopIteration

    def state(self) -> State:
        return {"file": self.file, "at": self.at}


def read_file(path: Path, at: Any = None) -> Iterator[Placed]:
    """Rows of a file behind a place, each with the place behind it and words for where it is.

    Raises LoopedError for a file that is damaged, with the line where there is one.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet(path, at)
        elif suffix == ".arrow":
            yield from _arrow(path, at)
        elif suffix in PLAIN:
            yield from _plain(path, at)
        elif suffix == ".json" and _is_array(path):
            yield from _array(path, at)
        else:
            yield from _lines(path, at)
    except (OSError, UnicodeDecodeError) as error:
        raise LoopedError(f"cannot read the data file {path} ({error})") from error


def _lines(path: Path, at: Any) -> Iterator[Placed]:
    byte, number = at or (0, 0)
    with path.open("rb") as file:
        file.seek(byte)
        for raw in file:
            byte, number = byte + len(raw), number + 1
            if not raw.strip():
                continue
            where = f"{path}, line {number},"
            try:
                row = json.loads(raw.decode("utf-8"))
            except ValueError as error:
                raise LoopedError(f"{where} is not JSON; give one object a line") from error
            if not isinstance(row, dict):
                raise LoopedError(f"{where} is not a JSON object; give one object a line")
            yield row, (byte, number), where


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _array(path: Path, at: Any) -> Iterator[Placed]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoopedError(f"{path} is not JSON ({error})") from error
    for index in range(at or 0, len(rows)):
        where = f"{path}, item {index + 1},"
        if not isinstance(rows[index], dict):
            raise LoopedError(f"{where} is not a JSON object; give an array of objects or one object a line")
        yield rows[index], index + 1, where


def _plain(path: Path, at: Any) -> Iterator[Placed]:
    byte, number = at or (0, 0)
    piece, size = [], 0
    with path.open("rb") as file:
        file.seek(byte)
        for raw in itertools.chain(file, (b"",)):
            byte += len(raw)
            piece.append(raw)
            size += len(raw)
            if raw and (size < PIECE or raw.strip()):
                continue
            text = b"".join(piece).decode("utf-8").strip()
            if text:
                number += 1
                yield {"text": text}, (byte, number), f"{path}, part {number},"
            piece, size = [], 0


def _parquet(path: Path, at: Any) -> Iterator[Placed]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise LoopedError(f"reading {path} needs the package pyarrow; install looped[train]") from error
    group, skip = at or (0, 0)
    try:
        file = parquet.ParquetFile(path)
        for group in range(group, file.num_row_groups):  # noqa: B020, it goes on at the noted group
            done = 0
            for batch in file.iter_batches(batch_size=512, row_groups=[group]):
                first, done = done, done + len(batch)
                for index, row in enumerate(batch.slice(max(0, skip - first)).to_pylist(), max(first, skip)):
                    yield row, (group, index + 1), f"{path}, row group {group}, row {index + 1},"
            skip = 0
    except ArrowException as error:
        raise LoopedError(f"{path} is not a Parquet file ({one_line(error)})") from error


def _arrow(path: Path, at: Any) -> Iterator[Placed]:
    datasets = library(str(path))
    try:
        rows = datasets.Dataset.from_file(str(path))
    except Exception as error:  # Arrow and datasets each raise their own for a file that is none
        raise LoopedError(
            f"{path} is not an Arrow file of a data set ({type(error).__name__}: {one_line(error)})"
        ) from error
    for index in range(at or 0, len(rows)):
        yield rows[index], index + 1, f"{path}, row {index + 1},"


def library(name: str) -> Any:
    """The package `datasets`. Raises LoopedError where it is missing."""
    try:
        import datasets
    except ImportError as error:
        raise LoopedError(f"reading {name} needs the package datasets; install looped[train]") from error
    return datasets


def find_files(name: str) -> list[Path] | None:
    """Files of a path, folder, glob, or saved data set (`folder:split`), sorted; None where the name is no local one.

    Raises LoopedError for paths where nothing can be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise LoopedError(f"cannot read {name}; data files end in {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _in_folder(name, path, None)
    before, colon, split = name.rpartition(":")
    if colon and Path(before).expanduser().is_dir():
        return _in_folder(before, Path(before).expanduser(), split)
    if any(mark in name for mark in "*?["):
        found = sorted(Path(place) for place in glob.glob(str(path), recursive=True))
        files = [file for file in found if file.is_file() and file.suffix.lower() in SUFFIXES]
        if not files:
            raise LoopedError(f"no file that ends in {', '.join(SUFFIXES)} matches {name}")
        return files
    if path.suffix.lower() in SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise LoopedError(
            f"there is no data file {name}; give a file, folder or glob, 'embedded', or a hub data set owner/name"
        )
    return None


def _in_folder(name: str, folder: Path, split: str | None) -> list[Path]:
    splits = sorted(child.name for child in folder.iterdir() if child.is_dir())
    if split is None and (folder / "dataset_dict.json").is_file():
        split = "train"
    if split is not None:
        if split not in splits:
            raise LoopedError(f"{name} has no split {split!r}; it has {', '.join(splits) or 'none'}")
        folder = folder / split
    saved = sorted(folder.glob("data-*.arrow"))
    files = saved or sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.name not in _CARDS and file.is_file()
    )
    if not files:
        raise LoopedError(f"the folder {folder} holds no file that ends in {', '.join(SUFFIXES)}")
    return files
