"""Distillation losses: the chain rule, folding, and the authors' recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped.gates.losses import cdf_distance, distillation_loss, fold, hazard_kl, survival_before


def distribution(hazards: Tensor) -> Tensor:
    """pi over depths from hazards [..., N]: N values and what is left."""
    rest = torch.cumprod(1 - hazards, -1)
    before = torch.cat((torch.ones_like(rest[..., :1]), rest[..., :-1]), -1)
    return torch.cat((hazards * before, rest[..., -1:]), -1)


def random_case(n: int = 64, columns: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hazards = torch.rand(n, columns, generator=generator, dtype=torch.float64)
    return 2 * torch.randn(n, columns, generator=generator, dtype=torch.float64), hazards


def test_survival_weighted_loss_is_the_kl_of_exit_distributions() -> None:
    logits, hazards = random_case()
    teacher, student = distribution(hazards), distribution(torch.sigmoid(logits))
    expected = (teacher * (teacher.log() - student.log())).sum(-1)
    torch.testing.assert_close(hazard_kl(logits, hazards), expected)


def test_kl_is_zero_for_the_teacher_itself_and_finite_at_certain_hazards() -> None:
    _, hazards = random_case()
    assert float(hazard_kl(torch.logit(hazards), hazards).abs().max()) < 1e-12
    certain = torch.tensor([[0.0, 1.0, 0.5]], dtype=torch.float64)
    loss = hazard_kl(torch.zeros(1, 3, dtype=torch.float64), certain)
    assert float(loss) == pytest.approx(2 * torch.log(torch.tensor(2.0)).item(), rel=1e-6)


@pytest.mark.parametrize("min_depth", [1, 2, 3, 4])
def test_folding_moves_mass_below_the_floor_onto_it(min_depth: int) -> None:
    _, hazards = random_case()
    pi, folded = distribution(hazards), distribution(fold(hazards, min_depth))
    assert folded.shape[-1] == pi.shape[-1] - min_depth + 1
    torch.testing.assert_close(folded[:, 0], pi[:, :min_depth].sum(-1))
    torch.testing.assert_close(folded[:, 1:], pi[:, min_depth:])


def test_survival_is_the_chance_to_reach_each_depth() -> None:
    hazards = torch.tensor([0.25, 0.5, 0.9])
    torch.testing.assert_close(survival_before(hazards), torch.tensor([1.0, 0.75, 0.375]))


def test_cdf_distance() -> None:
    hazards = torch.tensor([[0.5, 0.5]])
    logits = torch.logit(torch.tensor([[0.25, 0.5]]))  # C: .25, .625 against .5, .75
    assert float(cdf_distance(logits, hazards)) == pytest.approx((0.25 + 0.125) / 2)


def test_paper_loss_compares_unfolded_hazards_and_folded_distributions() -> None:
    logits, hazards = random_case(columns=3)
    cross = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 1:], hazards[:, 1:])
    expected = cross + cdf_distance(logits[:, 1:], fold(hazards, 2)).mean()
    torch.testing.assert_close(distillation_loss("paper", logits[:, 1:], hazards, 2), expected)
    whole = hazard_kl(logits, hazards).mean() + cdf_distance(logits, hazards).mean()
    torch.testing.assert_close(distillation_loss("paper", logits, hazards, 1), whole)


def test_gradient_of_the_loss_vanishes_at_the_teacher() -> None:
    _, hazards = random_case()
    logits = torch.logit(fold(hazards, 2)).requires_grad_()
    distillation_loss("kl", logits, hazards, 2).backward()
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-12
