"""The terms of the training losses: by hand, against exact enumeration, and over a few steps of descent."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from looped.data.packing import ANSWER_NUMBER, ANSWER_SIDE, DIRECT
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.options import parse
from looped.train.pretrain import exits
from looped.train.pretrain.cost import step_kinds
from looped.train.pretrain.figures import depth_figures
from looped.train.pretrain.guards import depth_is_idle, warnings
from looped.train.pretrain.huginn_loss import HuginnLoss
from looped.train.pretrain.losses import chunked_loss
from looped.train.pretrain.objective import Moment
from looped.train.pretrain.ouro_loss import OuroLoss
from looped.train.pretrain.recipe import Objective, Options, Recurrence, check
from looped.train.pretrain.reinforce import score_term, suffix_sums
from looped.train.pretrain.rollout import Setting, fixed, roll
from looped.train.pretrain.schedule import beta, sample_loops, under_layout
from looped.train.pretrain.windows import Batch
from tests.conftest import REPOSITORY
from tests.models import micro_huginn, micro_ouro


def batch_of(rows: int, length: int, seed: int = 0) -> Batch:
    """Random windows; half of the targets are answers, some of them direct ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 61, (rows, length + 1), generator=generator)
    marks = torch.zeros(rows, length, dtype=torch.uint8)
    marks[:, ::2] = ANSWER_SIDE
    marks[:, ::4] = ANSWER_SIDE | ANSWER_NUMBER | DIRECT
    return Batch(tokens[:, :-1], tokens[:, 1:], marks)


def moment(step: int = 1, progress: float = 0.9, weight: float = 0.1) -> Moment:
    return Moment(step, progress, weight, seed=step)


def gradients(value: Tensor, model: LoopedLM) -> list[Tensor]:
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def trainable(**changes: Any) -> LoopedLM:
    return micro_ouro(**changes).requires_grad_(True)


class Forced(OuroLoss):
    """Trajectories given beforehand instead of drawn."""

    trajectories: list[Tensor]

    def _sampled(self, model: LoopedLM, batch: Batch, generator: torch.Generator) -> Any:
        return fixed(self.trajectories.pop(0))


def expected_loss(
    model: LoopedLM, batch: Batch, weights: Tensor, loops: int
) -> tuple[Tensor, list[tuple[Tensor, float]]]:
    """Sum over all exits of their probability times the weighted loss at them, and each with its probability."""
    total, found = torch.zeros((), dtype=torch.float64), []
    for choice in itertools.product(range(1, loops + 1), repeat=batch.inputs.numel()):
        depths = torch.tensor(choice).view(batch.inputs.shape)
        rollout = roll(model, batch.inputs, loops, Setting(get_layout("ragged")), lambda depths=depths: fixed(depths))  # type: ignore[misc]
        hazards = torch.cat([exits.gate_hazard(model, model.readout(h)) for h in rollout.states], -1)
        chance = exits.log_probability(hazards, depths).sum().exp()
        losses = chunked_loss(model.readout(rollout.at_exit()), model.head.weight, batch.targets)
        total = total + chance * (losses * weights).sum()
        found.append((depths, float(chance.detach())))
    return total, found


