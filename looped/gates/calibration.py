"""Thresholds of exit gates from their curves: exits, wanted mean depths, agreement."""

# N tokens, R loop steps

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from looped.gates.dial import Curve

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
TARGET_GRID = GRID[1:-1]
"""Thresholds over which a student's mean depth is held against its teacher's."""
_BISECTIONS = 60


def curve(hazards: Tensor, min_depth: int) -> Curve:
    """The curve of hazards [N, R - m] whose first column is depth m = `min_depth`."""
    return Curve(1 - torch.cumprod(1 - hazards, -1), min_depth)


def exit_depths(gate: Curve, threshold: float) -> Tensor:
    """Exits [N] long: the first depth with C >= threshold, R where there is none or the threshold is 1; where `below`
    is set, the first depth whose change is below the threshold."""
    reached = gate.cumulative < threshold if gate.below else gate.cumulative >= threshold
    first = gate.min_depth + reached.int().argmax(-1)
    early = reached.any(-1) if threshold < 1 or gate.below else torch.zeros_like(first, dtype=torch.bool)
    return torch.where(early, first, gate.max_depth)


def mean_depth(gate: Curve, threshold: float) -> float:
    """Mean exit depth of a gate at a threshold."""
    return float(exit_depths(gate, threshold).double().mean())


def threshold_for(gate: Curve, wanted: float) -> float:
    """The threshold whose mean depth is nearest to `wanted`, by bisection: mean depth is monotone in it."""
    low, high = threshold_span(gate)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (mean_depth(gate, middle) < wanted) != gate.below:
            low = middle
        else:
            high = middle
    return min((high, low), key=lambda q: abs(mean_depth(gate, q) - wanted))


def threshold_span(gate: Curve) -> tuple[float, float]:
    """The thresholds between which all exits change."""
    return (0.0, 1.001 * float(gate.cumulative.max())) if gate.below else (0.0, 1.0)


def agreement(a: Tensor, b: Tensor) -> float:
    """Share of tokens whose depths [N] are equal."""
    return float((a == b).double().mean())


def confusion(a: Tensor, b: Tensor, num_depths: int) -> Tensor:
    """How many tokens have depth i in `b` [N] and j in `a` [N], both in 1..R: [R, R] long, row i - 1, column j - 1."""
    return torch.bincount((b - 1) * num_depths + (a - 1), minlength=num_depths**2).view(num_depths, num_depths)


def weighted_kappa(a: Tensor, b: Tensor, num_depths: int) -> float:
    """Quadratic-weighted kappa of two depth assignments [N] in 1..R: 1 is equality, 0 is chance."""
    counts = confusion(b, a, num_depths).double()
    observed = counts / counts.sum()
    expected = observed.sum(1)[:, None] * observed.sum(0)[None]
    depth = torch.arange(num_depths, dtype=torch.float64, device=a.device)
    cost = (depth[:, None] - depth[None]) ** 2
    chance = float((cost * expected).sum())
    return 1 - float((cost * observed).sum()) / chance if chance else 1.0


def threshold_table(student: Curve, teacher: Curve, grid: tuple[float, ...] = GRID) -> list[dict[str, Any]]:
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
                "shift": matched - threshold,
                "matched_mean_depth": mean_depth(student, matched),
                "matched_agreement": agreement(exit_depths(student, matched), wanted),
            }
        )
    return rows
