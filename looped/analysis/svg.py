"""Just enough SVG for the report's charts: shapes with classes, coloured by the page's style sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape


class Svg:
    """A drawing of `width` x `height` units that scales with the page. `label` is what a screen reader says."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, stroke: str | None = None) -> None:
        """An open polyline. `stroke` overrides the class's colour."""
        if len(points) > 1:
            steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            style = f' style="stroke:{stroke}"' if stroke else ""
            self._parts.append(f'<path class="{kind}" d="M{steps}"{style}/>')

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        *,
        fill: str | None = None,
        radius: float = 0,
        title: str = "",
    ) -> None:
        """`fill` overrides the class's colour."""
        style = f' style="fill:{fill}"' if fill else ""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'rx="{radius:g}"{style}>{tip}</rect>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "start") -> None:
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def mark(self, x: float, y: float, shape: str, kind: str, title: str = "") -> None:
        """A data point; its shape says the same as its colour, for those who cannot tell colours apart.

        A larger invisible disc behind it makes it easy to point at.
        """
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<g class="{kind}">{tip}<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="9"/>{SHAPES[shape](x, y)}</g>'
        )

    def _add(self, tag: str, kind: str, **places: float) -> None:
        attributes = " ".join(f'{name}="{value:.1f}"' for name, value in places.items())
        self._parts.append(f'<{tag} class="{kind}" {attributes}/>')

    def __str__(self) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(self.label)}">'
            f"{''.join(self._parts)}</svg>"
        )


def _polygon(x: float, y: float, corners: Sequence[tuple[float, float]]) -> str:
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}"/>'


def _disc(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _square(x: float, y: float) -> str:
    return _polygon(x, y, ((-3.7, -3.7), (3.7, -3.7), (3.7, 3.7), (-3.7, 3.7)))


def _triangle(x: float, y: float) -> str:
    return _polygon(x, y, ((0, -5), (4.8, 3.6), (-4.8, 3.6)))


def _diamond(x: float, y: float) -> str:
    return _polygon(x, y, ((0, -5.4), (5.4, 0), (0, 5.4), (-5.4, 0)))


SHAPES: dict[str, Callable[[float, float], str]] = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
}


class Scale:
    """Values from `low` to `high` onto units from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def nice_ceiling(value: float) -> float:
    """The next round number at or above a positive value: 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten."""
    power = 1.0
    while value > 10 * power:
        power *= 10
    while value <= power:
        power /= 10
    return next(step * power for step in (1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
