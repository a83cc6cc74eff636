"""Where a run stands between 0 and 1, by tokens or by time, and what depends on that: learning rate and beta."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from looped.train.pretrain.recipe import Objective, Optim, Sampling

# The paper's rise of beta (ragged KV, figure 6: 0.01, 0.02, 0.05), in parts of the run and of the final weight; cosine
# in between.
_PAPER_BETA = ((0.0, 0.0), (0.25, 0.2), (0.5, 0.4), (1.0, 1.0))
_FLAT_BETA = ((0.0, 0.0), (0.02, 1.0), (1.0, 1.0))


def learning_rate(optim: Optim, progress: float) -> float:
    """Linear warm-up to the peak, held until `decay_from`, then a cosine to `min_lr` of it at the end of the run."""
    if progress < optim.warmup:
        return optim.lr * max(progress / optim.warmup, 0.01)
    begin = max(optim.warmup, optim.decay_from)
    part = min(max(progress - begin, 0.0) / max(1 - begin, 1e-9), 1.0)
    return optim.lr * (optim.min_lr + (1 - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * part)))


def beta(objective: Objective, progress: float) -> float:
    """Weight of the KL to the exit prior."""
    points: tuple[tuple[float, float], ...] = _PAPER_BETA if objective.beta_schedule == "paper" else _FLAT_BETA
    if objective.beta_schedule == "cosine":
        begin, end = objective.beta_ramp
        points = ((-1.0, 0.0), (begin, 0.0), (end, 1.0))
    for (left, low), (right, high) in itertools.pairwise(points):
        if progress < right:
            part = 0.5 * (1 - math.cos(math.pi * (progress - left) / (right - left)))
            return objective.beta * (low + (high - low) * part)
    return objective.beta


def under_layout(share: float, step: int) -> bool:
    """Whether step `step` (from 0) is one of the evenly spread `share` of steps: at one half, the odd ones."""
    return math.floor((step + 1) * share + 1e-9) > math.floor(step * share + 1e-9)


def sample_loops(
    sampling: Sampling, mean: float, sigma: float, num_loops: int, generator: torch.Generator | None
) -> int:
    """Loop steps of one micro-batch, 1..R: R, uniform, or Poisson with a log-normal rate of the given mean."""
    if sampling == "fixed":
        return num_loops
    if sampling == "uniform":
        return int(torch.randint(1, num_loops + 1, (), generator=generator))
    normal = float(torch.randn((), generator=generator))
    rate = math.exp(math.log(max(mean, 1e-9)) - 0.5 * sigma**2 + sigma * normal)
    return min(max(int(torch.poisson(torch.tensor(rate), generator=generator)), 1), num_loops)


@dataclass
class Clock:
    """Progress of a run. It ends after `total_steps`, or earlier where `total_seconds` would end first.

    Without a time limit progress is step / total_steps exactly. With one, every step advances by the share of the
    remaining time that a step takes, so a schedule ends with the time whatever the measured speed does.
    """

    total_steps: int
    total_seconds: float | None
    steps: int = 0
    progress: float = 0.0
    seconds: float = 0.0
    step_seconds: float = 0.0
    """What one step takes now; 0 while unknown."""

    def advance(self) -> None:
        """One optimiser step is done."""
        self.steps += 1
        share = 1 / self.total_steps
        if self.total_seconds is None:
            self.progress = self.steps / self.total_steps
            return
        if self.step_seconds:
            left = max(self.total_seconds - self.seconds, self.step_seconds)
            share = max(share, (1 - self.progress) * self.step_seconds / left)
        self.progress = min(1.0, self.progress + share)
        self.seconds += self.step_seconds

    def measure(self, seconds: float, step_seconds: float) -> None:
        """Tell the training time so far, over all resumed runs, and what a step takes now."""
        self.seconds, self.step_seconds = seconds, step_seconds

    @property
    def done(self) -> bool:
        # a step's worth of rounding must not cost a whole extra step at the end of the schedule
        return self.steps >= self.total_steps or self.progress >= 1.0 - 1e-9

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "progress": self.progress, "seconds": self.seconds}

    def load(self, state: dict[str, Any]) -> None:
        self.steps, self.progress, self.seconds = state["steps"], state["progress"], state["seconds"]
