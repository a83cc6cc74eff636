"""Curves over training of runs, one row a run: loss by depth, exits, jumps between neighbours, whether depth pays.

The forms of ragged KV, figures 5, 7 and 9: columns share their axes, so that rows compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from looped.analysis.charts import FIXED_LOOK, LOOKS
from looped.analysis.palette import shade
from looped.analysis.standalone import standalone
from looped.analysis.svg import Scale, Svg, nice_ceiling
from looped.train.pretrain.log import RunLog

_PANEL, _HEIGHT, _LEFT, _GAP, _TOP, _ROW = 218, 150, 52, 52, 34, 232
_SETTLED = 0.1
"""Part of a run whose losses do not set the axis: they fall from log V."""


class _Line(NamedTuple):
    """A series of one panel: its figure's name, label, and a colour or a class of the style sheet."""

    key: str
    label: str
    stroke: str | None
    kind: str


class _Column(NamedTuple):
    """A panel of every run; `top` is None where the largest value decides."""

    title: str
    lines: Callable[[RunLog], list[_Line]]
    low: float
    top: float | None


def _by_depth(stem: str) -> Callable[[RunLog], list[_Line]]:
    def lines(run: RunLog) -> list[_Line]:
        loops = run.loops
        return [_Line(f"{stem}_{d}", f"depth {d}", shade(d, loops).hex, "series") for d in range(1, loops + 1)]

    return lines


def _fixed(*named: tuple[str, str]) -> Callable[[RunLog], list[_Line]]:
    kinds = [f"series {look.kind}" for look in (*LOOKS, FIXED_LOOK)]
    return lambda run: [_Line(key, label, None, kind) for (key, label), kind in zip(named, kinds, strict=False)]


_COLUMNS = (
    _Column("loss by depth", _by_depth("ce"), 0, None),
    _Column("loss by depth, answers", _by_depth("answer_ce"), 0, None),
    _Column("loss by depth, direct answers", _by_depth("direct_ce"), 0, None),
    _Column("share of exits by depth", _by_depth("hard_exit"), 0, 1),
    _Column("neighbours' exits", _fixed(("jump_0", "same"), ("jump_1", "1 apart"), ("jump_2", "more")), 0, 1),
    _Column(
        "do exits go where depth pays",
        _fixed(
            ("gain_correlation", "correlation with the gain"),
        ),
        -0.2,
        1,
    ),
    _Column("loss under the layout", _fixed(("ragged_loss", "at exits"), ("loss", "dense objective")), 0, None),
)


def curves(runs: Sequence[RunLog]) -> str:
    """One SVG of the runs, a row each. A figure that no run logs has no column."""
    columns = [
        column for column in _COLUMNS if any(_points(run, line.key) for run in runs for line in _own(column, run))
    ]
    width = _LEFT + len(columns) * _PANEL + (len(columns) - 1) * _GAP + 36
    svg = Svg(width, _TOP + _ROW * len(runs) + 8, "figures over training")
    for index, column in enumerate(columns):
        left = _LEFT + index * (_PANEL + _GAP)
        top = column.top if column.top is not None else _ceiling(column, runs)
        for number, run in enumerate(runs):
            begin = _TOP + number * _ROW
            if not index:
                svg.text(left, begin - 18, run.name, "name")
            _panel(svg, column, run, left, begin, top)
    return standalone(svg)


def _own(column: _Column, run: RunLog) -> list[_Line]:
    """The lines of a column; the loss under a layout only where the run has steps under one."""
    lines = column.lines(run)
    return lines if lines[0].key != "ragged_loss" or _points(run, "ragged_loss") else []


def _points(run: RunLog, key: str) -> list[tuple[float, float]]:
    """(millions of tokens, value) of a figure."""
    return [(row["tokens"] / 1e6, row[key]) for row in run.rows if key in row and math.isfinite(row[key])]


def _ceiling(column: _Column, runs: Sequence[RunLog]) -> float:
    most = 0.0
    for run in runs:
        last = run.rows[-1]["tokens"] / 1e6
        values = [v for line in _own(column, run) for at, v in _points(run, line.key) if at >= _SETTLED * last]
        most = max(most, *values, 0.0)
    return nice_ceiling(most or 1.0)


def _panel(svg: Svg, column: _Column, run: RunLog, left: float, begin: float, top: float) -> None:
    last = max(row["tokens"] for row in run.rows) / 1e6
    x = Scale(0, last, left, left + _PANEL)
    y = Scale(column.low, top, begin + _HEIGHT, begin)
    svg.text(left, begin - 4, column.title, "label")
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = column.low + share * (top - column.low)
        svg.line(left, y(value), left + _PANEL, y(value), "grid" if share else "axis")
        svg.text(left - 6, y(value) + 3.5, f"{value:.3g}", anchor="end")
    for share in (0, 0.5, 1):
        svg.text(x(share * last), begin + _HEIGHT + 14, f"{share * last:.3g}M", anchor="middle")
    shown = [line for line in _own(column, run) if _points(run, line.key)]
    for line in shown:
        svg.path([(x(at), y(min(value, top))) for at, value in _points(run, line.key)], line.kind, stroke=line.stroke)
    for (at, up), line in zip(_places(left, begin + _HEIGHT + 30), shown, strict=False):
        svg.path([(at, up - 3.5), (at + 12, up - 3.5)], line.kind, stroke=line.stroke)
        svg.text(at + 16, up, line.label)


def _places(left: float, top: float) -> Iterator[tuple[float, float]]:
    """Where the entries of a legend stand, three a line."""
    for number in range(9):
        yield left + (number % 3) * _PANEL / 3, top + (number // 3) * 14
