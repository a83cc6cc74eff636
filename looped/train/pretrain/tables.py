"""The tables of a model's card from its run: figures over training, held-out loss by depth, exits, accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from looped.train.pretrain.log import Row, RunLog

_ROWS = 9
_FLOOR = 3e6
"""Tokens of the first row at least."""


def tables(run: RunLog) -> str:
    """Markdown of one run; parts that its summary lacks are left out."""
    last = run.rows[-1]
    speeds = sorted(row["tok_s"] for row in run.rows)
    parts = [
        f"# {run.name}",
        f"{last['tokens'] / 1e6:.0f}M tokens, {last['step']:.0f} steps, {run.summary.get('seconds', 0):.0f} s, "
        f"{speeds[len(speeds) // 2] / 1e3:.0f}K tokens/s (median), {last['memory_gib']:.0f} GiB",
        _training(run),
    ]
    scores: dict[str, Any] | None = run.summary.get("scores")
    if scores:
        parts += [_by_depth(scores, "ce", "Held-out cross-entropy by depth")]
        if scores.get("layout_ce"):
            parts += [_by_depth(scores, "layout_ce", "The same under the layout it is served with")]
        parts += [_exits(scores)]
    if run.summary.get("accuracy"):
        parts += [_accuracy(run.summary["accuracy"])]
    return "\n\n".join(parts) + "\n"


def _training(run: RunLog) -> str:
    """Figures at places of the run that are evenly spread on a logarithmic scale."""
    last = run.rows[-1]["tokens"]
    first = min(max(run.rows[0]["tokens"], _FLOOR), last)
    wanted = [first * (last / first) ** (i / (_ROWS - 1)) for i in range(_ROWS)]
    chosen: list[Row] = []
    for tokens in wanted:
        row = min(run.rows, key=lambda row: abs(math.log(row["tokens"] / tokens)))
        if row not in chosen:
            chosen.append(row)
    names = [f"depth {d}" for d in range(1, run.loops + 1)]
    head = ["M tokens", f"answer CE at {' / '.join(names)}", "direct answers", "answer depth", "answer gain", "corr"]
    head += ["jumps 0 / 1 / 2+", "ragged loss"]
    rows = [
        [
            f"{row['tokens'] / 1e6:.0f}",
            _curve(row, "answer_ce", run.loops),
            _curve(row, "direct_ce", run.loops),
            _cell(row, "answer_depth", ".2f"),
            _cell(row, "answer_gain", "+.3f"),
            _cell(row, "gain_correlation", ".2f"),
            " / ".join(_cell(row, f"jump_{n}", ".2f") for n in range(3)),
            _cell(row, "ragged_loss", ".3f"),
        ]
        for row in chosen
    ]
    return _markdown(head, rows)


def _curve(row: Row, stem: str, loops: int) -> str:
    return " / ".join(_cell(row, f"{stem}_{d}", ".3f") for d in range(1, loops + 1))


def _cell(row: Row, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "–"


def _by_depth(scores: dict[str, Any], name: str, title: str) -> str:
    curves = scores[name]
    loops = len(next(iter(curves.values())))
    head = ["tokens", "n", *(str(d) for d in range(1, loops + 1))]
    rows = [[group, f"{scores['tokens'][group]:,}", *(f"{ce:.4f}" for ce in ces)] for group, ces in curves.items()]
    return f"{title} ({scores['windows']} windows, nats):\n\n{_markdown(head, rows)}"


def _exits(scores: dict[str, Any]) -> str:
    head = ["threshold", "tokens", "mean depth", "exits by depth, %", "CE", "fixed depths", "random exits", "gain"]
    head += ["corr", "CE under the layout @ depth"]
    rows = [
        [
            f"{item['threshold']:g}",
            item["tokens"],
            f"{item['mean_depth']:.2f}",
            " / ".join(f"{100 * share:.0f}" for share in item["histogram"]),
            f"{item['ce']:.4f}",
            f"{item['fixed_ce']:.4f}",
            f"{item['random_ce']:.4f}",
            f"{item['adaptive_gain']:+.4f}",
            f"{item['gain_correlation']:+.2f}",
            "–" if item["ragged_ce"] is None else f"{item['ragged_ce']:.4f} @ {item['ragged_depth']:.2f}",
        ]
        for item in scores["exits"]
    ]
    return f"Exits by threshold:\n\n{_markdown(head, rows)}"


def _accuracy(found: Sequence[dict[str, Any]]) -> str:
    head = ["set", "exemplars", "layout", "depth", "right", "unanswered"]
    rows = [
        [
            item["task"],
            str(item["num_fewshot"]),
            item["layout"],
            str(item["depth"]),
            f"{100 * item['accuracy']:.1f} of 100 (n = {item['problems']})",
            f"{100 * item['unanswered']:.1f}",
        ]
        for item in found
    ]
    return f"Accuracy, greedy:\n\n{_markdown(head, rows)}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
