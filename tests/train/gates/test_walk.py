"""States and exits that distillation learns from are those of the reference decoder, past a token's exit too."""

from __future__ import annotations

import itertools

import pytest
import torch

from looped.config import ModelConfig
from looped.decode import generate
from looped.errors import LoopedError
from looped.gates import FixedGate, Gate, OuroGate, ReplayGate
from looped.kv import get_layout
from looped.model import LoopedLM
from looped.train.gates import varlen
from looped.train.gates.batches import Document, packed, padded
from looped.train.gates.leaving import ExitPolicy, Walk
from looped.train.gates.sequences import Bounds, Packed, Sequences
from looped.train.gates.walk import walk

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


def documents(dtype_seed: int = 1) -> list[Document]:
    generator = torch.Generator().manual_seed(dtype_seed)
    sizes = ((5, 12), (2, 5), (7, 9), (1, 2), (3, 20), (1, 1), (9, 3))
    return [
        Document(torch.randint(0, 31, (prompt + answer,), generator=generator).tolist(), prompt)
        for prompt, answer in sizes
    ]


def spread_policy(model: LoopedLM, layout: str, prefill: str, batch: Sequences | Packed, values: torch.Tensor):
    gate = OuroGate().bind(model)
    floor = batch.spread(1 + (values > THRESHOLD).long())
    return ExitPolicy(get_layout(layout), prefill == "ragged", gate, batch.spread(values), floor)


@pytest.mark.parametrize("layout", ["depth", "last-exited", "ragged"])
@pytest.mark.parametrize("prefill", ["dense", "ragged"])
@pytest.mark.parametrize(("num_kv_heads", "dtype"), [(1, "float64"), (2, "float64"), (2, "float32"), (1, "bfloat16")])
def test_packed_sequences_see_what_they_see_alone(layout: str, prefill: str, num_kv_heads: int, dtype: str) -> None:
    """Each with a threshold and a floor of its own, in whatever row and behind whatever else it stands."""
    kind: torch.dtype = getattr(torch, dtype)
    model = micro_model(num_kv_heads, loop_norm=False).to(kind)
    docs = documents()
    values = torch.linspace(0.3, 0.8, len(docs))
    alone = []
    for document, value in zip(docs, values, strict=True):
        batch = padded([document])
        seen = walk(model, batch, spread_policy(model, layout, prefill, batch, value[None]))
        alone.append((batch.decode[0] | batch.prompt[0], seen))
    rows = [[3, 0, 5], [1], [6, 4], [2]]
    batch = packed([[docs[index] for index in row] for row in rows], 40)
    order = torch.zeros(batch.num_sequences)
    places = {}
    for row, numbers in enumerate(rows):
        at = 0
        for index in numbers:
            order[batch.numbers[row, at]] = values[index]
            places[index] = (row, at)
            at += len(docs[index].token_ids)
    together = walk(model, batch, spread_policy(model, layout, prefill, batch, order))
    depths = set()
    tolerance = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 0.1}[dtype]
    for index, (row, at) in places.items():
        there, seen = alone[index]
        span = slice(at, at + len(docs[index].token_ids))
        assert torch.equal((batch.decode | batch.prompt)[row, span], there)
        if dtype == "float64":  # elsewhere a hazard may lie on a threshold
            assert torch.equal(together.depths[row, span][there], seen.depths[0][there])
            depths |= set(seen.depths[0][there].tolist())
        if dtype != "bfloat16" or layout == "depth":
            for one, other in zip([together.start, *together.states], [seen.start, *seen.states], strict=True):
                torch.testing.assert_close(one[row, span][there], other[0][there], rtol=tolerance, atol=tolerance)
    assert dtype != "float64" or depths == {1, 2, 3, 4}
    assert all(bool(h.isfinite().all()) and h.dtype == kind for h in together.states)


