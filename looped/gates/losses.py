"""Distillation losses of hazard gates: what a student's hazards cost against its teacher's."""

# R loop steps; leading dimensions [...] are free

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fold(hazards: Tensor, min_depth: int) -> Tensor:
    """Hazards lambda_1..lambda_{R-1} [..., R-1] seen from `min_depth` on: [..., R-min_depth].

    Mass below `min_depth` moves onto it, so the first value is C(min_depth); later hazards stay as they are.
    """
    survival = (1 - hazards[..., :min_depth]).prod(-1, keepdim=True)
    return torch.cat((1 - survival, hazards[..., min_depth:]), -1)


def survival_before(hazards: Tensor) -> Tensor:
    """Probability of reaching each depth, S_{d-1}, of hazards [..., N] from the first depth on: [..., N]."""
    reached = torch.cumprod(1 - hazards[..., :-1], -1)
    return torch.cat((torch.ones_like(hazards[..., :1]), reached), -1)


def hazard_kl(logits: Tensor, hazards: Tensor) -> Tensor:
    """KL(pi_teacher || pi_student) in nats by the chain rule: student logits and teacher hazards [..., N] to [...].

    sum_d S_{d-1} KL(Bern lambda_d || Bern sigmoid(logit_d)): the teacher's survival weights each step, so steps a token
    hardly reaches hardly count, and probabilities stay calibrated.
    """
    cross = F.binary_cross_entropy_with_logits(logits, hazards, reduction="none")
    own = -(torch.xlogy(hazards, hazards) + torch.xlogy(1 - hazards, 1 - hazards))
    return (survival_before(hazards) * (cross - own)).sum(-1)


def cdf_distance(logits: Tensor, hazards: Tensor) -> Tensor:
    """Mean over depths of |C_teacher - C_student|: student logits and teacher hazards [..., N] to [...]."""
    teacher, student = torch.cumprod(1 - hazards, -1), torch.cumprod(torch.sigmoid(-logits), -1)
    return (teacher - student).abs().mean(-1)


def distillation_loss(name: str, logits: Tensor, hazards: Tensor, min_depth: int) -> Tensor:
    """Mean loss over positions of student logits [N, R-min_depth] against teacher hazards lambda_1..lambda_{R-1}.

    `kl` is the survival-weighted hazard loss. `paper` is the recipe of the continuous-depth-batching authors: mean
    cross-entropy of unfolded hazards (of the whole distribution where nothing is folded) plus the mean distance of the
    folded cumulative distributions.
    """
    folded = fold(hazards, min_depth)
    if name == "kl":
        return hazard_kl(logits, folded).mean()
    if name != "paper":
        raise ValueError(f"no distillation loss is called {name!r}")
    if min_depth == 1:
        fit = hazard_kl(logits, folded).mean()
    else:
        fit = F.binary_cross_entropy_with_logits(logits, hazards[..., min_depth - 1 :])
    return fit + cdf_distance(logits, folded).mean()
