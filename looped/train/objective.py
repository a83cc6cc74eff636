"""What a training loss is, and the means that all of them take."""

# B rows, T tokens

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from looped.model import LoopedLM
from looped.train import ranks
from looped.train.windows import Batch


class Moment(NamedTuple):
    """What a loss may depend on besides model and data."""

    step: int
    progress: float
    beta: float
    seed: int


class Loss(NamedTuple):
    """The value to minimise, and detached scalars to log."""

    value: Tensor
    log: dict[str, Tensor]


class TrainingLoss(Protocol):
    """A loss of one micro-batch."""

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss: ...


def token_weights(mask: Tensor, other: float) -> Tensor:
    """Weights [B, T] of the tokens in a mean: 1 where mask holds and `other` elsewhere, over their sum.

    Over several processes, the mean of the weighted sums is the mean over all their tokens.
    """
    weights = torch.where(mask, 1.0, other)
    return weights / ranks.mean(weights.sum())


def weighted_mean(values: Tensor, mask: Tensor, other: float) -> Tensor:
    """Mean of values [B, T] with those weights."""
    return values.mean() if other == 1.0 else (values * token_weights(mask, other)).sum()
