"""Exits of models on the same texts: tokens coloured by depth beside each other, shares by threshold, depth by place.

The forms of ragged KV, figures 4 and 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch

from looped.analysis import charts
from looped.analysis.palette import html as coloured
from looped.analysis.palette import shade
from looped.analysis.style import STYLE
from looped.analysis.svg import Scale, Svg
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.train.pretrain import exits
from looped.train.pretrain.figures import jumps
from looped.train.pretrain.rollout import Setting, roll

THRESHOLDS = (0.3, 0.5, 0.7)
_RUNNING = 32
"""Tokens of the running mean."""
_PASSES = 4
_EXTRA = """
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 16px; }
main { max-width: 1240px; }
"""


class Traced(NamedTuple):
    """Exits of one model: its texts' tokens, the depth of the pass that each came from (None: the first one's), all
    depths by threshold, and R."""

    name: str
    pieces: list[list[tuple[str, int | None]]]
    depths: dict[float, list[torch.Tensor]]
    loops: int


@torch.no_grad()
def trace(name: str, model: LoopedLM, tokenizer: Path, texts: Sequence[str], threshold: float) -> Traced:
    """Read texts with every token leaving by the model's gate, under the layout the model is served with."""
    from looped.data.tokenizer import load

    words = load(str(tokenizer))
    layout = get_layout(model.config.default_layout)
    setting = Setting(get_layout("ragged") if layout.needs_dense else layout, passes=_PASSES)
    pieces: list[list[tuple[str, int | None]]] = []
    found: dict[float, list[torch.Tensor]] = {at: [] for at in sorted({threshold, *THRESHOLDS})}
    for text in texts:
        ids = words.encode(text, add_special_tokens=False).ids[: model.config.max_positions]
        inputs = torch.tensor([ids], device=model.device)
        for at, depths in found.items():
            leave = partial(exits.by_threshold, model, at)
            depths.append(roll(model, inputs, model.config.max_loops, setting, leave).depths[0].cpu())
        own = [None, *found[threshold][-1].tolist()]
        ends = [words.decode(ids[: end + 1], skip_special_tokens=False) for end in range(len(ids))]
        starts = ["", *ends[:-1]]
        pieces.append([(end[len(start) :], depth) for start, end, depth in zip(starts, ends, own, strict=False)])
    return Traced(name, pieces, found, model.config.max_loops)


def page(traced: Sequence[Traced], threshold: float) -> str:
    """The HTML page of several models that read the same texts."""
    lead = f"Tokens leave by the gate of their model at {threshold:g}; colours are depths of the passes they come from."
    parts = [f'<h1>Exits on the same texts</h1><p class="lead">{lead}</p>']
    parts.append(charts.depth_legend(max(one.loops for one in traced)))
    parts.append(f"<section><h2>Exits and jumps by threshold</h2>{_shares(traced)}</section>")
    for number in range(len(traced[0].pieces)):
        columns = "".join(f"<div><h3>{escape(one.name)}</h3>{_text(one, number)}</div>" for one in traced)
        parts.append(f"<section><div class='beside'>{columns}</div></section>")
    places = "".join(
        f"<figure><figcaption>{escape(one.name)}</figcaption>{_places(one, threshold)}</figure>" for one in traced
    )
    note = f'<p class="note">All texts in a row; the line is the mean of {_RUNNING} tokens.</p>'
    parts.append(f"<section><h2>Depth by place</h2>{note}{places}</section>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Exits on the same texts</title>\n'
        f"<style>{STYLE}{_EXTRA}</style>\n</head>\n<body>\n<main>\n{chr(10).join(parts)}\n</main>\n</body>\n</html>\n"
    )


def _text(one: Traced, number: int) -> str:
    shown = (escape(text) if depth is None else coloured(text, depth, one.loops) for text, depth in one.pieces[number])
    return f'<p class="tokens">{"".join(shown)}</p>'


def _shares(traced: Sequence[Traced]) -> str:
    """Bars of exits, and a table of what lies between neighbours, for every model and threshold."""
    loops = max(one.loops for one in traced)
    bars: list[tuple[str, list[int]]] = []
    rows = []
    for one in traced:
        for at, depths in one.depths.items():
            flat = torch.cat(depths)
            bars.append((f"{one.name}, {at:g}", torch.bincount(flat - 1, minlength=loops).tolist()))
            apart = torch.stack([torch.stack(jumps(d[None])) * (len(d) - 1) for d in depths if len(d) > 1]).sum(0)
            same, by_one, more = (apart / apart.sum().clamp_min(1)).tolist()
            cells = (f"{float(flat.float().mean()):.2f}", f"{same:.1%}", f"{by_one:.1%}", f"{more:.1%}")
            rows.append(f"<tr><td>{escape(one.name)}, {at:g}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(
        f"<th>{cell}</th>" for cell in ("model, threshold", "mean depth", "neighbours at one depth", "1 apart", "more")
    )
    table = f'<div class="table"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return f'<div class="wide">{charts.exits(bars, loops)}</div>{table}'


def _places(one: Traced, threshold: float) -> str:
    """Exit depth of each token in order, and its running mean."""
    depths = torch.cat(one.depths[threshold]).tolist()
    svg = Svg(1100, 150, f"exit depth by place, {one.name}")
    x, y = Scale(0, max(len(depths) - 1, 1), 30, 1090), Scale(1, max(one.loops, 2), 130, 14)
    for depth in range(1, one.loops + 1):
        svg.line(30, y(depth), 1090, y(depth), "grid")
        svg.text(22, y(depth) + 3.5, str(depth), anchor="end")
    for place, depth in enumerate(depths):
        svg.rect(x(place) - 1.2, y(depth) - 1.6, 2.4, 3.2, "dot", fill=shade(depth, one.loops).hex)
    windows = [depths[max(0, end - _RUNNING) : end] for end in range(1, len(depths) + 1)]
    svg.path([(x(i), y(sum(w) / len(w))) for i, w in enumerate(windows)], "series", stroke="var(--ink)")
    return str(svg)