@pytest.mark.parametrize(("count", "length"), [(1, 3), (2, 2)])
def test_reinforce_is_the_gradient_of_the_expected_loss(count: int, length: int) -> None:
    """Over all trajectories (count at a time), weighted by their probability, the gradients add up to the exact one."""
    model = trainable(max_loops=2, trained_loops=2)
    batch = batch_of(1, length)  # its second token is no target, but its exit matters
    options = Objective(aware="reinforce", trajectories=count, score_weight=1.0, question_weight=0.0)
    weights = batch.answer.double() / batch.answer.sum()
    exact, chances = expected_loss(model, batch, weights, 2)
    assert sum(chance for _, chance in chances) == pytest.approx(1.0)
    loss = Forced(options, 2)
    at = moment()
    dense = gradients(loss.dense(model, batch, at).value, model)
    wanted = gradients(exact, model)
    sums = [torch.zeros_like(g) for g in dense]
    for chosen in itertools.product(chances, repeat=count):
        loss.trajectories = [depths for depths, _ in chosen]
        value = loss.reinforce(model, batch, at).value
        probability = float(torch.tensor([chance for _, chance in chosen], dtype=torch.float64).prod())
        for total, whole, part in zip(sums, gradients(value, model), dense, strict=True):
            total += probability * (whole - part)
    assert max(float(g.abs().max()) for g in wanted) > 0.01
    for one, other in zip(sums, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_score_term_by_hand() -> None:
    losses = torch.tensor([[[1.0, 2.0, 4.0]], [[3.0, 0.0, 2.0]]])
    weights, real = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, True, False]])
    assert suffix_sums(losses[0]).tolist() == [[7.0, 6.0, 4.0]]
    log_probs = torch.tensor([[[0.1, 0.2, 0.3]], [[1.0, 2.0, 3.0]]])
    dense = torch.tensor([[1.0, 9.0, 1.0]])
    # returns 5, 4 of the first trajectory over those of the dense path 2, 1
    one = score_term(losses[:1], log_probs[:1], weights, real, dense)
    assert float(one) == pytest.approx(0.1 * (5 - 2) + 0.2 * (4 - 1))
    # of two, each is the other's baseline: 5, 4 against 5, 2
    two = score_term(losses, log_probs, weights, real, dense)
    assert float(two) == pytest.approx((0.2 * (4 - 2) + 2.0 * (2 - 4)) / 2)


def test_counterfactual_is_the_dense_objective_where_nobody_leaves() -> None:
    model, batch = trainable(), batch_of(2, 9)
    loss = OuroLoss(Objective(aware="counterfactual", commit_threshold=1.0, depth_cost=0.01), 4)
    private, dense = loss.counterfactual(model, batch, moment()), loss.dense(model, batch, moment())
    torch.testing.assert_close(private.value, dense.value, rtol=1e-9, atol=1e-9)
    # the value is the same, its gradient is not: what others left is constant
    gap = [a - b for a, b in zip(gradients(private.value, model), gradients(dense.value, model), strict=True)]
    assert max(float(g.abs().max()) for g in gap) > 1e-4


