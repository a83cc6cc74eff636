"""Data sets of the hub, streamed by `datasets`; several splits are mixed by their sizes."""

from __future__ import annotations

import random
from typing import Any

from looped.data.rows import Reader, Row, Source, State, library
from looped.errors import LoopedError, one_line

NEMOTRON = "nvidia/Nemotron-Post-Training-Dataset-v2"
DEFAULT = f"{NEMOTRON}:math+code+stem+chat"
"""What the authors of continuous depth batching distilled their gates on."""


def find_hub(name: str, seed: int = 0) -> Source:
    """The source of `owner/name[:config][:split+split]`; without splits `train`.

    A single part behind the name is a split where the data set has one of that name, else a configuration. Raises
    LoopedError for what is not there, naming what is, and where `datasets` or the network is missing.
    """
    repository, *parts = name.split(":")
    if repository.count("/") != 1:
        raise LoopedError(f"there is no data file {name}, and data sets of the hub are named owner/name")
    if len(parts) > 2:
        raise LoopedError(f"{name} has too many parts; a hub data set is given as name[:config][:split+split]")
    config, wanted = (parts[0] or None, parts[1]) if len(parts) == 2 else (None, "".join(parts))
    try:
        found = _load(repository, config, name)
    except LoopedError as error:
        if len(parts) != 1 or not isinstance(error.__cause__, ValueError):
            raise
        config, wanted = wanted, ""  # a data set of several configurations wants one before it says its splits
        found = _load(repository, config, name)
    if len(parts) == 1 and wanted and not set(wanted.split("+")) & set(found):
        try:
            found, config, wanted = _load(repository, wanted, name), wanted, ""
        except LoopedError as error:
            if not isinstance(error.__cause__, ValueError):
                raise
    splits = [split for split in (wanted or "train").split("+") if split]
    missing = [split for split in splits if split not in found]
    if missing:
        raise LoopedError(f"{repository} has no split {missing[0]!r}; it has {', '.join(map(str, found))}")
    sources = [Streamed(f"{repository}:{split}", found[split]) for split in splits]
    return sources[0] if len(sources) == 1 else Mixture(name, sources, [_size(source) for source in sources], seed)


def _load(repository: str, config: str | None, name: str) -> dict[str, Any]:
    """The splits of a data set by name."""
    datasets = library(name)
    try:
        return dict(datasets.load_dataset(repository, config, streaming=True))
    except Exception as error:  # datasets raises a different class for every way a name or a network can fail
        raise LoopedError(
            f"cannot load the data set {name!r} ({type(error).__name__}: {one_line(error)}); "
            "check the name and the network, or give local files"
        ) from error


def _size(source: Streamed) -> float:
    """Rows of a split as its card says them, 1 where it does not."""
    try:
        return float(source.rows.info.splits[source.rows.split].num_examples) or 1.0
    except (AttributeError, KeyError, TypeError):
        return 1.0


class Streamed(Source):
    """One split, as an `IterableDataset`, which notes its own place: read by one reader at a time."""

    def __init__(self, name: str, rows: Any) -> None:
        self.name, self.rows = name, rows

    def open(self, epoch: int, state: State | None = None) -> Reader:
        return _StreamedReader(self.name, self.rows, state)


class _StreamedReader(Reader):
    def __init__(self, name: str, rows: Any, state: State | None) -> None:
        self.name, self.where, self.number = name, name, state["number"] if state else 0
        self.begun = rows.skip(0)  # an object of its own, for what is loaded stays in it
        self.loaded: State | None = state["rows"] if state else None
        if self.loaded:
            self.begun.load_state_dict(self.loaded)
        self.iterator, self.fresh = iter(self.begun), True

    def __next__(self) -> Row:
        try:
            row: Row | None = next(self.iterator, None)
        except Exception as error:  # a connection that broke, a shard that is damaged
            raise LoopedError(
                f"reading {self.name} failed behind row {self.number} ({type(error).__name__}: {one_line(error)}); "
                "check the network, or give local files"
            ) from error
        if row is None:
            raise StopIteration
        self.number, self.fresh = self.number + 1, False
        self.where = f"{self.name}, row {self.number},"
        return row

    def state(self) -> State:
        # Until a row is read, what `datasets` says of itself is the beginning, whatever was loaded.
        return {"number": self.number, "rows": self.loaded if self.fresh else self.begun.state_dict()}


class Mixture(Source):
    """Rows of several sources, drawn with weights, until all have ended."""

    def __init__(self, name: str, sources: list[Streamed], weights: list[float], seed: int) -> None:
        self.name, self.sources, self.weights, self.seed = name, sources, weights, seed

    def open(self, epoch: int, state: State | None = None) -> Reader:
        return _MixtureReader(self, epoch, state)


class _MixtureReader(Reader):
    def __init__(self, mixture: Mixture, epoch: int, state: State | None) -> None:
        self.where, self.salt = mixture.name, f"{mixture.seed}/{epoch}"
        self.draws: int = state["draws"] if state else 0
        self.ended: list[int] = list(state["ended"]) if state else []
        parts = state["parts"] if state else [None] * len(mixture.sources)
        self.readers = [source.open(epoch, part) for source, part in zip(mixture.sources, parts, strict=True)]
        self.weights = mixture.weights

    def __next__(self) -> Row:
        while len(self.ended) < len(self.readers):
            left = [index for index in range(len(self.readers)) if index not in self.ended]
            dice = random.Random(f"{self.salt}/{self.draws}")
            drawn = dice.choices(left, [self.weights[index] for index in left])[0]
            for row in self.readers[drawn]:
                self.draws += 1
                self.where = self.readers[drawn].where
                return row
            self.ended.append(drawn)
        raise StopIteration

    def state(self) -> State:
        return {"draws": self.draws, "ended": list(self.ended), "parts": [reader.state() for reader in self.readers]}
