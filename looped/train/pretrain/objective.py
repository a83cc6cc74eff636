"""What a training loss is, and the means that all of them take."""

# B rows, T tokens

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from looped.model import LoopedLM
from looped.train.pretrain import ranks
from looped.train.pretrain.recipe import TokenWeights
from looped.train.pretrain.windows import Batch


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


def token_weights(batch: Batch, options: TokenWeights) -> Tensor:
    """Weights [B, T] of a batch's tokens in a mean, which sum to 1: of questions, of answers, of answers' final digits.

    Over several processes, the mean of the weighted sums is the mean over all their tokens.
    """
    weights = torch.where(batch.answer, 1.0, options.question_weight)
    if options.number_weight != 1.0:
        weights = torch.where(batch.number, options.number_weight, weights)
    return weights / ranks.mean(weights.sum())


def weighted_mean(values: Tensor, batch: Batch, options: TokenWeights) -> Tensor:
    """Mean of values [B, T] with those weights."""
    equal = options.question_weight == options.number_weight == 1.0
    return values.mean() if equal else (values * token_weights(batch, options)).sum()
