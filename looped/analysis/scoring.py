"""The demo's second step: accuracy of gates, thresholds, fixed depths and KV layouts on the same word problems."""

from __future__ import annotations

import gc
import itertools
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from looped.analysis.results import FIXED, NATIVE, Distilled, LayoutRow, ScoreRow, Scores
from looped.analysis.steps import MAX_NEW_TOKENS, threshold_of
from looped.eval import EvalResult, Setting, evaluate
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.progress import progress

# Word problems that thresholds are taken from.
_TEXTS = 16


class Cell(NamedTuple):
    """A setting to score, and the gate's name in the report."""

    gate: str
    setting: Setting


def grid(model: LoopedLM, gates: Sequence[Distilled], folder: Path, full: bool) -> list[Cell]:
    """What is scored, most telling first: every gate under the model's own layout, then the other layouts."""
    return own_layout(model, gates, folder, full) + other_layouts(model, gates, folder, full)


def own_layout(model: LoopedLM, gates: Sequence[Distilled], folder: Path, full: bool) -> list[Cell]:
    """Fixed depths and every gate at several thresholds, under the model's own layout."""
    own, threshold = model.config.default_layout, threshold_of(model)
    cells = [Cell(FIXED, Setting(own, depth=depth)) for depth in _depths(model.config.max_loops, full)]
    cells += [Cell(NATIVE, Setting(own, "ouro", q)) for q in (_around(threshold) if full else (threshold,))]
    for gate in gates:
        around = _around(gate.threshold) if full else (gate.threshold,)
        cells += [Cell(gate.gate, Setting(own, folder / gate.gate, q)) for q in around]
    if full:
        cells += [Cell("convergence", Setting(own, "convergence", q)) for q in convergence_thresholds(model)]
    return cells


def other_layouts(model: LoopedLM, gates: Sequence[Distilled], folder: Path, full: bool) -> list[Cell]:
    """Full depth, the native gate and the lookahead gate at their own thresholds, under the other layouts."""
    own, threshold, cells = model.config.default_layout, threshold_of(model), []
    layouts = ("shared", "first-shared", "last-exited", "depth", "ragged") if full else ("shared",)
    for layout in (name for name in layouts if name != own):
        if get_layout(layout).planes is not None:  # else fixed depths are the own layout's: see `_shared_fixed`
            cells.append(Cell(FIXED, Setting(layout, depth=model.config.max_loops)))
        cells.append(Cell(NATIVE, Setting(layout, "ouro", threshold)))
        if full and layout != "last-exited":
            cells += [
                Cell(gate.gate, Setting(layout, folder / gate.gate)) for gate in gates if gate.gate == "lookahead"
            ]
    return cells


def _depths(loops: int, full: bool) -> list[int]:
    """Fixed depths: four of them spread over 1..R, or the two ends."""
    return sorted({round(1 + part * (loops - 1)) for part in ((0, 1 / 3, 2 / 3, 1) if full else (0, 1))})


def _around(threshold: float) -> list[float]:
    """A threshold, a fifth of it, and one that leaves a tenth of its distance to 1."""
    return [round(q, 3) for q in (threshold / 5, threshold, 1 - (1 - threshold) / 10)]


@torch.inference_mode()
def convergence_thresholds(model: LoopedLM) -> list[float]:
    """Thresholds of the convergence criterion: the lower quartile and the median of its values on word problems."""
    from looped.data.evalsets import eval_problems

    assert model.tokenizer is not None
    values = []
    for problem in itertools.islice(eval_problems("trained", "convergence"), _TEXTS):
        zs = model.states(torch.tensor([model.tokenizer.encode(problem.document())], device=model.device))
        for before, after in itertools.pairwise(zs[:-1]):
            values.append(((after - before).norm(dim=-1) / after.norm(dim=-1)).flatten())
    quartiles = torch.cat(values).float().quantile(torch.tensor([0.25, 0.5], device=model.device))
    return sorted({float(f"{value:.2g}") for value in quartiles.tolist()})


def score(model: LoopedLM, cells: Sequence[Cell], name: str, n: int, seconds: float) -> Scores:
    """Exact match of every cell on the same `n` problems of a task.

    No cell is begun after `seconds`; those that time does not reach are left out, and counted.
    """
    from looped.eval.harness_task import load_task

    task = load_task(name, num_fewshot=0, max_gen_toks=MAX_NEW_TOKENS)
    began = time.monotonic()
    rows: list[ScoreRow] = []
    with progress(len(cells), f"{name}, {n} problems", every=5) as bar:
        for cell in cells:
            rows.append(_score_row(_evaluate(model, task, cell.setting, n), cell.gate))
            gc.collect()  # an engine's KV pool goes before the next one comes
            bar.advance(note=f"{rows[-1].layout} {rows[-1].gate} {rows[-1].accuracy:.0%}")
            if time.monotonic() - began > seconds:
                break
    config = model.config
    names = dict.fromkeys(row.layout for row in rows)
    layouts = tuple(_layout_row(model, name) for name in names)
    left_out = len(cells) - len(rows)
    rows += _shared_fixed(rows, config.default_layout)
    return Scores(name, n, config.default_layout, config.max_loops, tuple(rows), layouts, MAX_NEW_TOKENS, left_out)


def _evaluate(model: LoopedLM, task: Any, setting: Setting, n: int) -> EvalResult:
    with warnings.catch_warnings():
        # The report says that the gates were trained under the model's own layout.
        warnings.filterwarnings("ignore", message=".* gate was trained under layout")
        return evaluate(model, task, setting, limit=n)


def _score_row(result: EvalResult, gate: str) -> ScoreRow:
    stderr = result.flexible.stderr
    return ScoreRow(
        layout=result.kv,
        gate=gate,
        threshold=result.threshold,
        max_depth=result.max_depth,
        accuracy=result.flexible.value,
        stderr=math.nan if stderr is None else stderr,
        mean_depth=result.mean_depth,
        histogram=result.depth_histogram,
        n=result.n,
        unfinished=result.num_unfinished,
        dense=result.dense_compute,
        tok_s=result.tok_s,
    )


def _shared_fixed(rows: Sequence[ScoreRow], own: str) -> list[ScoreRow]:
    """Without exits every layout with one plane a loop computes the same thing, so one score stands for all of them."""
    if get_layout(own).planes is not None:
        return []
    others = {row.layout for row in rows if get_layout(row.layout).planes is None} - {own}
    fixed = [row for row in rows if row.layout == own and row.gate == FIXED]
    return [ScoreRow(**{**vars(row), "layout": layout}) for layout in sorted(others) for row in fixed]


def _layout_row(model: LoopedLM, name: str) -> LayoutRow:
    planes = get_layout(name).num_planes(model.config.max_loops)
    return LayoutRow(name, planes, model.config.kv_bytes_per_token(planes, model.dtype.itemsize))
