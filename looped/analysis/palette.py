"""Depth as a colour, the same on a terminal and in HTML.

The ramp keeps its luminance between 0.10 and 0.30, so that text in it has a contrast of at least 3 against black and
against white: nobody has to know the reader's background. Shallow is blue, deep is red.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple


class Shade(NamedTuple):
    """One colour: its number in the 256-colour table of terminals, and the same as `#rrggbb`."""

    ansi: int
    hex: str


def _shade(ansi: int) -> Shade:
    """A colour of the 6 x 6 x 6 cube of the 256-colour table."""
    levels = (0, 95, 135, 175, 215, 255)
    red, rest = divmod(ansi - 16, 36)
    green, blue = divmod(rest, 6)
    return Shade(ansi, f"#{levels[red]:02x}{levels[green]:02x}{levels[blue]:02x}")


RAMP = tuple(_shade(number) for number in (33, 31, 30, 29, 64, 100, 136, 166, 160, 161))
RESET = "\x1b[0m"
BARS = "▁▂▃▄▅▆▇█"


def shade(depth: int, max_depth: int) -> Shade:
    """The colour of `depth` loops out of 1..`max_depth`, spread over the whole ramp."""
    share = (min(max(depth, 1), max_depth) - 1) / max(max_depth - 1, 1)
    return RAMP[round(share * (len(RAMP) - 1))]


def ansi(text: str, depth: int, max_depth: int) -> str:
    """`text` in its colour for a terminal; the colour ends with the text, so a cut-off stream leaves none behind."""
    return f"\x1b[38;5;{shade(depth, max_depth).ansi}m{text}{RESET}" if text else ""


def html(text: str, depth: int, max_depth: int) -> str:
    """`text`, escaped, in its colour for a page, with the depth as a tooltip."""
    return f'<span style="color:{shade(depth, max_depth).hex}" title="depth {depth}">{escape(text)}</span>'


def depth_counts(depths: Sequence[int]) -> dict[int, int]:
    """How many tokens left at each depth, by rising depth."""
    return {depth: depths.count(depth) for depth in sorted(set(depths))}


def histogram(counts: Mapping[int, int], max_depth: int, color: bool) -> str:
    """One line: every depth with its bar and count, in its colour. Deep models show the depths that occur."""
    most = max(counts.values(), default=0)
    shown = range(1, max_depth + 1) if max_depth <= 8 else sorted(counts)
    return "  ".join(_entry(depth, counts.get(depth, 0), most, max_depth, color) for depth in shown)


def _entry(depth: int, count: int, most: int, max_depth: int, color: bool) -> str:
    bar = BARS[-(-count * len(BARS) // most) - 1] if count else " "
    text = f"{depth} {bar} {count}"
    return ansi(text, depth, max_depth) if color else text
