"""Forwards over whole sequences under every KV layout, against the reference decoder fed the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped.decode import DecodePolicy, PrefillSchedule, _Decoder, resolve_policy
from looped.gates import ReplayGate
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.pretrain import exits
from looped.train.pretrain.kept import Dense
from looped.train.pretrain.rollout import Rollout, Setting, fixed, never, one_forward, roll
from looped.train.pretrain.streams import TwoStreams, dense_mask
from tests.models import micro_huginn, micro_ouro

LENGTH = 10
LAYOUTS = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-2", "modulo-3")
MODELS = {"ouro": micro_ouro, "huginn": micro_huginn}


def tokens(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def teacher_forced(model: LoopedLM, policy: DecodePolicy, ids: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """The reference decoder fed `ids` [T], the first `prompt` of them at once: logits and depths of the rest."""
    decoder = _Decoder(model, policy, len(ids), 0, None)
    decoder.prompt_chunk(ids[:prompt].tolist(), 0, prompt)
    logits, depths = [], []
    for index, at in enumerate(range(prompt, len(ids))):
        trip, out = decoder.decode_token(int(ids[at]), at, index)
        logits.append(out[0])
        depths.append(int(trip.depths[0]))
    return torch.stack(logits), torch.tensor(depths)


def start_of(model: LoopedLM, ids: Tensor) -> Tensor | None:
    """What the reference decoder starts from: the noise of seed 0."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model.init_state(torch.zeros_like(ids), positions)


def logits_at_exit(model: LoopedLM, rollout: Rollout) -> Tensor:
    return model.coda(rollout.at_exit(), torch.arange(rollout.depths.shape[1]), dense_causal)


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prompt", [1, 4])
def test_a_forward_at_fixed_exits_is_the_reference_decoder(family: str, layout: str, prompt: int) -> None:
    model, ids, kv = MODELS[family](), tokens(), get_layout(layout)
    loops = model.config.max_loops
    depths = torch.randint(1, loops + 1, ids.shape, generator=torch.Generator().manual_seed(5))
    replay = ReplayGate([int(d) for d in depths[0, prompt:]])
    policy = resolve_policy(model, kv, replay)
    expected, ran = teacher_forced(model, policy, ids[0], prompt)
    setting = Setting(kv, prompt_lens=torch.tensor([prompt]), passes=LENGTH - prompt)
    rollout = roll(model, ids, loops, setting, lambda: fixed(depths), start_of(model, ids))
    assert rollout.depths[0, prompt:].tolist() == ran.tolist() and (rollout.depths[0, :prompt] == loops).all()
    torch.testing.assert_close(logits_at_exit(model, rollout)[0, prompt:], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["last-exited", "shared", "first-shared", "modulo-2"])
