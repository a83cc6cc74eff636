"""Documents for gate distillation: from the embedded generator, a JSONL or Parquet file, or a hub data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from looped.data.drills import drill_problems
from looped.data.gsm8k import columns, read_jsonl, solved
from looped.data.wordmath.generate import word_problems
from looped.data.wordmath.words import Dice
from looped.errors import LoopedError

EMBEDDED = "embedded"


def embedded_documents(seed: int = 0, drills: float = 0.35, evaluation: bool = False) -> Iterator[str]:
    """Endless word problems and drills; `drills` is the share of drill documents."""
    dice = Dice(f"embedded/{seed}/{evaluation}")
    words, short = word_problems(dice, evaluation), drill_problems(dice, evaluation)
    while True:
        yield next(short if dice.chance(drills) else words).document()


def load_documents(
    source: str = EMBEDDED, seed: int = 0, limit: int | None = None, split: str = "train"
) -> Iterator[str]:
    """Texts of a source, in order.

    `source` is "embedded" (endless, seeded), the path of a .jsonl or .parquet file, or a hub data set name. Rows have
    question and answer, or text, or messages (a list of role and content).
    Raises LoopedError for a missing file, a row without these columns (naming what was found), or no network.
    """
    texts = (
        embedded_documents(seed) if source == EMBEDDED else iter([_text(source, row) for row in _rows(source, split)])
    )
    return texts if limit is None else itertools.islice(texts, limit)


def _rows(source: str, split: str) -> list[Mapping[str, Any]]:
    path = Path(source)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in {".jsonl", ".json", ".ndjson"}:
        return list(read_jsonl(path))
    if path.is_file() and suffix == ".parquet":
        return list(_load("parquet", split="train", data_files=str(path), shown=source))
    if path.exists():
        raise LoopedError(f"cannot read {source}; give a .jsonl or .parquet file, 'embedded', or a hub data set name.")
    if suffix in {".jsonl", ".json", ".ndjson", ".parquet"} or source.startswith((".", "/", "~")):
        raise LoopedError(f"there is no data file {source}; give a .jsonl or .parquet file, 'embedded', or a hub name.")
    return list(hub_rows(source, split))


def hub_rows(name: str, split: str, config: str | None = None) -> list[dict[str, Any]]:
    """Rows of a hub data set. Raises LoopedError where `datasets` or the network is missing."""
    return _load(name, *([config] if config else []), split=split, shown=name)


def _load(*args: str, shown: str, **kwargs: str) -> list[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise LoopedError(f"reading {shown} needs the package datasets; install looped[train].") from error
    try:
        return [dict(row) for row in datasets.load_dataset(*args, **kwargs)]
    except Exception as error:  # datasets raises a different class for every way a name can fail
        reason = " ".join(str(error).split())[:160]
        raise LoopedError(
            f"cannot load the data set {shown!r} ({type(error).__name__}: {reason}); "
            "check the name and the network, or give the path of a .jsonl or .parquet file."
        ) from error


def _text(source: str, row: Mapping[str, Any]) -> str:
    if row.get("question") is not None and row.get("answer") is not None:
        return solved(str(row["question"]), str(row["answer"])).document()
    if isinstance(row.get("text"), str):
        return str(row["text"])
    if isinstance(row.get("messages"), list):
        return "".join(_turn(source, message) for message in row["messages"]).strip()
    raise LoopedError(
        f"{source} needs the columns question and answer, or text, or messages; it has {', '.join(columns([row]))}."
    )


def _turn(source: str, message: Any) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise LoopedError(f"{source}: every entry of messages needs the fields role and content, both text.")
    if message.get("role") == "assistant":
        return f" {message['content'].strip()}\n\n"
    return (
        f"Q: {message['content'].strip()}\nA:" if message.get("role") == "user" else f"{message['content'].strip()}\n\n"
    )
