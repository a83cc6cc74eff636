"""Exit depths from outside: a distribution over them, or a list for each request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from looped.errors import LoopedError

Exits = tuple[int, ...]
"""Exit depths of the decode passes of one request, in order."""


def parse_shares(text: str, max_loops: int, flag: str) -> dict[int, float]:
    """A distribution over exit depths: `uniform`, or depth:share pairs such as `2:0.5,3:0.3,4:0.2`.

    Raises `LoopedError`, which names `flag`, for a depth outside 1..R, a negative share, or a sum that is not 1.
    """
    if text.strip() == "uniform":
        return {depth: 1 / max_loops for depth in range(1, max_loops + 1)}
    shares: dict[int, float] = {}
    for part in text.split(","):
        depth, _, share = part.partition(":")
        try:
            shares[int(depth)] = float(share)
        except ValueError:
            raise LoopedError(f"{flag} takes `uniform` or pairs such as 2:0.5,3:0.3,4:0.2, got {text!r}") from None
    _check_range(shares, max_loops, f"{flag} {text}")
    if not (min(shares.values()) >= 0 and math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6)):
        raise LoopedError(f"{flag} {text}: shares must be at least 0 and sum to 1")
    return shares


def draw(shares: dict[int, float], num_requests: int, num_passes: int, seed: int) -> list[Exits]:
    """Independent depths for `num_passes` decode passes of every request."""
    rng = Random(seed)
    depths, weights = list(shares), list(shares.values())
    return [tuple(rng.choices(depths, weights, k=num_passes)) for _ in range(num_requests)]


def is_lists(text: str) -> bool:
    """Whether a text is lists of depths or a file of them, not a distribution."""
    return text.lstrip().startswith(("[", "{")) or Path(text).suffix in (".json", ".jsonl")


def parse_lists(text: str, max_loops: int, flag: str) -> list[Exits]:
    """Exit depths by request: JSON such as `[[2,3],[4]]` or `[2,3]`, or a .json or .jsonl file.

    In place of a list may stand an object with `depths`, as `looped generate --json` prints: the first of them is the
    prompt's and left out. Raises `LoopedError`, which names `flag` or the file, for anything else and for a depth
    outside 1..R.
    """
    where, content = flag, text
    if not text.lstrip().startswith(("[", "{")):
        where = text
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoopedError(f"{text} cannot be read ({error})") from error
    try:
        if where.endswith(".jsonl"):
            value: Any = [json.loads(line) for line in content.splitlines() if line.strip()]
        else:
            value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LoopedError(f"{where} is not valid JSON ({error})") from error
    if isinstance(value, dict) or (isinstance(value, list) and value and not isinstance(value[0], list | dict)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise LoopedError(f"{where} must hold lists of exit depths, such as [[2,3],[4]]")
    lists = [_exits(item, where) for item in value]
    for exits in lists:
        _check_range(exits, max_loops, where)
    return lists


def _exits(item: Any, where: str) -> Exits:
    depths = item.get("depths") if isinstance(item, dict) else item
    if not isinstance(depths, list) or not all(type(depth) is int for depth in depths):
        raise LoopedError(f"{where} must hold lists of exit depths, such as [[2,3],[4]], got {str(item)[:60]}")
    return tuple(depths[1:] if isinstance(item, dict) else depths)


def _check_range(depths: Iterable[int], max_loops: int, where: str) -> None:
    wrong = [depth for depth in depths if not 1 <= depth <= max_loops]
    if wrong:
        raise LoopedError(f"{where}: depths must be between 1 and {max_loops}, got {wrong[0]}")