def test_exits_that_the_gate_decides_are_those_of_the_reference_decoder(layout: str) -> None:
    """Exits are decided anew in every forward, so they settle along with what tokens leave."""
    model, ids, kv = micro_ouro(seed=3), tokens(seed=2), get_layout(layout)
    expected, ran = teacher_forced(model, resolve_policy(model, kv, "ouro", 0.5), ids[0], 2)
    assert len(set(ran.tolist())) > 1
    setting = Setting(kv, prompt_lens=torch.tensor([2]), passes=LENGTH)
    rollout = roll(model, ids, 4, setting, lambda: exits.by_threshold(model, 0.5))
    assert rollout.depths[0, 2:].tolist() == ran.tolist()
    torch.testing.assert_close(logits_at_exit(model, rollout)[0, 2:], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_prompts_that_exit_are_a_ragged_prefill() -> None:
    model, ids = micro_ouro(seed=3), tokens(seed=4)
    policy = resolve_policy(model, "ragged", "ouro", 0.5, prefill="ragged", prefill_threshold=PrefillSchedule(0.5))
    trip, _ = _Decoder(model, policy, LENGTH, 0, None).prompt_chunk(ids[0].tolist(), 0, LENGTH)
    rollout = roll(model, ids, 4, Setting(policy.layout), lambda: exits.by_threshold(model, 0.5))
    assert rollout.depths[0].tolist() == trip.depths.tolist() and len(set(trip.depths.tolist())) > 1
    torch.testing.assert_close(rollout.at_exit()[0], trip.exit_h, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_each_pass_makes_one_more_position_exact() -> None:
    model, ids, kv = micro_ouro(), tokens(), get_layout("shared")
    depths = torch.randint(1, 5, ids.shape, generator=torch.Generator().manual_seed(6))

    def states(passes: int) -> Tensor:
        return roll(model, ids, 4, Setting(kv, passes=passes), lambda: fixed(depths)).at_exit()

    exact = states(LENGTH)
    for passes in (1, 3, 5):
        gap = (states(passes) - exact).abs().amax(-1)[0]
        assert gap[: passes + 1].max() < 1e-12 < gap[passes + 1 :].min()


@torch.no_grad()
def test_dense_when_nobody_leaves() -> None:
    model, ids = micro_ouro(), tokens(3)
    for layout in ("depth", "ragged"):
        for private in (False, True):
            rollout = roll(model, ids, 4, Setting(get_layout(layout), private), lambda: never)
            for h, z in zip(rollout.states, model.states(ids), strict=True):
                torch.testing.assert_close(model.readout(h), z, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["ragged", "shared", "modulo-2"])
def test_private_depths_token_by_token(layout: str) -> None:
    """Counterfactual states: token i at depth d, alone, over what the committed exits of j < i left (eq. 17)."""
    model, ids, kv = micro_ouro(), tokens(), get_layout(layout)
    depths = torch.randint(1, 5, ids.shape, generator=torch.Generator().manual_seed(7))
    setting = Setting(kv, private=True, passes=LENGTH)
    states = roll(model, ids, 4, setting, lambda: fixed(depths)).states
    for i in (0, 3, LENGTH - 1):
        for depth in range(1, 5):
            trips = [*depths[0, :i].tolist(), depth]
            decoder = _Decoder(model, resolve_policy(model, kv, ReplayGate(trips)), LENGTH, 0, None)
            for index in range(i + 1):  # from the first token on, as tokens that are decoded
                trip, _ = decoder.decode_token(int(ids[0, index]), index, index)
            torch.testing.assert_close(states[depth - 1][0, i], trip.exit_h[0], rtol=1e-10, atol=1e-10)


def test_committed_k_v_get_no_gradient_and_private_ones_do() -> None:
    """The gradient of token i's private loss is that of token i alone over constants."""
    model, ids = micro_ouro().requires_grad_(True), tokens()
    depths = torch.full_like(ids, 2)
    states = roll(model, ids, 4, Setting(get_layout("ragged"), private=True), lambda: fixed(depths)).states
    embedded = torch.autograd.grad(states[-1][0, -1].square().sum(), model.embed.weight)[0]
    touched = embedded.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [int(ids[0, -1])]


@pytest.mark.parametrize("gradient", [False, True])
def test_gradients_reach_the_writers_of_a_shared_plane_only_if_wanted(gradient: bool) -> None:
    model, ids = micro_ouro().requires_grad_(True), tokens()
    setting = Setting(get_layout("shared"), passes=2, gradient=gradient)
    h = roll(model, ids, 4, setting, lambda: fixed(torch.full_like(ids, 3))).at_exit()
    embedded = torch.autograd.grad(h[0, -1].square().sum(), model.embed.weight)[0]
    assert (len(embedded.abs().sum(-1).nonzero()) > 1) == gradient


@pytest.mark.parametrize("family", MODELS)
def test_truncated_backpropagation_is_that_of_the_last_steps(family: str) -> None:
    model, ids = MODELS[family]().requires_grad_(True), tokens(2)
    loops, last = model.config.max_loops, 2
    positions, state = torch.arange(LENGTH), start_of(model, ids)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("exit_gate")]

    def gradients(h: Tensor) -> list[Tensor]:
        value = model.coda(h, positions, dense_causal).logsumexp(-1).square().sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    ours = gradients(one_forward(model, ids, loops, Dense(), never, state, free=loops - last).states[-1])
    h, injection = model.prelude(ids, positions, dense_causal, state)
    for step in range(1, loops + 1):
        h = model.core(h, injection, positions, step, dense_causal)
        h = h.detach() if step == loops - last else h
    for one, other in zip(ours, gradients(h), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("prompts", [None, (0, 3, 7)])
def test_flex_attention_is_the_dense_mask(prompts: tuple[int, ...] | None) -> None:
    """On a CPU FlexAttention has no backward pass; the GPU tests compare gradients."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 7, 4, 16, generator=generator)
    pairs = [torch.randn(3, 7, 2, 16, generator=generator) for _ in range(4)]
    lens = None if prompts is None else torch.tensor(prompts)
    flex = TwoStreams(lens, "flex")(q, *pairs)
    torch.testing.assert_close(flex, TwoStreams(lens, "mask")(q, *pairs), rtol=1e-5, atol=1e-5)


def test_the_mask_by_hand() -> None:
    mask = dense_mask(3, torch.tensor([0, 2]), torch.device("cpu"))[:, 0].int().tolist()
    assert mask[0] == [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
    assert mask[1] == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 1]]


def test_a_compiled_block_leaves_the_two_streams_alone() -> None:
    """Which layer and step it is stays out of the compiled code: one graph serves all."""
    model, ids, kv = micro_ouro(dtype=torch.float32), tokens(), get_layout("shared")
    depths = torch.full_like(ids, 2)

    def run() -> Tensor:
        return roll(model, ids, 4, Setting(kv), lambda: fixed(depths)).at_exit()

    from looped.train.pretrain.build import compile_blocks

    plain = run()
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(run(), plain, rtol=1e-5, atol=1e-5)
