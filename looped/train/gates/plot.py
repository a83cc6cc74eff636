"""Reliability and dial of trained gates as one SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from looped.analysis.charts import FIXED_LOOK, LOOKS, Look
from looped.analysis.standalone import standalone
from looped.analysis.svg import Scale, Svg
from looped.files import write_text
from looped.train.gates.report import GateReport

_PANEL, _HEIGHT, _LEFT, _GAP, _TOP = 250, 230, 44, 62, 34


def write_plot(reports: Sequence[GateReport], max_loops: int, path: Path) -> None:
    """Write the plot of some gates' reports, whole or not at all."""
    write_text(path, plot(reports, max_loops) + "\n")


def plot(reports: Sequence[GateReport], max_loops: int) -> str:
    """Predicted against found hazards (the teacher's, the oracle's), mean depth against threshold, and what exits
    keep against mean depth: one panel each."""
    width = _LEFT + 4 * _PANEL + 3 * _GAP + 16
    foot = _TOP + _HEIGHT + 56
    rows = -(-len(reports) // 4)
    svg = Svg(width, foot + 18 * rows + 12, "reliability, dial and cost of exit gates")
    looks = [_look(i) for i in range(len(reports))]
    lefts = [_LEFT + index * (_PANEL + _GAP) for index in range(4)]
    titles = ("the teacher's hazard by predicted", "already the last token, by predicted hazard")
    for left, title in zip(lefts, (*titles, "mean depth by threshold", "token unchanged by mean depth"), strict=True):
        svg.text(left, _TOP - 14, title, "name")
    _reliability(svg, lefts[0], reports, looks, oracle=False)
    _reliability(svg, lefts[1], reports, looks, oracle=True)
    _dial(svg, lefts[2], reports, looks, max_loops)
    _cost(svg, lefts[3], reports, looks, max_loops)
    entries = [(report.gate, look) for report, look in zip(reports, looks, strict=True)]
    for index, (name, look) in enumerate([*entries, ("teacher", FIXED_LOOK)]):
        x, y = lefts[index % 4], foot + 18 * (index // 4)
        svg.mark(x, y - 4, look.shape, f"mark {look.kind}")
        svg.text(x + 12, y, name, "label")
    return standalone(svg)


def _look(index: int) -> Look:
    """Colours of the report's charts, each with every shape in turn, so that sixteen gates can be told apart."""
    shape = LOOKS[(index + index // len(LOOKS)) % len(LOOKS)].shape
    return Look(LOOKS[index % len(LOOKS)].kind, shape)


def _axes(svg: Svg, left: float, x: Scale, y: Scale, xs: Sequence[float], ys: Sequence[float], form: str = "g") -> None:
    for value in ys:
        svg.line(left, y(value), left + _PANEL, y(value), "grid")
        svg.text(left - 6, y(value) + 3.5, f"{value:{form}}", anchor="end")
    svg.line(left, y(y.low), left + _PANEL, y(y.low), "axis")
    for value in xs:
        svg.text(x(value), y(y.low) + 15, f"{value:g}", anchor="middle")


def _scales(left: float, xs: tuple[float, float], ys: tuple[float, float]) -> tuple[Scale, Scale]:
    return Scale(*xs, left, left + _PANEL), Scale(*ys, _TOP + _HEIGHT, _TOP)


def _reliability(svg: Svg, left: float, reports: Sequence[GateReport], looks: Sequence[Look], oracle: bool) -> None:
    x, y = _scales(left, (0, 1), (0, 1))
    tenths = (0, 0.25, 0.5, 0.75, 1)
    _axes(svg, left, x, y, tenths, tenths)
    svg.path([(x(0), y(0)), (x(1), y(1))], "series fixed")
    for report, look in zip(reports, looks, strict=True):
        bins = report.reliability_oracle if oracle else report.reliability_teacher
        svg.path([(x(item.predicted), y(item.found)) for item in bins], f"series {look.kind}")
        for item in bins:
            title = (
                f"{report.gate}: predicted {item.predicted:.2f}, found {item.found:.2f} ({item.share:.1%} of weight)"
            )
            svg.mark(x(item.predicted), y(item.found), look.shape, f"mark {look.kind}", title)


def _dial(svg: Svg, left: float, reports: Sequence[GateReport], looks: Sequence[Look], max_loops: int) -> None:
    places = {row["threshold"]: i for i, row in enumerate(reports[0].thresholds)}
    x, y = _scales(left, (0, max(len(places) - 1, 1)), (1, max_loops))
    _axes(svg, left, x, y, (), _whole(max_loops))
    for threshold, place in places.items():
        svg.text(x(place), y(1) + 15, f"{threshold:.2g}", anchor="middle")
    for floor in dict.fromkeys(report.floor for report in reports):
        rows = next(report for report in reports if report.floor == floor).thresholds
        line = [(x(places[row["threshold"]]), y(row["teacher_mean_depth"])) for row in rows]
        svg.path(line, "series fixed")
        for point in line:
            svg.mark(*point, FIXED_LOOK.shape, f"mark {FIXED_LOOK.kind}")
    for report, look in zip(reports, looks, strict=True):
        rows = [row for row in report.thresholds if "mean_depth" in row]
        line = [(x(places[row["threshold"]]), y(row["mean_depth"])) for row in rows]
        svg.path(line, f"series {look.kind}")
        for point, row in zip(line, rows, strict=True):
            depths = f"{row['mean_depth']:.3f}, teacher {row['teacher_mean_depth']:.3f}"
            title = f"{report.gate} at {row['threshold']:g}: {depths}"
            svg.mark(*point, look.shape, f"mark {look.kind}", title)


def _cost(svg: Svg, left: float, reports: Sequence[GateReport], looks: Sequence[Look], max_loops: int) -> None:
    low = min(point.same_token for report in reports for point in report.depth_curve)
    low = min(0.99, int(low * 20) / 20)
    x, y = _scales(left, (1, max_loops), (low, 1))
    _axes(svg, left, x, y, _whole(max_loops), [low + (1 - low) * i / 4 for i in range(5)], ".1%")
    for report, look in zip(reports, looks, strict=True):
        line = [(x(point.mean_depth), y(point.same_token)) for point in report.depth_curve]
        svg.path(line, f"series {look.kind}")
        for place, point in zip(line, report.depth_curve, strict=True):
            what = f"depth {point.mean_depth:.2f}, {point.same_token:.1%} unchanged"
            title = f"{report.gate} at {point.threshold:.3g}: {what}"
            svg.mark(*place, look.shape, f"mark {look.kind}", title)


def _whole(max_loops: int) -> list[float]:
    return [float(depth) for depth in range(1, max_loops + 1, max(1, max_loops // 8))]