def test_a_token_of_another_sequence_changes_nothing() -> None:
    model = micro_model()
    docs = documents()
    results = []
    for first in (docs[0], Document([30 - token for token in docs[0].token_ids], 5)):
        batch = packed([[first, docs[4]]], 48)
        values = torch.full((batch.num_sequences,), THRESHOLD)
        results.append(walk(model, batch, spread_policy(model, "ragged", "dense", batch, values)))
    span = slice(len(docs[0].token_ids), len(docs[0].token_ids) + len(docs[4].token_ids))
    for one, other in zip(results[0].states, results[1].states, strict=True):
        assert torch.equal(one[:, span], other[:, span])
        assert not torch.equal(one[:, :17], other[:, :17])


def test_packed_sequences_are_refused_where_tokens_come_one_by_one() -> None:
    model = micro_model()
    batch = packed([documents()[:2]], 40)
    with pytest.raises(LoopedError, match="layout shared with the ouro gate takes them token by token"):
        walk(model, batch, policy(model, "shared", "dense", 1))


@pytest.mark.parametrize("cuts", [(0, 1), (0, 1, 2, 9), (0, 300, 301, 700), (0, 6, 12, 18)])
def test_attention_to_what_was_kept_and_the_own_key(cuts: tuple[int, ...]) -> None:
    """Against the definition, one query after another."""
    generator = torch.Generator().manual_seed(0)
    number = cuts[-1]
    q = torch.randn(number, 4, 8, generator=generator, dtype=torch.float64) * 3
    kept_k, kept_v, k, v = torch.randn(4, number, 2, 8, generator=generator, dtype=torch.float64)
    bounds = Bounds(torch.tensor(cuts, dtype=torch.int32), cuts)
    found = varlen.causal_own(q, kept_k, kept_v, k, v, bounds)
    plain = varlen.causal(q, k, v, bounds)
    for begin, end in itertools.pairwise(cuts):
        for at in {begin, (begin + end) // 2, end - 1}:
            for keys, values, result in ((kept_k, kept_v, found), (k, v, plain)):
                seen_k = torch.cat((keys[begin:at], k[at : at + 1])).repeat_interleave(2, 1)
                seen_v = torch.cat((values[begin:at], v[at : at + 1])).repeat_interleave(2, 1)
                weights = (torch.einsum("hk,nhk->nh", q[at], seen_k) * 8**-0.5).softmax(0)
                torch.testing.assert_close(result[at], torch.einsum("nh,nhk->hk", weights, seen_v))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cuts", [(0, 1), (0, 1, 2, 9), (0, 300, 301, 700), (0, 512, 1024, 4096), (0, 4095, 4096)])
def test_flash_attention_is_the_plain_one(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, kept_k, kept_v, k, v = (torch.randn(cuts[-1], 4, 128, generator=generator).to("cuda", dtype) for _ in range(5))
    bounds = Bounds(torch.tensor(cuts, dtype=torch.int32, device="cuda"), cuts)
    wide = [x.double() for x in (q, kept_k, kept_v, k, v)]
    for found, expected in (
        (varlen.causal_own(q, kept_k, kept_v, k, v, bounds), varlen.causal_own(*wide, bounds)),
        (varlen.causal(q, k, v, bounds), varlen.causal(wide[0], wide[3], wide[4], bounds)),
    ):
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["depth", "ragged"])
def test_a_gpu_walks_packed_rows_as_the_cpu_does(layout: str) -> None:
    """In bfloat16, with fused kernels and FlashAttention, against float64; a constant gate, so that exits agree."""
    model = micro_model()
    docs = documents()
    batch = packed([[docs[0], docs[4]], [docs[1], docs[2]]], 40)
    values = torch.linspace(0.3, 0.8, batch.num_sequences)
    expected = walk(model, batch, spread_policy(model, layout, "dense", batch, values)._replace(gate=FixedGate(2)))
    gpu = micro_model().to("cuda", torch.bfloat16)
    moved = batch.to(gpu.device)
    seen = walk(gpu, moved, spread_policy(gpu, layout, "dense", moved, values.cuda())._replace(gate=FixedGate(2)))
    there = batch.decode | batch.prompt
    assert torch.equal(seen.depths.cpu()[there], expected.depths[there])
    for one, other in zip(seen.states, expected.states, strict=True):
        error = (one.cpu().double() - other)[there].norm() / other[there].norm()
        assert float(error) < 0.05
