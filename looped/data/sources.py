"""Sources of documents by name: local files, folders, data sets of the hub."""

from __future__ import annotations

from collections.abc import Iterator

from looped.data.hub import find_hub
from looped.data.rows import PLAIN, Files, Row, Source, find_files, read_file
from looped.errors import LoopedError


def find_source(name: str, seed: int = 0) -> Source:
    """Files of a path, folder or glob, else a data set of the hub, `owner/name[:config][:split+split]`.

    Raises LoopedError where there is nothing of that name, or no network.
    """
    files = find_files(name)
    return find_hub(name, seed) if files is None else Files(name, files, seed)


def read_texts(name: str, column: str) -> Iterator[str]:
    """Documents of one source in order: the text in `column` of its rows, the pieces of a plain text file.

    Raises LoopedError for files that are missing or damaged, a column that is not there (naming those that are), or a
    hub that cannot be reached.
    """
    files = find_files(name)
    if files is None:
        reader = find_hub(name).open(0)
        for row in reader:
            yield _text(row, column, reader.where)
        return
    for path in files:
        plain = path.suffix.lower() in PLAIN
        for row, _, where in read_file(path):
            yield _text(row, "text" if plain else column, where)


def _text(row: Row, column: str, where: str) -> str:
    value = row.get(column)
    if isinstance(value, str):
        return value
    if column in row:
        raise LoopedError(f"{where} has no text in the column {column!r}; name another with --data.column")
    names = ", ".join(sorted(map(str, row)))
    raise LoopedError(f"{where} has no column {column!r}; it has {names}: name one with --data.column")
