"""Distillation losses: the chain rule, folding, and the authors' recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped.gates.calibration import curve, exit_depths
from looped.gates.losses import (
    LOSSES,
    cdf_distance,
    cdf_match,
    cumulative_logits,
    distillation_loss,
    fold,
    hard_exits,
    hazard_kl,
    improvement_weights,
    ordinal_exits,
    paper_loss,
    survival_before,
)


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


@pytest.mark.parametrize("name", ["kl", "bce"])
def test_bce_counts_every_step_alike_where_kl_counts_those_reached(name: str) -> None:
    """A token that has surely left weighs nothing in the KL of its later steps."""
    hazards = torch.tensor([[1.0, 0.3, 0.3]], dtype=torch.float64)
    wrong = torch.tensor([[9.0, 5.0, 5.0]], dtype=torch.float64)
    right = torch.cat((wrong[:, :1], torch.logit(hazards[:, 1:])), -1)
    gap = distillation_loss(name, wrong, hazards, 1) - distillation_loss(name, right, hazards, 1)
    assert (float(gap) > 0.1) == (name == "bce")


def test_logits_of_cumulative_probabilities() -> None:
    logits, _ = random_case()
    cumulative = 1 - torch.cumprod(1 - torch.sigmoid(logits), -1)
    torch.testing.assert_close(cumulative_logits(logits), torch.logit(cumulative))
    extreme = torch.tensor([[-60.0, -60.0, 40.0, 40.0]])
    assert bool(cumulative_logits(extreme).isfinite().all())


def test_cdf_match_wants_the_same_exits_at_every_threshold() -> None:
    _, hazards = random_case()
    teacher = cdf_match(torch.logit(hazards), hazards)
    for shift in (-2.0, 2.0):
        assert float((cdf_match(torch.logit(hazards) + shift, hazards) - teacher).mean()) > 0.1


@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_hard_exits_are_cross_entropy_on_the_exit_depth(threshold: float) -> None:
    logits, hazards = random_case()
    depth = exit_depths(curve(hazards, 1), threshold)
    student = distribution(torch.sigmoid(logits))
    expected = -student.gather(1, depth[:, None] - 1)[:, 0].log()
    torch.testing.assert_close(hard_exits(logits, hazards, threshold), expected)


def test_ordinal_costs_distance() -> None:
    """One loop off costs less than two."""
    hazards = torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float64)  # leaves at 1
    costs = []
    for depth in (1, 2, 3):
        logits = torch.full((1, 3), -8.0, dtype=torch.float64)
        logits[:, depth - 1 :] = 8.0
        costs.append(float(ordinal_exits(logits, hazards, 0.5)))
    assert costs == sorted(costs) and costs[2] > 1.9 * costs[1]


def test_hard_losses_prefer_the_teachers_exits_and_lose_the_dial() -> None:
    hazards = torch.full((1, 3), 0.4, dtype=torch.float64)
    for name in ("hard", "ordinal"):
        sure = distillation_loss(name, torch.tensor([[-9.0, 9.0, 9.0]], dtype=torch.float64), hazards, 1, 0.5)
        soft = distillation_loss(name, torch.logit(hazards), hazards, 1, 0.5)
        assert float(sure) < 0.01 < float(soft)


def test_paper_loss_of_a_gate_of_all_steps_folds_the_distributions_alone() -> None:
    logits, hazards = random_case(columns=3)
    cross = torch.nn.functional.binary_cross_entropy_with_logits(logits, hazards)
    student = fold(torch.sigmoid(logits), 2)
    expected = cross + cdf_distance(torch.logit(student), fold(hazards, 2)).mean()
    torch.testing.assert_close(paper_loss(logits, hazards, 1, 2), expected)


def test_losses_have_gradients_and_other_names_are_refused() -> None:
    logits, hazards = random_case(columns=3)
    for name in LOSSES:
        for first in (1, 2):
            student = logits[:, first - 1 :].clone().requires_grad_()
            distillation_loss(name, student, hazards, first).backward()
            assert student.grad is not None and bool(student.grad.isfinite().all())
    with pytest.raises(ValueError, match="no distillation loss"):
        distillation_loss("hinge", logits, hazards, 1)


def test_labels_of_stage_two() -> None:
    losses = torch.tensor([[2.0, 1.0, 1.005, 1.0]])  # improves by 1, not at all, by .005
    weights = improvement_weights(losses)
    assert weights[0].tolist() == pytest.approx([1.0, torch.sigmoid(torch.tensor(-0.25)).item(), 0.5], abs=1e-4)
