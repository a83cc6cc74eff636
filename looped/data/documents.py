"""Sources of documents by name: the embedded generator, local files, data sets of the hub."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from looped.data.embedded import EMBEDDED, embedded_documents
from looped.data.formats import Format, Item
from looped.data.hub import find_hub
from looped.data.rows import Files, Source, find_files

__all__ = ["EMBEDDED", "embedded_documents", "find_source", "hub_rows", "load_documents"]


def find_source(name: str, seed: int = 0) -> Source:
    """Files of a path, folder or glob, else a data set of the hub, `owner/name[:config][:split+split]`.

    Raises LoopedError where there is nothing of that name, or no network.
    """
    files = find_files(name)
    return find_hub(name, seed) if files is None else Files(name, files, seed)


def load_documents(source: str = EMBEDDED, seed: int = 0, limit: int | None = None) -> Iterator[str]:
    """Texts of a source, in order, chats as Q and A lines.

    `source` is "embedded" (endless, seeded), a file, folder or glob, or a hub data set. Rows are messages, or prompt
    and completion, or question and answer, or text. Raises LoopedError for a missing file, a row without these columns
    (naming what was found), or no network.
    """
    texts = embedded_documents(seed) if source == EMBEDDED else _texts(find_source(source))
    return texts if limit is None else itertools.islice(texts, limit)


def _texts(source: Source) -> Iterator[str]:
    read, rows = Format().read, source.open(0)
    for row in rows:
        item = read(row, rows.where)
        if item is not None:
            yield _text(item)


def _text(item: Item) -> str:
    turns = (_turn(*message) for message in item.messages)
    return item.text or "".join(turns).strip()


def _turn(role: str, content: str) -> str:
    content = content.strip()
    if role == "assistant":
        return f" {content}\n\n"
    return f"Q: {content}\nA:" if role == "user" else f"{content}\n\n"


def hub_rows(name: str, split: str, config: str | None = None) -> list[dict[str, Any]]:
    """Rows of a hub data set. Raises LoopedError where `datasets` or the network is missing."""
    return [dict(row) for row in find_hub(f"{name}:{config or ''}:{split}").open(0)]