def test_counterfactual_against_a_loop_over_tokens() -> None:
    """Eq. 18: each token alone at every depth, over constants, weighted by its own exit distribution."""
    model, batch = trainable(), batch_of(1, 6)
    options = Objective(aware="counterfactual", floor=0.0, kl="local")
    ours = OuroLoss(options, 4).counterfactual(model, batch, moment())
    with torch.no_grad():
        setting = Setting(get_layout("ragged"))
        depths = roll(model, batch.inputs, 4, setting, lambda: exits.by_threshold(model, 0.5)).depths
    assert len(depths.unique()) > 1
    total = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        kept = _left(model, batch.inputs[:, : i + 1], depths[:, : i + 1])
        z = _alone(model, batch.inputs, i, depths, kept)
        pi = exits.exit_distribution(torch.cat([exits.gate_hazard(model, h) for h in z], -1))
        losses = torch.stack([chunked_loss(h, model.head.weight, batch.targets[:, i : i + 1]) for h in z], -1)
        total = total + (pi * losses).sum() + 0.1 * exits.local_kl(pi, exits.exit_prior("poisson", 4))
    torch.testing.assert_close(ours.value, total / 6, rtol=1e-9, atol=1e-9)
    for one, other in zip(gradients(ours.value, model), gradients(total / 6, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


Left = dict[tuple[int, int], tuple[Tensor, Tensor]]


@torch.no_grad()
def _left(model: LoopedLM, ids: Tensor, depths: Tensor) -> Left:
    """K/V by (layer, step) of a dense-mask ragged forward over a prefix, those of step min(r, e_j)."""
    found: Left = {}
    step = 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if step > 1:
            still = (depths >= step)[..., None, None]
            k, v = (torch.where(still, new, old) for new, old in zip((k, v), found[layer, step - 1], strict=True))
        found[layer, step] = (k, v)
        keys, values = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
        scores = q.transpose(1, 2) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ values).transpose(1, 2)

    positions = torch.arange(ids.shape[1])
    h, injection = model.prelude(ids, positions, attend)
    for step in range(1, 5):
        h = torch.where((depths >= step)[..., None], model.core(h, injection, positions, step, attend), h)
    return found


def _alone(model: LoopedLM, ids: Tensor, i: int, depths: Tensor, left: Left) -> list[Tensor]:
    """Readouts of token i at steps 1..4 over what tokens before it left."""
    step = 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = (x[:, :i] for x in left[layer, step])
        keys, values = (torch.cat(pair, 1).transpose(1, 2).repeat_interleave(2, 1) for pair in ((old_k, k), (old_v, v)))
        weights = (q.transpose(1, 2) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ values).transpose(1, 2)

    position, readouts = torch.tensor([i]), []
    h, injection = model.prelude(ids[:, i : i + 1], position, attend)
    for step in range(1, 5):
        h = model.core(h, injection, position, step, attend)
        readouts.append(model.readout(h))
    return readouts


def test_budget_costs_above_it_only() -> None:
    model, batch = trainable(), batch_of(2, 8)
    at = moment(weight=0.0)
    plain = OuroLoss(Objective(), 4).dense(model, batch, at)
    mean = sum(d * float(plain.log[f"pi_{d}"]) for d in range(1, 5))
    loose = OuroLoss(Objective(depth_budget=mean + 0.1, budget_cost=2.0), 4).dense(model, batch, at)
    tight = OuroLoss(Objective(depth_budget=mean - 0.1, budget_cost=2.0), 4).dense(model, batch, at)
    assert float(loose.value.detach()) == pytest.approx(float(plain.value.detach()), abs=1e-9)
    assert float(tight.value.detach()) == pytest.approx(float(plain.value.detach()) + 0.2, abs=1e-6)


def test_beta_pauses_where_the_guards_speak() -> None:
    seen = set()
    for seed in range(6):
        model, batch = micro_ouro(seed).requires_grad_(True), batch_of(2, 8)
        loss = OuroLoss(Objective(beta_pause=True), 4)
        early = loss.dense(model, batch, moment(progress=0.0, weight=5.0))
        late = loss.dense(model, batch, moment(progress=0.9, weight=5.0))
        log = {name: float(value) for name, value in late.log.items()}
        idle = log["direct_ce_1"] - log["direct_ce_4"] < 0.01 or log["gain_correlation"] <= 0
        assert (float(early.log["beta_paused"]), log["beta_paused"]) == (0.0, float(idle))
        assert float((early.value - late.value).detach()) == pytest.approx(5.0 * log["kl"] * idle, rel=1e-5)
        seen.add(idle)
    assert seen == {True, False}


def test_idle_depth() -> None:
    good, bad = torch.tensor(0.1), torch.tensor(-0.1)
    assert not depth_is_idle(0.9, good, good, good)
    assert depth_is_idle(0.4, torch.tensor(0.005), good, good) and not depth_is_idle(
        0.2, torch.tensor(0.005), good, None
    )
    assert depth_is_idle(0.2, good, bad, good) and not depth_is_idle(0.05, good, bad, good)
    assert depth_is_idle(0.0, good, good, torch.tensor(0.02))


def test_warnings_of_logged_figures() -> None:
    fine = {
        "pi_1": 0.5,
        "pi_2": 0.5,
        "ce_1": 1.0,
        "ce_2": 0.5,
        "drift_2": 0.3,
        "gain_correlation": 0.2,
        "progress": 0.5,
    }
    assert warnings(fine, 2) == [] and warnings({"steps": 2.0}, 2) == []
    assert warnings(fine | {"ce_2": 0.995}, 2) == ["WARN depth gains nothing"]
    assert warnings(fine | {"pi_2": 0.01}, 2) == ["WARN an exit is unused"]
    assert warnings(fine | {"gain_correlation": 0.0}, 2) == ["WARN exits go the wrong way"]
    assert warnings(fine | {"drift_2": 0.02}, 2) == ["WARN loop 2 does nothing"]


def test_figures_of_exits_by_hand() -> None:
    batch = batch_of(1, 4)
    pi = torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.2, 0.8], [0.6, 0.4]]])
    losses = torch.tensor([[[1.0, 1.0], [3.0, 1.0], [3.0, 1.0], [1.0, 1.0]]])
    z = torch.ones(1, 4, 2)
    log = depth_figures(losses, pi, batch, [z, 2 * z])
    assert [float(log[f"hard_exit_{d}"]) for d in (1, 2)] == [0.5, 0.5]
    assert (float(log["jump_0"]), float(log["jump_1"]), float(log["jump_2"])) == pytest.approx((1 / 3, 2 / 3, 0.0))
    assert float(log["adaptive_gain"]) == pytest.approx(1.5 - 1.0)
    assert float(log["gain_correlation"]) == pytest.approx(1.0, abs=1e-6)
    assert float(log["mean_entropy"]) > float(log["entropy"])
    assert float(log["drift_2"]) == pytest.approx(0.5)


