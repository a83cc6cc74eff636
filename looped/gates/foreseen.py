"""The convergence criterion one step ahead, for models without an exit gate."""

# B rows, D width

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from looped.gates.protocol import Entry, Params, State, none_ahead, wide
from looped.gates.trained import StepHeads, relative_change

if TYPE_CHECKING:
    from looped.config import ModelConfig

_SMALLEST = 1e-8


class ForeseenConvergenceGate(StepHeads):
    """Predicts log(||z_{r+1} - z_r|| / ||z_{r+1}||) from z_r and the same of r, and exits after r + 1 where the change
    it expects is below the threshold. So the threshold is that of `convergence`, known one step ahead.

    Heads for r = 1..R-2, features z_r and the log of its own change, [D + 1]; their logit is the expected difference of
    the logs.
    """

    kind = "foreseen-convergence"
    latency = 1
    min_depth = 2
    threshold_range = (0.0, math.inf)
    known_inputs = ("state", "log-change")
    default_inputs = known_inputs

    @classmethod
    def num_heads(cls, max_loops: int) -> int:
        return max(max_loops - 2, 1)

    def default_threshold(self, config: ModelConfig) -> float:
        return config.exit_threshold if self.threshold is None else self.threshold

    def expected(self, z: Tensor, before: Tensor, step: Tensor) -> Tensor:
        """Log of the change [B] expected of step `step` + 1, from readouts z [B, D] of `step` [B] and before it."""
        now = log_change(z, before)
        return now + self.head_logits(torch.cat((wide(z), now[:, None]), -1), step - 1)

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return (entry.z0,), none_ahead(entry.z0)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        expected = self.expected(z, state[0], step)
        below = expected < params.threshold.to(expected.dtype).log()
        return (z,), below & (step + 1 >= params.min_depth)


def log_change(z: Tensor, before: Tensor) -> Tensor:
    """Log of `relative_change`, bounded below for states that stand still: [..., D] to [...]."""
    return torch.log(relative_change(z, before).clamp_min(_SMALLEST))
