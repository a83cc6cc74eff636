"""Distillation losses of gates: what a student's hazards cost against its teacher's.

A student has logits of hazards from its first depth f on, [N, R - f]; the teacher has hazards lambda_1..lambda_{R-1},
folded at f to be compared.
"""

# N positions, R loop steps; leading dimensions [...] are free

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LOSSES = ("kl", "bce", "cdf", "hard", "ordinal", "paper")
CDF_GRID = (0.2, 0.28, 0.35, 0.42, 0.5, 0.6, 0.75)
"""Thresholds at which `cdf` compares exits."""
_SHARPNESS = 4.0


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


def cumulative_logits(logits: Tensor) -> Tensor:
    """logit C(d) from logits of hazards [..., N], without leaving logarithms: C = 1 - prod (1 - lambda)."""
    log_survival = F.logsigmoid(-logits).cumsum(-1)
    log_cumulative = torch.log(-torch.expm1(log_survival.clamp_max(-1e-7)))
    return log_cumulative - log_survival


def cdf_match(logits: Tensor, hazards: Tensor) -> Tensor:
    """Whether both have left by each depth at each threshold of a grid: logits and hazards [..., N] to [...].

    Mean over depths d and thresholds q of BCE(s (logit C_student(d) - logit q), [C_teacher(d) >= q]): the exits at all
    thresholds at once, so the dial of the teacher is learnt and not its probabilities.
    """
    thresholds = torch.tensor(CDF_GRID, device=logits.device, dtype=logits.dtype)
    teacher = 1 - torch.cumprod(1 - hazards, -1)
    wanted = (teacher[..., None] >= thresholds).to(logits.dtype)
    sharp = _SHARPNESS * (cumulative_logits(logits)[..., None] - torch.logit(thresholds))
    return F.binary_cross_entropy_with_logits(sharp, wanted, reduction="none").mean((-1, -2))


def hard_hazards(hazards: Tensor, threshold: float) -> Tensor:
    """The teacher's exit at a threshold as hazards: 0 before it, 1 from it on; all 0 where it runs all loops."""
    teacher = 1 - torch.cumprod(1 - hazards, -1)
    return ((teacher >= threshold) & (threshold < 1)).to(hazards.dtype)


def hard_exits(logits: Tensor, hazards: Tensor, threshold: float) -> Tensor:
    """Cross-entropy of the student's exit distribution on the teacher's exit depth at one threshold: [..., N] to [...].

    The best fit at that threshold; the dial is lost.
    """
    return hazard_kl(logits, hard_hazards(hazards, threshold))


def ordinal_exits(logits: Tensor, hazards: Tensor, threshold: float) -> Tensor:
    """Mean over depths of BCE(C_student(d), [teacher has left by d]) at one threshold: exits one off cost less."""
    wanted = hard_hazards(hazards, threshold)
    return F.binary_cross_entropy_with_logits(cumulative_logits(logits), wanted, reduction="none").mean(-1)


def paper_loss(logits: Tensor, hazards: Tensor, first: int, min_depth: int) -> Tensor:
    """The continuous-depth-batching authors' loss of hazard gates, a mean over positions.

    Cross-entropy of unfolded hazards, mean over steps, plus the mean distance of cumulative distributions folded at
    `min_depth`: student logits [N, R - first], teacher hazards [N, R - 1].
    """
    fit = F.binary_cross_entropy_with_logits(logits, hazards[..., first - 1 :])
    log_survival = F.logsigmoid(-logits).cumsum(-1)[..., min_depth - first :]
    teacher = torch.cumprod(1 - fold(hazards, min_depth), -1)
    return fit + (teacher - log_survival.exp()).abs().mean()


def distillation_loss(name: str, logits: Tensor, hazards: Tensor, first: int, threshold: float = 0.5) -> Tensor:
    """Mean loss over positions of student logits [N, R - first] against teacher hazards lambda_1..lambda_{R-1}.

    `kl` is the survival-weighted hazard loss, `bce` the same without weights, `cdf` compares exits over a grid of
    thresholds, `hard` and `ordinal` those at `threshold`. `paper` is the authors' recipe: `paper_loss` with mass folded
    at the first depth, or the KL of distributions plus their distance for a student of all depths.
    """
    folded = fold(hazards, first)
    if name == "kl":
        return hazard_kl(logits, folded).mean()
    if name == "bce":
        return F.binary_cross_entropy_with_logits(logits, folded)
    if name == "cdf":
        return cdf_match(logits, folded).mean()
    if name == "hard":
        return hard_exits(logits, folded, threshold).mean()
    if name == "ordinal":
        return ordinal_exits(logits, folded, threshold).mean()
    if name == "paper" and first > 1:
        return paper_loss(logits, hazards, first, first)
    if name == "paper":
        return hazard_kl(logits, folded).mean() + cdf_distance(logits, folded).mean()
    raise ValueError(f"no distillation loss is called {name!r}")


def improvement_weights(losses: Tensor) -> Tensor:
    """Ouro's stage-II labels from losses after each loop [..., R]: the probability w_t to go on, t = 2..R: [..., R-1].

    w_t = sigmoid(50 (I_t - 0.005)) with I_t = max(0, L_{t-1} - L_t), in nats.
    """
    improvement = (losses[..., :-1] - losses[..., 1:]).clamp_min(0)
    return torch.sigmoid(50 * (improvement - 0.005))
