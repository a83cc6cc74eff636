"""States and exits that distillation learns from are those of the reference decoder, past a token's exit too."""

from __future__ import annotations

import pytest
import torch

from looped.config import ModelConfig
from looped.decode import generate
from looped.gates import FixedGate, Gate, OuroGate, ReplayGate
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.train.walk import ExitPolicy, Sequences, Walk, walk

LAYOUTS = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-2", "modulo-3")
THRESHOLD = 0.55


def micro_model(num_kv_heads: int = 2, loop_norm: bool = True) -> LoopedLM:
    """A random Ouro in float64 whose own gate leaves at every depth."""
    torch.manual_seed(3)
    config = ModelConfig(
        family="ouro",
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        num_prelude_layers=0,
        num_core_layers=2,
        num_coda_layers=0,
        max_loops=4,
        trained_loops=4,
        max_positions=64,
        rope_theta=10000.0,
        exit_gate=True,
        loop_norm=loop_norm,
        exit_threshold=THRESHOLD,
    )
    model = LoopedLM(config).double()
    assert model.exit_gate is not None
    model.exit_gate.weight.mul_(4)
    model.exit_gate.bias.fill_(-0.8)
    return model


class Recorder(Gate):
    """Passes on the decisions of another gate and keeps the readouts of the last decode pass, step by step."""

    def __init__(self, inner: Gate) -> None:
        self.inner, self.kind, self.latency = inner, inner.kind, inner.latency
        self.threshold, self.threshold_range, self.min_depth = inner.threshold, inner.threshold_range, inner.min_depth
        self.seen: list[torch.Tensor] = []

    def start(self, entry, params):
        self.seen = []
        return self.inner.start(entry, params)

    def step(self, state, z, step, params):
        self.seen.append(z[-1].clone())
        return self.inner.step(state, z, step, params)


def sequences(prompts: list[list[int]], answers: list[list[int]]) -> Sequences:
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return Sequences(tokens, torch.tensor([len(p) for p in prompts]), torch.tensor([len(r) for r in rows]))


def policy(model: LoopedLM, layout: str, prefill: str, rows: int, min_depth: int = 1, gate: Gate | None = None):
    bound = (gate or OuroGate()).bind(model)
    threshold = torch.full((rows,), THRESHOLD)
    return ExitPolicy(get_layout(layout), prefill == "ragged", bound, threshold, torch.full((rows,), min_depth))


PROMPTS = [[4, 9, 1, 7, 22], [3, 17, 2], [8, 8, 30, 11, 5, 6, 19]]


@pytest.mark.parametrize("prefill", ["dense", "ragged"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exits_and_states_are_those_of_the_reference_decoder(layout: str, prefill: str) -> None:
    model = micro_model()
    new = (9, 6, 8)
    options = {"layout": layout, "prefill": prefill, "threshold": THRESHOLD, "ignore_eos": True}
    runs = [generate(model, p, gate="ouro", max_new_tokens=n, **options) for p, n in zip(PROMPTS, new, strict=True)]
    batch = sequences(PROMPTS, [run.token_ids for run in runs])
    seen = walk(model, batch, policy(model, layout, prefill, len(PROMPTS)))
    every = [depth for run in runs for depth in run.depths[1:]]
    assert len(set(every)) >= 3, "the model's exits must differ for this test to mean something"
    for row, run in enumerate(runs):
        start = len(PROMPTS[row])
        assert seen.depths[row, start : start + len(run.depths) - 1].tolist() == run.depths[1:]
        assert batch.decode[row].nonzero()[:, 0].tolist() == [*range(start, start + len(run.depths) - 1)]
        assert int(seen.depths[row, start - 1]) == run.depths[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_past_its_exit_sees_what_it_would_if_it_alone_ran_on(layout: str) -> None:
    model = micro_model()
    prompt = PROMPTS[0]
    sampled = {"layout": layout, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    run = generate(model, prompt, gate="ouro", threshold=THRESHOLD, max_new_tokens=8, **sampled)
    seen = walk(model, sequences([prompt], [run.token_ids]), policy(model, layout, "dense", 1))
    assert len(set(run.depths[1:])) > 1
    for index in range(1, 8):
        longer = Recorder(ReplayGate([*run.depths[:index], 4]))
        again = generate(model, prompt, gate=longer, max_new_tokens=index + 1, **sampled)
        assert again.token_ids[:index] == run.token_ids[:index]
        mine = torch.stack([h[0, len(prompt) + index - 1] for h in seen.states])
        torch.testing.assert_close(mine, torch.stack(longer.seen), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["depth", "last-exited", "ragged"])
@pytest.mark.parametrize("prefill", ["dense", "ragged"])
def test_one_pass_equals_token_by_token(layout: str, prefill: str) -> None:
    model = micro_model(num_kv_heads=1, loop_norm=False)
    generator = torch.Generator().manual_seed(1)
    answers = [torch.randint(0, 31, (n,), generator=generator).tolist() for n in (12, 5, 9)]
    batch = sequences(PROMPTS, answers)
    whole = walk(model, batch, policy(model, layout, prefill, 3, min_depth=2))
    gate = OuroGate().bind(model)
    gate.uses_carry = True  # forces one pass a token
    single = walk(model, batch, policy(model, layout, prefill, 3, min_depth=2)._replace(gate=gate))
    assert_same(whole, single, batch)
    assert int(whole.depths[batch.decode].min()) == 2
    assert bool((whole.depths[batch.prompt] == 4).all()) is (prefill == "dense")


def assert_same(a: Walk, b: Walk, batch: Sequences) -> None:
    there = batch.decode | batch.prompt
    assert torch.equal(a.depths[there], b.depths[there])
    for one, other in zip([a.start, *a.states], [b.start, *b.states], strict=True):
        torch.testing.assert_close(one[there], other[there], rtol=1e-10, atol=1e-10)


def test_a_lookahead_policy_exits_where_the_decoder_does() -> None:
    model = micro_model()
    prompt = PROMPTS[2]
    run = generate(model, prompt, gate=FixedGate(2), max_new_tokens=6, ignore_eos=True)
    batch = sequences([prompt], [run.token_ids])
    seen = walk(model, batch, policy(model, "ragged", "dense", 1, gate=FixedGate(2)))
    assert set(seen.depths[batch.decode].tolist()) == {2}
    assert set(seen.depths[batch.prompt].tolist()) == {4}
