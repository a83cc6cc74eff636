"""The latency model of continuous depth batching, appendix B: lines in depth, batch and context. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DepthFit:
    """tau(r) = tau_0 + tau_r r, eq. 3: seconds of what runs once a token, and of a loop step."""

    once: float
    step: float
    r2: float


@dataclass(frozen=True)
class StepFit:
    """t(B, L) = delta + (gamma + alpha L) B, eq. 4, in seconds; `saturation` is B* = delta / (gamma + alpha L) for
    each context, None where the slope is not positive."""

    delta: float
    gamma: float
    alpha: float
    r2: float
    saturation: dict[int, float | None]


def fit_depths(seconds: Mapping[int, float]) -> DepthFit | None:
    """The line through whole decode steps by depth; None with fewer than two depths."""
    if len(seconds) < 2:
        return None
    depths = np.array(sorted(seconds), dtype=np.float64)
    y = np.array([seconds[int(depth)] for depth in depths])
    (once, step), r2 = _solve(np.stack([np.ones_like(depths), depths], 1), y)
    return DepthFit(float(once), float(step), r2)


def fit_steps(points: Sequence[tuple[int, int, float]]) -> StepFit | None:
    """The plane through (batch, context, seconds) of loop steps; None where too few of them differ."""
    batches, contexts = {b for b, _, _ in points}, {c for _, c, _ in points}
    if len(batches) < 2 or len(points) < 3:
        return None
    b, c, y = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    columns = [np.ones_like(b), b, b * c] if len(contexts) > 1 else [np.ones_like(b), b]
    solved, r2 = _solve(np.stack(columns, 1), y)
    delta, gamma = float(solved[0]), float(solved[1])
    alpha = float(solved[2]) if len(contexts) > 1 else 0.0
    slopes = {context: gamma + alpha * context for context in sorted(contexts)}
    saturation = {context: delta / slope if slope > 0 else None for context, slope in slopes.items()}
    return StepFit(delta, gamma, alpha, r2, saturation)


def _solve(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Least squares, and the share of the variance it explains."""
    solved = np.asarray(np.linalg.lstsq(x, y, rcond=None)[0], dtype=np.float64)
    rest, total = float(((y - x @ solved) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return solved, 1.0 - rest / total if total else 1.0
