"""Held-out scores of a looped LM for its card: cross-entropy by depth, and whether its exits are worth anything."""

# B rows, T tokens, R loop steps, D width

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from looped.kv import KVLayout, get_layout
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.pretrain import exits
from looped.train.pretrain.figures import correlation, interpolated, relative_change
from looped.train.pretrain.losses import chunked_loss, logits_loss
from looped.train.pretrain.rollout import Setting, initial_state, never, roll
from looped.train.pretrain.windows import Batch, Windows

HAZARD_THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.75)
CHANGE_THRESHOLDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
_STATE_SEED = 1
_PASSES = 3
"""Forwards that find what tokens leave where planes are overwritten: an estimate of what decoding finds."""


class ExitScore(NamedTuple):
    """Exits at one threshold on one group of tokens; cross-entropies in nats, depths dense unless said."""

    threshold: float
    tokens: str
    mean_depth: float
    histogram: tuple[float, ...]
    ce: float
    fixed_ce: float
    """Fixed depths, linear between the two around the mean depth."""
    random_ce: float
    """Random exits with this histogram."""
    adaptive_gain: float
    """fixed_ce - ce: above 0 the exits know something."""
    gain_correlation: float
    """Correlation of exit depth with CE_1 - CE_R."""
    ragged_ce: float | None = None
    """The same exits decided while later tokens see what earlier ones left under the model's own layout."""
    ragged_depth: float | None = None


class Scores(NamedTuple):
    """All of one evaluation. `ce` has a curve over depths 1..R for every group of tokens."""

    windows: int
    tokens: dict[str, int]
    ce: dict[str, tuple[float, ...]]
    layout_ce: dict[str, tuple[float, ...]] | None
    """CE at fixed depths under the model's own layout, where that overwrites planes: close to what decoding finds."""
    mean_pi: tuple[float, ...] | None
    entropy: float | None
    relative_change: tuple[float, ...]
    """Mean of ||z_r - z_(r-1)|| / ||z_r|| by step; the first is against the initial state, 1 where there is none."""
    exits: tuple[ExitScore, ...]


class _Tables(NamedTuple):
    """Per token of all windows: losses [N, R], pi [N, R] or None, relative change [N, R], group masks [N]."""

    losses: Tensor
    pi: Tensor | None
    change: Tensor
    groups: dict[str, Tensor]


@torch.no_grad()
def evaluate(model: LoopedLM, windows: Windows, num_windows: int, rows: int = 16) -> Scores:
    """Score `num_windows` held-out windows, `rows` at a time. Precision is the caller's autocast."""
    chosen = [
        windows.rows(torch.arange(start, min(start + rows, num_windows, len(windows))))
        for start in range(0, min(num_windows, len(windows)), rows)
    ]
    parts = [_tables(model, batch) for batch in chosen]
    tables = _joined(parts)
    own, layout = None, get_layout(model.config.default_layout)
    if layout.cut_sensitive:
        own = _curves(torch.cat([_layout_losses(model, batch, layout) for batch in chosen]), tables.groups)
    pi = tables.pi
    return Scores(
        windows=sum(len(batch.inputs) for batch in chosen),
        tokens={name: int(mask.sum()) for name, mask in tables.groups.items()},
        ce=_curves(tables.losses, tables.groups),
        layout_ce=own,
        mean_pi=None if pi is None else tuple(pi.mean(0).tolist()),
        entropy=None if pi is None else float(exits.entropy(pi).mean()),
        relative_change=tuple(tables.change.mean(0).tolist()),
        exits=tuple(_exit_scores(model, chosen, tables)),
    )


def _tables(model: LoopedLM, batch: Batch) -> _Tables:
    groups = {"all": torch.ones_like(batch.answer), "answer": batch.answer, "number": batch.number}
    groups |= {"direct": batch.direct, "question": ~batch.answer}
    flat = {name: mask.flatten().cpu() for name, mask in groups.items()}
    if model.config.injection:
        losses, change = _recurrent_losses(model, batch)
        return _Tables(losses, None, change, flat)
    readouts = model.states(batch.inputs)
    losses = torch.stack([_head_losses(model, z, batch) for z in readouts], -1)
    pi = exits.exit_distribution(torch.cat([exits.gate_hazard(model, z) for z in readouts], -1)).flatten(0, 1)
    changes = [torch.ones_like(losses[:, 0])]
    changes += [relative_change(after, before).flatten().cpu() for before, after in itertools.pairwise(readouts)]
    return _Tables(losses, pi.cpu(), torch.stack(changes, -1), flat)


def _joined(parts: list[_Tables]) -> _Tables:
    pis = [part.pi for part in parts if part.pi is not None]
    return _Tables(
        torch.cat([part.losses for part in parts]),
        torch.cat(pis) if pis else None,
        torch.cat([part.change for part in parts]),
        {name: torch.cat([part.groups[name] for part in parts]) for name in parts[0].groups},
    )