def test_beta_schedules() -> None:
    ramp = Objective(beta=0.2, beta_schedule="cosine", beta_ramp=(0.1, 0.5))
    assert [round(beta(ramp, p), 4) for p in (0.0, 0.1, 0.3, 0.5, 1.0)] == [0.0, 0.0, 0.1, 0.2, 0.2]


def test_steps_under_the_layout_are_spread_evenly() -> None:
    assert [under_layout(0.5, step) for step in range(4)] == [False, True, False, True]
    assert sum(under_layout(0.3, step) for step in range(1000)) == 300
    assert all(under_layout(1.0, step) for step in range(5)) and not any(under_layout(0.0, step) for step in range(5))


def test_sampled_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = {kind: [sample_loops(kind, 3.0, 0.5, 4, generator) for _ in range(400)] for kind in ("uniform", "fixed")}  # type: ignore[arg-type]
    assert set(drawn["fixed"]) == {4} and set(drawn["uniform"]) == {1, 2, 3, 4}
    wide = torch.tensor([sample_loops("lognormal-poisson", 10.0, 0.5, 1000, generator) for _ in range(3000)]).float()
    assert abs(float(wide.mean()) - 10.0) < 0.5 and float(wide.std()) > 5.0  # wider than Poisson's root of 10


METHODS = [
    {"kl": "local", "prior": "uniform"},
    {"prior": "geometric", "prior_rate": 0.5, "beta_schedule": "cosine"},
    {"sampling": "uniform", "backprop": 1},
    {"sampling": "lognormal-poisson", "depth_budget": 2.0, "beta_pause": True},
    {"ragged_from": 0.0},
    {"ragged_from": 0.0, "aware": "counterfactual"},
    {"ragged_from": 0.0, "aware": "reinforce"},
    {"ragged_from": 0.0, "aware": "reinforce", "trajectories": 4},
    {"ragged_from": 0.0, "kv": "shared", "kv_share": 1.0, "kv_prompt": 0.5},
    {"ragged_from": 0.0, "kv": "shared", "kv_share": 1.0, "aware": "counterfactual"},
    {"ragged_from": 0.0, "kv": "first-shared", "aware": "reinforce"},
    {"ragged_from": 0.0, "kv": "modulo-2", "kv_gradient": False, "kv_passes": 2},
]


def descend(model: LoopedLM, loss: Any, steps: int) -> list[float]:
    batch, values = batch_of(3, 10), []
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        adam.zero_grad()
        now = Moment(step, step / steps, 0.05, seed=step)
        result = loss(model, batch, now)
        result.value.backward()
        adam.step()
        assert all(bool(figure.isfinite()) for figure in result.log.values())
        values.append(float(next(result.log[name] for name in ("ragged_loss", "loss") if name in result.log)))
    return values


@pytest.mark.parametrize("changes", METHODS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_every_objective_learns_a_batch(changes: dict[str, Any]) -> None:
    model = trainable(dtype=torch.float32)
    values = descend(model, OuroLoss(Objective(**changes), 4), 14)
    assert sum(values[-4:]) < sum(values[:4]) - 2.0


@pytest.mark.parametrize("layout", ["shared", "first-shared", "modulo-2", "ragged"])
def test_huginn_learns_a_batch_under_every_layout(layout: str) -> None:
    model = micro_huginn(dtype=torch.float32).requires_grad_(True)
    options = Recurrence(mean=3.0, backprop=2, kv=layout, kv_share=1.0, kv_from=0.0, kv_prompt=0.5, shallow_weight=0.3)
    values = descend(model, HuginnLoss(options, 5), 14)
    assert sum(values[-4:]) < sum(values[:4]) - 2.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prior": "geometric", "prior_rate": 1.5}, "between 0 and 1"),
        ({"prior_rate": 0.0}, "above 0"),
        ({"beta_ramp": (0.5, 0.2)}, "two rising parts"),
        ({"depth_budget": 0.5}, "at least 1"),
        ({"kv": "shard"}, "KV layout"),
        ({"trajectories": 0}, "trajectories"),
        ({"kv_share": 1.5}, "kv-share"),
    ],
)
def test_objectives_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    from looped.errors import LoopedError

    with pytest.raises(LoopedError, match=words):
        check(replace(Options(), objective=Objective(**changes)))


