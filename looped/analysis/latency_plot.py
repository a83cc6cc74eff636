"""The core step's times over batch sizes, one line a context, as an SVG that stands alone. No torch."""

from __future__ import annotations

import math

from looped.analysis.charts import LOOKS
from looped.analysis.latency import StepResult
from looped.analysis.style import STYLE
from looped.analysis.svg import Scale, Svg

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 40, 46


def plot(result: StepResult) -> str:
    """Milliseconds of a core step against the batch size, both logarithmic. Dashed lines are the floors, ticks on the
    axis the saturation batch sizes B* of the fit."""
    points = result.of("core")
    svg = Svg(_WIDTH, _HEIGHT, "time of a core step against the batch size, by context")
    batches = sorted({point.batch for point in points})
    values = [1e3 * value for point in points for value in (point.seconds, point.floor)]
    x = Scale(_log(batches[0]), max(_log(batches[-1]), _log(batches[0]) + 1), _LEFT, _WIDTH - _RIGHT)
    y = Scale(math.floor(_log(min(values))), math.ceil(_log(max(values)) + 1e-9), _HEIGHT - _BOTTOM, _TOP)
    told = result.settings
    svg.text(_LEFT, 18, f"{told['model']}, {told['kv']} layout, {told['dtype']}, {told['device']}", "name")
    for power in range(int(y.low), int(y.high) + 1):
        svg.line(_LEFT, y(power), _WIDTH - _RIGHT, y(power), "grid")
        svg.text(_LEFT - 6, y(power) + 3.5, f"{2.0**power:g}", anchor="end")
    for batch in batches:
        svg.text(x(_log(batch)), _HEIGHT - _BOTTOM + 15, str(batch), anchor="middle")
    svg.text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "batch size", "label", "middle")
    svg.text(_LEFT, _TOP - 8, "ms", "label", "end")
    for number, context in enumerate(sorted({point.context for point in points})):
        look = LOOKS[number % len(LOOKS)]
        mine = sorted((point for point in points if point.context == context), key=lambda point: point.batch)
        at = [(x(_log(point.batch)), y(_log(1e3 * point.seconds))) for point in mine]
        svg.path([(x(_log(point.batch)), y(_log(1e3 * point.floor))) for point in mine], "series fixed")
        svg.path(at, f"series {look.kind}")
        for point, (px, py) in zip(mine, at, strict=True):
            title = f"batch {point.batch}, context {context}: {1e3 * point.seconds:.3f} ms, {point.ratio:.2f} x floor"
            svg.mark(px, py, look.shape, f"mark {look.kind}", title)
        svg.text(at[-1][0] + 10, at[-1][1] + 4, f"context {context}", "label")
        star = result.step_fit.saturation.get(context) if result.step_fit else None
        if star is not None and batches[0] <= star <= batches[-1]:
            svg.line(x(_log(star)), _HEIGHT - _BOTTOM, x(_log(star)), _HEIGHT - _BOTTOM - 9, "bound")
            svg.text(x(_log(star)), _HEIGHT - _BOTTOM - 12, f"B* {star:.0f}", "boundtext", "middle")
    svg.text(_WIDTH - _RIGHT + 10, _TOP + 4, "dashed: floors", "label")
    start, _, rest = str(svg).partition(">")
    style = STYLE.replace("body {", "body_ {")  # the drawing has no page
    namespace = start.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    return f"{namespace}><style>{style}</style>{rest}\n"


def _log(value: float) -> float:
    return math.log2(value)
