"""Exit distributions in training: hazards, priors, divergences."""

# R loop steps; leading dimensions [...] are free

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from looped.train import ranks

PriorName = Literal["poisson", "geometric", "uniform"]

_POISSON_RATE = 2.1
_GEOMETRIC_RATE = 0.37
_TINY = 1e-9


def exit_prior(name: PriorName, num_loops: int) -> Tensor:
    """Wanted distribution over exit depths 1..R, [R], renormalised to it (ragged KV, appendix B)."""
    depths = range(1, num_loops + 1)
    if name == "poisson":
        weights = [_POISSON_RATE**d / math.factorial(d) for d in depths]
    elif name == "geometric":
        weights = [(1 - _GEOMETRIC_RATE) ** (d - 1) for d in depths]
    else:
        weights = [1.0 for _ in depths]
    total = sum(weights)
    return torch.tensor([weight / total for weight in weights])


def exit_distribution(hazards: Tensor) -> Tensor:
    """pi(d) = lambda_d S_{d-1}, the last depth taking all that is left: hazards [..., R] to [..., R].

    The last hazard is never used.
    """
    # products written out: the backward pass of cumprod waits for the device
    survival, parts = torch.ones_like(hazards[..., 0]), []
    for hazard in hazards.unbind(-1)[:-1]:
        parts.append(hazard * survival)
        survival = survival * (1 - hazard)
    return torch.stack([*parts, survival], -1)


def global_kl(pi: Tensor, prior: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(mean of pi || prior), nats (ragged KV, eq. 10): single tokens may differ in depth.

    The mean of pi [..., R] runs over all tokens, or over those of mask [...]: those of every process that trains.
    """
    if mask is None:
        return _kl(ranks.mean(pi.flatten(0, -2).mean(0)), prior)
    share = mask[..., None] / ranks.total(mask.sum()).clamp_min(1)
    return _kl(ranks.total((pi * share).flatten(0, -2).sum(0)), prior)


def local_kl(pi: Tensor, prior: Tensor) -> Tensor:
    """Mean over tokens of KL(pi_i || prior) of pi [..., R], nats (ragged KV, eq. 9)."""
    return _kl(pi, prior).mean()


def _kl(pi: Tensor, prior: Tensor) -> Tensor:
    return (pi * (pi.clamp_min(_TINY).log() - prior.log())).sum(-1)


def entropy(pi: Tensor) -> Tensor:
    """Entropy of pi [..., R] over its last dimension, nats."""
    return -(pi * pi.clamp_min(_TINY).log()).sum(-1)


def hard_exits(pi: Tensor, threshold: float) -> Tensor:
    """e = first depth whose cumulative pi reaches the threshold, R where none does: [..., R] to [...]."""
    reached = pi.cumsum(-1) >= threshold
    reached[..., -1] = True
    return reached.int().argmax(-1) + 1