def _head_losses(model: LoopedLM, z: Tensor, batch: Batch) -> Tensor:
    return chunked_loss(z, model.head.weight, batch.targets).flatten().cpu()


def _recurrent_losses(model: LoopedLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses and relative change [N, R] of a model with an initial state, K/V by depth."""
    positions = torch.arange(batch.inputs.shape[-1], device=batch.inputs.device)
    h, injection = model.prelude(batch.inputs, positions, dense_causal, initial_state(model, batch.inputs, _STATE_SEED))
    losses, changes = [], []
    for step in range(1, model.config.max_loops + 1):
        before, h = h, model.core(h, injection, positions, step, dense_causal)
        losses.append(logits_loss(model.coda(h, positions, dense_causal), batch.targets).flatten().cpu())
        changes.append(relative_change(h, before).flatten().cpu())
    return torch.stack(losses, -1), torch.stack(changes, -1)


def _layout_losses(model: LoopedLM, batch: Batch, layout: KVLayout) -> Tensor:
    """Losses [N, R] at fixed depths 1..R under a layout that overwrites planes."""
    positions = torch.arange(batch.inputs.shape[-1], device=batch.inputs.device)
    state, columns = initial_state(model, batch.inputs, _STATE_SEED), []
    for depth in range(1, model.config.max_loops + 1):
        h = roll(model, batch.inputs, depth, Setting(layout, passes=_PASSES), lambda: never, state).states[-1]
        columns.append(logits_loss(model.coda(h, positions, dense_causal), batch.targets).flatten().cpu())
    return torch.stack(columns, -1)


def _curves(losses: Tensor, groups: dict[str, Tensor]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(losses[mask].mean(0).tolist()) for name, mask in groups.items() if bool(mask.any())}


def _exit_scores(model: LoopedLM, batches: list[Batch], tables: _Tables) -> list[ExitScore]:
    scores: list[ExitScore] = []
    thresholds = CHANGE_THRESHOLDS if tables.pi is None else HAZARD_THRESHOLDS
    for threshold in thresholds:
        if tables.pi is None:
            depth, ragged = first_below(tables.change, threshold), None
        else:
            depth = exits.hard_exits(tables.pi, threshold)
            ragged = _ragged(model, batches, threshold)
        for name in ("all", "answer", "direct"):
            mask = tables.groups[name]
            if bool(mask.any()):
                score = exit_score(threshold, name, tables.losses[mask], depth[mask])
                if ragged is not None:
                    score = score._replace(
                        ragged_ce=float(ragged[0][mask].mean()), ragged_depth=float(ragged[1][mask].float().mean())
                    )
                scores.append(score)
    return scores


def first_below(change: Tensor, threshold: float) -> Tensor:
    """The convergence criterion at its min_depth of 2: first step r >= 2 with change [N, R] < threshold, else R."""
    settled = change < threshold
    settled[:, 0] = False
    settled[:, -1] = True
    return settled.int().argmax(-1) + 1


def exit_score(threshold: float, tokens: str, losses: Tensor, depth: Tensor) -> ExitScore:
    """Exits depth [N] against fixed and random depth, on losses [N, R]."""
    num_loops = losses.shape[-1]
    histogram = torch.bincount(depth - 1, minlength=num_loops).float() / len(depth)
    by_depth = losses.mean(0)
    mean_depth = depth.float().mean()
    ce = float(losses.gather(-1, depth[:, None] - 1).mean())
    fixed = float(interpolated(by_depth, mean_depth))
    return ExitScore(
        threshold=threshold,
        tokens=tokens,
        mean_depth=float(mean_depth),
        histogram=tuple(histogram.tolist()),
        ce=ce,
        fixed_ce=fixed,
        random_ce=float((histogram * by_depth).sum()),
        adaptive_gain=fixed - ce,
        gain_correlation=float(correlation(depth.float(), losses[:, 0] - losses[:, -1])),
    )


def _ragged(model: LoopedLM, batches: list[Batch], threshold: float) -> tuple[Tensor, Tensor]:
    """Losses and depths [N] of forwards in which every token exits at the threshold, under the model's own layout."""
    losses, depths = [], []
    layout = get_layout(model.config.default_layout)
    setting = Setting(get_layout("ragged") if layout.needs_dense else layout, passes=_PASSES)
    for batch in batches:
        new_leave = partial(exits.by_threshold, model, threshold)
        rollout = roll(model, batch.inputs, model.config.max_loops, setting, new_leave)
        losses.append(_head_losses(model, model.readout(rollout.at_exit()), batch))
        depths.append(rollout.depths.flatten().cpu())
    return torch.cat(losses), torch.cat(depths)