def test_a_model_is_served_under_the_layout_it_was_taught() -> None:
    from looped.train.pretrain.begin import served_layout

    ouro, huginn = micro_ouro().config, micro_huginn().config
    taught = replace(Options(), objective=Objective(kv="shared"), recurrence=Recurrence(kv="modulo-2", kv_share=0.5))
    assert (served_layout(taught, ouro), served_layout(taught, huginn)) == ("shared", "modulo-2")
    assert (served_layout(Options(), ouro), served_layout(Options(), huginn)) == ("ragged", "shared")
    never_begun = replace(taught, objective=Objective(kv="shared", ragged_from=1.0))
    assert served_layout(never_begun, ouro) == "ragged"
    assert served_layout(replace(taught, objective=Objective(kv="depth")), ouro) == "ragged"


RECIPES = [path for path in sorted(Path(REPOSITORY, "recipes").glob("*.yaml")) if "\noptim:" in path.read_text()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    options = parse(Options, ["--config", str(recipe)], "looped train")
    check(options)
    fully_looped = options.model.family == "ouro"
    config = micro_ouro().config if fully_looped else micro_huginn().config
    kinds = step_kinds(options, config)
    assert sum(kind.share for kind in kinds) == pytest.approx(1.0)


def test_steps_cost_what_the_losses_log() -> None:
    """The plan's shares and costs, against those of the micro-batches of a run."""
    config = micro_ouro().config
    for changes in METHODS[4:]:
        options = replace(Options(), objective=Objective(**(changes | {"ragged_from": 0.5})))
        model, loss = trainable(dtype=torch.float32), OuroLoss(options.objective, 4)
        with torch.no_grad():
            logs = [loss(model, batch_of(1, 6), Moment(step, step / 8, 0.1, step)).log for step in range(8)]
        kinds = step_kinds(options, config)
        for name in ("loops", "heads"):
            planned = sum(kind.share * getattr(kind, name) for kind in kinds)
            assert sum(float(log[f"{name}_run"]) for log in logs) / 8 == pytest.approx(planned, rel=1e-5)


SPREAD = [
    {"kl_tokens": "groups", "beta_pause": True, "depth_budget": 1.5, "depth_cost": 0.1, "sampling": "uniform"},
    {"ragged_from": 0.0, "aware": "counterfactual", "kv": "shared", "kv_share": 1.0, "kv_prompt": 0.6},
    {"ragged_from": 0.0, "aware": "reinforce", "trajectories": 2, "kv": "first-shared", "kv_prompt": 0.6},
]


def whole_or_half(changes: dict[str, Any], rows: slice) -> tuple[list[Tensor], dict[str, float]]:
    """Gradients and figures of these rows of one batch."""
    model, batch = trainable(), batch_of(4, 7)
    options = Objective(question_weight=0.5, **changes)
    result = OuroLoss(options, 4)(model, Batch(*(part[rows] for part in batch)), moment(step=3))
    return gradients(result.value, model), {name: float(value) for name, value in result.log.items()}


def one_of_two(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    found = []
    for changes in SPREAD:
        grads, log = whole_or_half(changes, slice(2 * rank, 2 * rank + 2))
        for grad in grads:
            dist.all_reduce(grad)
        found.append(([grad / 2 for grad in grads], log))
    torch.save(found, f"{place}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for changes, (grads, left), (_, right) in zip(SPREAD, *halves, strict=True):
        whole, log = whole_or_half(changes, slice(0, 4))
        for one, other in zip(grads, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        for name, value in log.items():
            if "drift" not in name:
                assert (left[name] + right[name]) / 2 == pytest.approx(value, abs=1e-5), name
