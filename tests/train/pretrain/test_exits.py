"""Exit distributions, priors, figures of exits."""

from __future__ import annotations

import math

import pytest
import torch

from looped.train.pretrain import exits
from looped.train.pretrain.evaluate import exit_score, first_below
from looped.train.pretrain.figures import correlation, interpolated, jumps, perplexities
from looped.train.pretrain.losses import chunked_loss


def test_exit_distribution_by_hand() -> None:
    pi = exits.exit_distribution(torch.tensor([0.25, 0.5, 0.1, 0.9]))
    torch.testing.assert_close(pi, torch.tensor([0.25, 0.375, 0.0375, 0.3375]))


def test_exit_distribution_sums_to_one() -> None:
    pi = exits.exit_distribution(torch.rand(7, 5, 4, dtype=torch.float64))
    torch.testing.assert_close(pi.sum(-1), torch.ones(7, 5, dtype=torch.float64))
    assert (pi >= 0).all()


def test_initial_gate_gives_the_planned_distribution() -> None:
    hazard = 1 / (1 + math.exp(1.1))
    pi = exits.exit_distribution(torch.full((4,), hazard))
    torch.testing.assert_close(pi, torch.tensor([0.25, 0.1875, 0.1406, 0.4219]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("poisson", (0.315, 0.331, 0.232, 0.122)),
        ("geometric", (0.395, 0.276, 0.193, 0.135)),
        ("uniform", (0.25, 0.25, 0.25, 0.25)),
    ],
)
def test_priors(name: exits.PriorName, values: tuple[float, ...]) -> None:
    torch.testing.assert_close(exits.exit_prior(name, 4), torch.tensor(values), atol=5e-4, rtol=0)


def test_geometric_prior_falls_by_one_factor() -> None:
    prior = exits.exit_prior("geometric", 4, rate=0.4)
    torch.testing.assert_close(prior[1:] / prior[:-1], torch.full((3,), 0.6))
    assert prior.sum() == pytest.approx(1.0)


def test_global_and_local_kl_by_hand() -> None:
    pi = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    prior = torch.tensor([0.5, 0.5])
    # two opposite certain tokens: their mean is the prior, each alone is log 2 away from it
    assert exits.global_kl(pi, prior) == pytest.approx(0.0, abs=1e-6)
    assert exits.local_kl(pi, prior) == pytest.approx(math.log(2), abs=1e-6)
    skewed = torch.tensor([0.25, 0.75])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert exits.global_kl(pi, skewed) == pytest.approx(expected, abs=1e-6)
    assert exits.global_kl(pi, prior, torch.tensor([True, False])) == pytest.approx(math.log(2), abs=1e-6)


def test_hard_exits() -> None:
    pi = torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4], [0.1, 0.1, 0.8]])
    assert exits.hard_exits(pi, 0.5).tolist() == [1, 2, 3]
    assert exits.hard_exits(pi, 1.1).tolist() == [3, 3, 3]


def test_log_probability_of_exits_is_that_of_the_distribution() -> None:
    hazards = torch.rand(5, 7, 4, dtype=torch.float64)
    pi = exits.exit_distribution(hazards)
    for depth in range(1, 5):
        depths = torch.full((5, 7), depth)
        torch.testing.assert_close(exits.log_probability(hazards, depths), pi[..., depth - 1].log())


def test_jump_rates_and_perplexities_by_hand() -> None:
    none, one, more = jumps(torch.tensor([[1, 1, 2, 4], [4, 1, 1, 1]]))
    assert (float(none), float(one), float(more)) == pytest.approx((3 / 6, 1 / 6, 2 / 6))
    assert perplexities({"ce_1": 9.0, "ce_2": 2.0}, 2) == pytest.approx({"full_perplexity": math.exp(2)})
    assert perplexities({"ce_2": 2.0, "ragged_loss": 1.0}, 2)["ragged_perplexity"] == pytest.approx(math.e)


def test_chunked_loss_is_cross_entropy_with_its_gradients() -> None:
    z, weight = torch.randn(2, 7, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets, mix = torch.randint(0, 11, (2, 7)), torch.rand(2, 7)
    losses = chunked_loss(z, weight, targets, chunk=5)
    plain = torch.nn.functional.cross_entropy((z @ weight.T).flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), plain)
    ours = torch.autograd.grad((losses * mix).sum(), (z, weight))
    theirs = torch.autograd.grad((plain * mix.flatten()).sum(), (z, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_interpolation_and_correlation() -> None:
    curve = torch.tensor([4.0, 2.0, 1.0])
    assert interpolated(curve, torch.tensor(1.5)) == pytest.approx(3.0)
    assert interpolated(curve, torch.tensor(3.0)) == pytest.approx(1.0)
    x = torch.tensor([1.0, 2.0, 3.0])
    assert correlation(x, 5 - 2 * x) == pytest.approx(-1.0)
    assert correlation(x, torch.ones(3)) == 0


def test_exit_score_rewards_exits_that_know() -> None:
    # token 0 is solved at depth 1, token 1 only at depth 2
    losses = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    good = exit_score(0.5, "all", losses, torch.tensor([1, 2]))
    bad = exit_score(0.5, "all", losses, torch.tensor([2, 1]))
    assert (good.ce, bad.ce) == (0.0, 1.0)
    assert good.random_ce == bad.random_ce == good.fixed_ce == pytest.approx(0.5)
    assert good.adaptive_gain == pytest.approx(0.5)
    assert bad.adaptive_gain == pytest.approx(-0.5)
    assert good.gain_correlation > 0 > bad.gain_correlation


def test_convergence_exit_is_never_at_step_one() -> None:
    change = torch.tensor([[0.01, 0.02, 0.5], [0.9, 0.5, 0.01], [0.9, 0.9, 0.9]])
    assert first_below(change, 0.1).tolist() == [2, 3, 3]
