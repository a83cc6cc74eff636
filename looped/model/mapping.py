"""What every family file is made of: config keys read with care, and a table of where official tensors lie in ours."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from looped.errors import LoopedError, shown

# Far above any model there is: a config beyond them is damaged, and would exhaust the memory before it fails.
MOST = 1 << 31
MOST_REPEATS = 1 << 14


class Piece(NamedTuple):
    """Rows `start:stop` of parameter `param` are the official tensor `official` (all rows where `stop` is None)."""

    official: str
    param: str
    start: int = 0
    stop: int | None = None


class Keys:
    """A `config.json`, read key by key: null counts as absent, and a value of the wrong type is refused by name."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw

    def need(self, *names: str) -> None:
        """Refuse a file without these keys."""
        missing = [name for name in names if self._raw.get(name) is None]
        if missing:
            raise LoopedError(f"config.json lacks {', '.join(missing)}")

    def count(self, name: str, default: int = 0, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _refused(name, f"a whole number from {least} to {most}", value)
        return value

    def repeats(self, name: str, default: int = 0, least: int = 1) -> int:
        """A number of layers or loops."""
        return self.count(name, default, least, MOST_REPEATS)

    def number(self, name: str, default: float) -> float:
        """A finite number that is not negative."""
        value = self._raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise _refused(name, "a number of at least 0", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _refused(name, "true or false", value)
        return value

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise _refused(name, "a text", value)
        return value

    def token(self, name: str, default: int | None = None) -> int | None:
        """One token id, or none."""
        found = self.tokens(name)
        if len(found) > 1:
            raise _refused(name, "one token id", list(found))
        return found[0] if found else default

    def tokens(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """Token ids given as one number or a list of them."""
        value = self._raw.get(name)
        if value is None:
            return () if default is None else (default,)
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            raise _refused(name, "a token id or a list of them", value)
        return tuple(found)

    def section(self, name: str) -> Keys:
        """The object under a key; an empty one where there is none."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise _refused(name, "an object", value)
        return Keys(value or {})

    def holds(self, name: str) -> bool:
        """Whether the key is there with a value other than null, false, 0 or an empty one."""
        return bool(self._raw.get(name))


def _refused(name: str, wanted: str, value: Any) -> LoopedError:
    return LoopedError(f"config.json: {name} must be {wanted}, got {shown(value)}")


def ids(value: Any) -> tuple[int, ...]:
    """Token ids of a `generation_config.json`, given as one number, a list, or null."""
    return Keys({"eos_token_id": value}).tokens("eos_token_id")
