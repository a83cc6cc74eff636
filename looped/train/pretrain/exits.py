"""Exit distributions in training: hazards, priors, divergences, exits drawn or by threshold."""

# R loop steps; leading dimensions [...] are free

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from looped.model import LoopedLM
from looped.train.pretrain import ranks

PriorName = Literal["poisson", "geometric", "uniform"]

_RATES = {"poisson": 2.1, "geometric": 0.3, "uniform": 0.0}
_TINY = 1e-9


def exit_prior(name: PriorName, num_loops: int, rate: float | None = None) -> Tensor:
    """Wanted distribution over exit depths 1..R, [R], renormalised to it (ragged KV, appendix B).

    `rate` is Poisson's, or the chance by which the geometric one stops at each depth; None takes the paper's.
    """
    depths, rate = range(1, num_loops + 1), _RATES[name] if rate is None else rate
    if name == "poisson":
        weights = [rate**d / math.factorial(d) for d in depths]
    elif name == "geometric":
        weights = [(1 - rate) ** (d - 1) for d in depths]
    else:
        weights = [1.0 for _ in depths]
    total = sum(weights)
    return torch.tensor([weight / total for weight in weights])


def gate_hazard(model: LoopedLM, z: Tensor) -> Tensor:
    """lambda [..., 1], at least float32, of readouts z [..., D], outside autocast: a threshold acts on its sums."""
    gate = model.exit_gate
    assert isinstance(gate, nn.Linear)
    wide = torch.promote_types(z.dtype, torch.float32)
    with torch.autocast(z.device.type, enabled=False):
        return torch.sigmoid(nn.functional.linear(z.to(wide), gate.weight.to(wide), gate.bias.to(wide)))


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


def log_probability(hazards: Tensor, depths: Tensor) -> Tensor:
    """log pi(e) of exits e = depths [...] under hazards [..., R] (ragged KV, eq. 3); the last hazard is not used."""
    num_loops = hazards.shape[-1]
    steps = torch.arange(1, num_loops, device=hazards.device)
    used, at = hazards[..., :-1], depths[..., None]
    stays = torch.where(steps < at, (1 - used).clamp_min(_TINY).log(), torch.zeros_like(used)).sum(-1)
    ends = torch.where(steps == at, used.clamp_min(_TINY).log(), torch.zeros_like(used)).sum(-1)
    return stays + ends


def entropy(pi: Tensor) -> Tensor:
    """Entropy of pi [..., R] over its last dimension, nats."""
    return -(pi * pi.clamp_min(_TINY).log()).sum(-1)


def hard_exits(pi: Tensor, threshold: float) -> Tensor:
    """e = first depth whose cumulative pi reaches the threshold, R where none does: [..., R] to [...]."""
    reached = pi.cumsum(-1) >= threshold
    reached[..., -1] = True
    return reached.int().argmax(-1) + 1


def by_threshold(model: LoopedLM, threshold: float) -> Callable[[Tensor, int], Tensor]:
    """The exit decision of a threshold on the cumulative hazard, for one forward of `rollout`."""
    survival: list[Tensor] = []

    def leave(z: Tensor, step: int) -> Tensor:
        stay = 1 - gate_hazard(model, z.detach()).squeeze(-1)
        survival.append(stay if not survival else survival[-1] * stay)
        return 1 - survival[-1] >= threshold

    return leave


def by_chance(model: LoopedLM, draws: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Exits with the gate's own probabilities, detached: draws [B, T, R] are uniform numbers."""
    return lambda z, step: draws[..., step - 1] < gate_hazard(model, z.detach()).squeeze(-1)
