"""What every family file is made of: config keys read with care, and a table of where official tensors lie in ours."""

from __future__ import annotations

from typing import Any, NamedTuple

from looped.errors import LoopedError


class Piece(NamedTuple):
    """Rows `start:stop` of parameter `param` are the official tensor `official` (all rows where `stop` is None)."""

    official: str
    param: str
    start: int = 0
    stop: int | None = None


def need(raw: dict[str, Any], *names: str) -> None:
    """Refuse a `config.json` without these keys."""
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise LoopedError(f"config.json lacks {', '.join(missing)}")


def ids(value: Any) -> tuple[int, ...]:
    """Token ids given as one number, a list, or null."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)
