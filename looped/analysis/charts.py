"""The report's charts, each a function from results to SVG or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from looped.analysis.palette import html as coloured
from looped.analysis.palette import shade
from looped.analysis.results import FIXED, Piece, ScoreRow, Scores
from looped.analysis.svg import Scale, Svg, nice_ceiling

if TYPE_CHECKING:
    from looped.analysis.offline_results import OfflineResult


class Look(NamedTuple):
    """How a series is drawn: a class of the style sheet, and a shape that tells it apart without colour."""

    kind: str
    shape: str


FIXED_LOOK = Look("fixed", "disc")
LOOKS = (Look("s1", "disc"), Look("s2", "square"), Look("s3", "triangle"), Look("s4", "diamond"))


def looks(gates: Sequence[str]) -> dict[str, Look]:
    """One look for each gate, by its place in the list; the fixed depths are grey."""
    others = [gate for gate in gates if gate != FIXED]
    return {FIXED: FIXED_LOOK} | {gate: LOOKS[i % len(LOOKS)] for i, gate in enumerate(others)}


def legend(gates: Sequence[str]) -> str:
    """The series of the accuracy panels."""
    entries = []
    for gate, look in looks(gates).items():
        if gate not in gates:
            continue
        swatch = Svg(26, 14, "")
        swatch.path([(1, 7), (25, 7)], f"series {look.kind}")
        swatch.mark(13, 7, look.shape, f"mark {look.kind}")
        entries.append(f'<li><span class="swatch" aria-hidden="true">{swatch}</span>{escape(gate)}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def accuracy_panel(scores: Scores, layout: str) -> str:
    """Accuracy against mean depth under one layout, a line for each gate, bars of one standard error."""
    left, right, top, bottom = 34, 12, 8, 38
    svg = Svg(320, 230, f"accuracy against mean depth, layout {layout}")
    x = Scale(1, scores.max_loops, left, svg.width - right)
    y = Scale(0, 1, svg.height - bottom, top)
    for share in (0, 0.25, 0.5, 0.75, 1):
        svg.line(left, y(share), svg.width - right, y(share), "axis" if share == 0 else "grid")
        svg.text(left - 6, y(share) + 3.5, f"{share:.0%}", anchor="end")
    step = max(1, round(scores.max_loops / 8))
    for depth in range(1, scores.max_loops + 1, step):
        svg.text(x(depth), y(0) + 15, str(depth), anchor="middle")
    svg.text((left + svg.width - right) / 2, svg.height - 5, "mean depth (loops a token)", "label", "middle")
    for gate, look in looks(scores.gate_names).items():
        _series(svg, scores.of(layout, gate), look, x, y)
    return str(svg)


def _series(svg: Svg, rows: Sequence[ScoreRow], look: Look, x: Scale, y: Scale) -> None:
    svg.path([(x(row.mean_depth), y(row.accuracy)) for row in rows], f"series {look.kind}")
    for row in rows:
        low, high = max(0.0, row.accuracy - row.stderr), min(1.0, row.accuracy + row.stderr)
        svg.line(x(row.mean_depth), y(low), x(row.mean_depth), y(high), f"error {look.kind}")
    for row in rows:
        svg.mark(x(row.mean_depth), y(row.accuracy), look.shape, f"mark {look.kind}", describe(row))


def describe(row: ScoreRow) -> str:
    """A score in words."""
    policy = f"depth {row.max_depth}" if row.threshold is None else f"{row.gate}, threshold {row.threshold:g}"
    return f"{row.layout}, {policy}: {row.share} right at mean depth {row.mean_depth:.2f} (n = {row.n})"


def throughput(bench: OfflineResult) -> str:
    """Tokens a second of each scheduler; whiskers from the slowest to the fastest round; the bound as a dashed line."""
    left, right, top, row, bottom = 76, 16, 26, 44, 34
    svg = Svg(640, top + row * len(bench.modes) + bottom, "throughput of the schedulers against the bound")
    cb = bench.modes.get("cb")
    bound = cb.tok_s * bench.s_e2e if cb and bench.s_e2e else None
    fastest = max(max(mode.runs) for mode in bench.modes.values())
    x = Scale(0, nice_ceiling(1.12 * max(fastest, bound or 0)), left, svg.width - right)
    foot = top + row * len(bench.modes)
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = share * x.high
        svg.line(x(value), top - 4, x(value), foot, "axis" if share == 0 else "grid")
        svg.text(x(value), foot + 15, f"{value:.0f}", anchor="middle")
    svg.text((left + svg.width - right) / 2, svg.height - 4, "generated tokens a second", "label", "middle")
    for i, (name, mode) in enumerate(bench.modes.items()):
        y = top + row * i + 7
        svg.text(left - 10, y + 19, name, "name", "end")
        title = f"{name}: {mode.tok_s:.0f} tokens a second, rounds from {min(mode.runs):.0f} to {max(mode.runs):.0f}"
        svg.rect(left, y, x(mode.tok_s) - left, 30, "bar base" if name == "cb" else "bar", radius=3, title=title)
        svg.line(x(min(mode.runs)), y + 24, x(max(mode.runs)), y + 24, "whisker")
        text = f"{mode.tok_s:.0f}" + (f"  ({mode.speedup:.2f} × cb)" if mode.speedup and name != "cb" else "")
        svg.text(left + 10, y + 19, text, "inbar")
    if bound is not None:
        svg.line(x(bound), top - 8, x(bound), foot, "bound")
        svg.text(x(bound) - 6, top - 12, f"bound S_e2e: {bench.s_e2e:.2f} × cb", "boundtext", "end")
    return str(svg)


def exits(rows: Sequence[tuple[str, Sequence[int]]], max_loops: int) -> str:
    """The share of decode tokens that left at each depth: one bar for each (name, counts by depth from 1)."""
    left, right, height = 196, 12, 30
    svg = Svg(640, height * len(rows) + 8, "share of tokens by exit depth")
    x = Scale(0, 1, left, svg.width - right)
    for i, (name, counts) in enumerate(rows):
        y, total, start = 4 + height * i, max(1, sum(counts)), 0.0
        svg.text(left - 10, y + 16, name, "name", "end")
        for depth, count in enumerate(counts, start=1):
            share = count / total
            if not count:
                continue
            width = x(start + share) - x(start)
            title = f"{name}: {share:.1%} of tokens left at depth {depth}"
            fill = shade(depth, max_loops).hex
            svg.rect(x(start) + 1, y, max(width - 2, 0.5), 24, "depth", fill=fill, radius=2, title=title)
            if share >= 0.08:
                svg.text(x(start) + width / 2, y + 16, f"{share:.0%}", "indepth", "middle")
            start += share
    return str(svg)


def depth_legend(max_loops: int) -> str:
    """The colours of the depths. Deep models show the two ends and the middle."""
    depths = range(1, max_loops + 1) if max_loops <= 8 else (1, max_loops // 2, max_loops)
    entries = "".join(
        f'<li><span class="chip" style="background:{shade(depth, max_loops).hex}"></span>depth {depth}</li>'
        for depth in depths
    )
    return f'<ul class="legend">{entries}</ul>'


def tokens(pieces: Sequence[Piece], max_loops: int) -> str:
    """A text whose tokens have the colour of their depth; pointing at one shows it."""
    shown = [piece.text.lstrip() if i == 0 else piece.text for i, piece in enumerate(pieces)]
    texts = zip(shown, pieces, strict=True)
    return "".join(coloured(text, piece.depth, max_loops) for text, piece in texts if text)
