"""Exit distributions, priors, and the parallel ragged forward against a token-by-token one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from looped.model import LoopedLM
from looped.train import exits
from looped.train.build import new_model
from looped.train.evaluate import exit_score, first_below, threshold_exit
from looped.train.kept import BestAvailable, LastPlane
from looped.train.losses import chunked_loss
from looped.train.objective import correlation, gate_hazard, interpolated, ragged_readout
from looped.train.recipe import Init, Shape, model_config


def micro(family: str = "ouro", loops: int = 4) -> LoopedLM:
    layers = (0, 2, 0) if family == "ouro" else (1, 1, 1)
    shape = Shape(family, 16, 24, 2, layers, loops)  # type: ignore[arg-type]
    init = Init(embed_std=1.0, linear_std=0.3, head_std=0.3, branch_gain=0.5)
    model = new_model(model_config(shape, 32, 64, 0, 1), init, seed=3)
    if model.exit_gate is not None:
        torch.nn.init.normal_(model.exit_gate.weight, 0.0, 0.7)
    return model


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
    [("poisson", (0.315, 0.331, 0.232, 0.122)), ("uniform", (0.25, 0.25, 0.25, 0.25))],
)
def test_priors(name: exits.PriorName, values: tuple[float, ...]) -> None:
    torch.testing.assert_close(exits.exit_prior(name, 4), torch.tensor(values), atol=5e-4, rtol=0)


def test_geometric_prior_falls_by_one_factor() -> None:
    prior = exits.exit_prior("geometric", 4)
    torch.testing.assert_close(prior[1:] / prior[:-1], torch.full((3,), 0.63))
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


def test_ragged_forward_is_dense_when_no_token_leaves() -> None:
    model = micro()
    tokens = torch.randint(0, 32, (3, 12))
    z, depth = ragged_readout(model, tokens, 4, BestAvailable(), lambda z, step: torch.zeros_like(tokens).bool())
    torch.testing.assert_close(z, model.states(tokens, 4)[-1])
    assert (depth == 4).all()


class _OneToken:
    """`attend` of one new token over earlier ones, each at the K/V of min(step, its exit depth)."""

    def __init__(self) -> None:
        self.rows: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = []
        self.depths: list[int] = []
        self.now: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.step = 1

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.now[layer, self.step] = (k, v)
        past = [row[layer, min(self.step, e)] for row, e in zip(self.rows, self.depths, strict=True)]
        keys = torch.cat([*(row[0] for row in past), k], 1).transpose(1, 2)
        values = torch.cat([*(row[1] for row in past), v], 1).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2)


@torch.no_grad()
def test_ragged_forward_is_token_by_token_decoding() -> None:
    model = micro()
    tokens = torch.randint(0, 32, (1, 14))
    z, depth = ragged_readout(model, tokens, 4, BestAvailable(), threshold_exit(model, 0.5))
    assert len(set(depth.flatten().tolist())) > 1
    attend = _OneToken()
    for i in range(tokens.shape[1]):
        position = torch.tensor([i])
        attend.now, hazards = {}, []
        h, injection = model.prelude(tokens[:, i : i + 1], position, attend)
        for step in range(1, 5):
            attend.step = step
            h = model.core(h, injection, position, step, attend)
            hazards.append(gate_hazard(model, model.readout(h)))
            survived = torch.cat(hazards, -1).neg().add(1).prod()
            if 1 - survived >= 0.5 or step == 4:
                break
        attend.rows.append(attend.now)
        attend.depths.append(step)
        torch.testing.assert_close(model.readout(h)[:, 0], z[:, i], atol=1e-5, rtol=1e-5)
    assert attend.depths == depth[0].tolist()


def test_last_plane_reads_what_was_kept_of_others_and_the_present_of_itself() -> None:
    q, k, v, old_k, old_v = (torch.randn(1, 5, 2, 8) for _ in range(5))
    plane = LastPlane()
    plane.begin(range(1))
    plane(0, q, old_k, old_v)
    plane.replay()
    out = plane(0, q, k, v)
    for i in range(5):
        keys = torch.cat((old_k[:, :i], k[:, i : i + 1]), 1).transpose(1, 2)
        values = torch.cat((old_v[:, :i], v[:, i : i + 1]), 1).transpose(1, 2)
        query = q[:, i : i + 1].transpose(1, 2)
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values).transpose(1, 2)
        torch.testing.assert_close(out[:, i : i + 1], expected)


def test_last_plane_keeps_the_step_at_which_a_position_left() -> None:
    first, second = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    plane = LastPlane()
    plane.begin(range(1))
    plane.active = torch.tensor([[True, True, True]])
    plane(0, first, first, first)
    plane.active = torch.tensor([[True, False, True]])
    plane(0, second, second, second)
    plane.replay()
    own = torch.zeros(1, 3, 1, 4)
    out = plane(0, own, own, own)  # a zero query weighs all its keys alike
    expected = (second[:, 0] + first[:, 1]) / 3
    torch.testing.assert_close(out[:, 2], expected)


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
