"""Thresholds and agreement of exit gates, from cached cumulative exit probabilities.

A gate is a table C [N, R - m]: one row a token, one column for each depth m, m + 1, ..., R - 1 at which it may leave
early; m is its `min_depth`. Folding mass below m onto m changes no other column, so the table of a folded teacher is
that of the raw one without its first columns.
"""

# N tokens, R loop steps

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BISECTIONS = 40


class Curve(NamedTuple):
    """Cumulative exit probabilities [N, R - m] of a gate whose first depth is m, as its decisions see them."""

    cumulative: Tensor
    min_depth: int

    @property
    def max_depth(self) -> int:
        """R."""
        return self.min_depth + self.cumulative.shape[-1]

    def from_depth(self, min_depth: int) -> Curve:
        """The same gate folded at a larger `min_depth`."""
        return Curve(self.cumulative[..., min_depth - self.min_depth :], min_depth)


def curve(hazards: Tensor, min_depth: int) -> Curve:
    """The curve of hazards [N, R - m] whose first column is depth m = `min_depth`."""
    return Curve(1 - torch.cumprod(1 - hazards, -1), min_depth)


def exit_depths(gate: Curve, threshold: float) -> Tensor:
    """Exits [N] long: the first depth with C >= threshold, R where there is none or the threshold is 1."""
    reached = gate.cumulative >= threshold
    first = gate.min_depth + reached.int().argmax(-1)
    early = reached.any(-1) if threshold < 1 else torch.zeros_like(first, dtype=torch.bool)
    return torch.where(early, first, gate.max_depth)


def mean_depth(gate: Curve, threshold: float) -> float:
    """Mean exit depth of a gate at a threshold."""
    return float(exit_depths(gate, threshold).double().mean())


def threshold_for(gate: Curve, wanted: float) -> float:
    """The threshold in 0..1 whose mean depth is nearest to `wanted`, by bisection: mean depth never falls with it."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if mean_depth(gate, middle) < wanted:
            low = middle
        else:
            high = middle
    return min((high, low), key=lambda q: abs(mean_depth(gate, q) - wanted))


def agreement(a: Tensor, b: Tensor) -> float:
    """Share of tokens whose depths [N] are equal."""
    return float((a == b).double().mean())


def weighted_kappa(a: Tensor, b: Tensor, num_depths: int) -> float:
    """Quadratic-weighted kappa of two depth assignments [N] in 1..R: 1 is equality, 0 is chance."""
    counts = torch.bincount((a - 1) * num_depths + (b - 1), minlength=num_depths**2).double()
    observed = counts.view(num_depths, num_depths) / counts.sum()
    expected = observed.sum(1)[:, None] * observed.sum(0)[None]
    depth = torch.arange(num_depths, dtype=torch.float64, device=a.device)
    cost = (depth[:, None] - depth[None]) ** 2
    chance = float((cost * expected).sum())
    return 1 - float((cost * observed).sum()) / chance if chance else 1.0


def threshold_table(student: Curve, teacher: Curve, grid: tuple[float, ...] = GRID) -> list[dict[str, float]]:
    """For each teacher threshold: mean depths of teacher and student there, their agreement, and the student threshold
    that gives the teacher's mean depth, with the agreement there."""
    rows = []
    for threshold in grid:
        wanted = exit_depths(teacher, threshold)
        teacher_mean = float(wanted.double().mean())
        matched = threshold_for(student, teacher_mean)
        same = exit_depths(student, threshold)
        rows.append(
            {
                "threshold": threshold,
                "mean_depth": float(same.double().mean()),
                "teacher_mean_depth": teacher_mean,
                "agreement": agreement(same, wanted),
                "matched_threshold": matched,
                "matched_mean_depth": mean_depth(student, matched),
                "matched_agreement": agreement(exit_depths(student, matched), wanted),
            }
        )
    return rows
