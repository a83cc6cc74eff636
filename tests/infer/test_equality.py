"""The engine against the reference decoder: equal tokens and equal depths, exactly, in float64.

The grid is every layout × gate × scheduler on both families. Ways to hear of exits, padding, widths, coda batches,
budgets, chunks, page sizes and temperatures rotate over it, so that each layout and gate meets several of each.
"""

import itertools

import pytest
import torch

from looped import SamplingParams
from looped.gates import ReplayGate
from looped.infer import Engine, EngineOptions
from tests.infer.harness import drain, exits_modes, gate_case, make_engine, micro, prompts, reference, run
from tests.models import micro_ouro

LAYOUTS = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-3")
GATES = ("ouro", "convergence", "fixed", "delay", "lookahead", "pre-loop", "hybrid")
MAX_TOKENS = 4

# W, K, M, chunk_size, page_size, temperature
SETTINGS = (
    {"max_num_seqs": 3, "min_coda_batch": 1, "max_num_batched_tokens": 20, "page_size": 16},
    {"max_num_seqs": 7, "min_coda_batch": 4, "max_num_batched_tokens": 8192, "page_size": 1},
    {"max_num_seqs": 1, "min_coda_batch": 1, "max_num_batched_tokens": 8, "chunk_size": 8, "page_size": 4},
    {"max_num_seqs": 4, "min_coda_batch": 4, "max_num_batched_tokens": 32, "chunk_size": 5, "page_size": 16},
    {"max_num_seqs": 5, "min_coda_batch": 2, "max_num_batched_tokens": 64, "min_free_slots": 3, "page_size": 64},
)


def grid():
    number = itertools.count()
    for family in ("ouro", "huginn"):
        for layout, gate in itertools.product(LAYOUTS, GATES):
            if gate == "ouro" and family == "huginn":
                continue
            for mode in ("refill", "no-refill"):
                yield pytest.param(family, layout, gate, mode, next(number), id=f"{family}-{layout}-{gate}-{mode}")
        for layout in LAYOUTS:
            yield pytest.param(family, layout, "none", "cb", next(number), id=f"{family}-{layout}-cb")


def settings_for(family, layout, gate, mode, number):
    # 5 settings against pairs of schedulers: every (layout, gate) meets two of them, every layout all.
    ways = exits_modes(family, gate, mode)
    settings = {**SETTINGS[number % len(SETTINGS)], "exits": ways[number % len(ways)], "pad_batches": number % 4 < 2}
    if layout == "ragged":
        settings["page_size"] = None
    return settings, (0.0, 0.8)[number // len(SETTINGS) % 2]


@pytest.mark.parametrize(("family", "layout", "gate", "mode", "number"), list(grid()))
def test_engine_equals_reference(family, layout, gate, mode, number):
    settings, temperature = settings_for(family, layout, gate, mode, number)
    engine = make_engine(family, mode, layout, gate, seed=5, **settings)
    results = run(engine, prompts(), SamplingParams(temperature, MAX_TOKENS, ignore_eos=True))
    # Only where a plane is overwritten do cuts matter, so the reference needs them only there.
    chunk = settings.get("chunk_size") if engine.policy.layout.cut_sensitive else None
    for result, prompt in zip(results, prompts(), strict=True):
        expected = reference(family, layout, gate, prompt, MAX_TOKENS, temperature, chunk, seed=5)
        assert (result.token_ids, result.depths) == expected
        assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("family", "gate"), [(f, g) for f in ("ouro", "huginn") for g in GATES if (f, g) != ("huginn", "ouro")]
)
def test_the_grid_has_exits_at_several_depths(family, gate):
    layout = "last-exited"
    depths = [d for p in prompts() for d in reference(family, layout, gate, p, 12)[1][1:]]
    assert len(set(depths)) > (0 if gate == "fixed" else 1)
    assert min(depths) < micro(family).config.max_loops


@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("layout", ["last-exited", "ragged", "shared"])
@pytest.mark.parametrize("gate", ["convergence", "lookahead"])
def test_dense_compute(family, layout, gate):
    engine = make_engine(family, "refill", layout, gate, compute="dense")
    results = run(engine, prompts(), SamplingParams(0, MAX_TOKENS, ignore_eos=True))
    for result, prompt in zip(results, prompts(), strict=True):
        expected = reference(family, layout, gate, prompt, MAX_TOKENS, compute="dense")
        assert (result.token_ids, result.depths) == expected


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
@pytest.mark.parametrize("layout", ["ragged", "depth", "modulo-3"])
def test_truncated_depth_lowers_prompt_and_decode(mode, layout):
    engine = make_engine("ouro", mode, layout, depth=2)
    results = run(engine, prompts(), SamplingParams(0, MAX_TOKENS, ignore_eos=True))
    for result, prompt in zip(results, prompts(), strict=True):
        expected = reference("ouro", layout, "none", prompt, MAX_TOKENS, depth=2)
        assert (result.token_ids, result.depths) == expected
        assert set(result.depths) == {2}


def test_replayed_depths_are_looked_up_by_request():
    depths = [[4, 1, 3, 2, 4, 1], [4, 2, 2, 1, 1, 3]]
    engine = Engine(micro("ouro"), EngineOptions(gate=ReplayGate(depths), max_num_seqs=2, poison=True))
    results = run(engine, prompts()[:2], SamplingParams(0, 6, ignore_eos=True))
    assert [result.depths for result in results] == depths


def test_ragged_equals_last_exited_to_the_bit():
    """Two storages of one function: every hidden state and every sampled token is the same, bit for bit."""
    engines = [
        make_engine("ouro", "refill", layout, "ouro", page_size=1, max_num_seqs=3)
        for layout in ("ragged", "last-exited")
    ]
    from looped.infer import Request

    for engine in engines:
        for number, prompt in enumerate(prompts()):
            engine.add(Request(str(number), prompt, SamplingParams(0, 9, ignore_eos=True)))
    while engines[0].has_work:
        outputs = [engine.step() for engine in engines]
        assert outputs[0] == outputs[1]
        assert torch.equal(engines[0].runner.state.h, engines[1].runner.state.h)
    assert not engines[1].has_work


def test_ragged_memory_is_the_sum_of_exit_depths():
    engine = make_engine("ouro", "refill", "ragged", "ouro")
    results = run(engine, prompts(), SamplingParams(0, 9, ignore_eos=True))
    # The last token never runs; depths[i] belongs to the pass of token i - 1.
    rows = sum(4 * len(prompt) for prompt in prompts()) + sum(sum(result.depths[1:]) for result in results)
    tokens = sum(len(prompt) + len(result.depths) - 1 for prompt, result in zip(prompts(), results, strict=True))
    assert engine.kv.usage().rows == rows
    assert engine.kv.usage().full_rows == 4 * tokens
    assert rows < 4 * tokens


def test_ragged_pages_in_use_follow_the_tokens_that_ran():
    engine = make_engine("ouro", "no-refill", "ragged", "fixed", max_num_seqs=2)
    from looped.infer import Request

    for number, prompt in enumerate(prompts((3, 5))):
        engine.add(Request(str(number), prompt, SamplingParams(0, 4, ignore_eos=True)))
    seen = []
    while engine.has_work:
        engine.step()
        if not engine.scheduler.core:
            seen.append(engine.kv.usage().pages_in_use)
    # Both prompts in four planes, then two planes for each token of both, then nothing.
    assert sorted(set(seen), reverse=True) == [44, 40, 36, 32, 0]


@pytest.mark.parametrize("mode", ["no-refill", "refill"])
def test_every_request_may_have_its_own_threshold_and_depth(mode):
    from looped import generate
    from looped.infer import Request

    model, case = micro("ouro"), gate_case("ouro", "ouro")
    engine = make_engine("ouro", mode, "last-exited", "ouro")
    own = [(0.2, None), (0.9, None), (None, 3), (1.0, None), (0.5, 2)]
    for number, (threshold, floor) in enumerate(own):
        params = SamplingParams(0, 8, ignore_eos=True, exit_threshold=threshold, min_depth=floor)
        engine.add(Request(str(number), prompts()[number], params))
    outputs = drain(engine)
    for number, (threshold, floor) in enumerate(own):
        expected = generate(
            model,
            prompts()[number],
            layout="last-exited",
            gate=case.gate,
            threshold=case.threshold if threshold is None else threshold,
            min_depth=floor,
            max_new_tokens=8,
            ignore_eos=True,
        )
        assert [o.token for o in outputs[str(number)]] == expected.token_ids
        assert [o.depth for o in outputs[str(number)]] == expected.depths


@pytest.mark.parametrize("layout", ["ragged", "depth", "shared"])
def test_max_depth_of_a_request_caps_its_exits(layout):
    engine = make_engine("ouro", "refill", layout)
    results = run(engine, prompts()[:3], SamplingParams(0, 8, ignore_eos=True, max_depth=2))
    for result, prompt in zip(results, prompts(), strict=False):
        assert (result.token_ids, result.depths) == reference("ouro", layout, "fixed", prompt, 8)
        assert result.depths == [4] + [2] * 7


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_other_head_counts_and_split_models(num_kv_heads):
    """Multi-query and plain heads, and an Ouro block with unshared layers around the core."""
    from looped import generate

    model = micro_ouro(num_kv_heads=num_kv_heads, num_prelude_layers=1, num_coda_layers=2, num_core_layers=1)
    engine = make_engine("ouro", "refill", "ragged", "ouro", model=model)
    results = run(engine, prompts(), SamplingParams(0, MAX_TOKENS, ignore_eos=True))
    for result, prompt in zip(results, prompts(), strict=True):
        expected = generate(
            model, prompt, layout="ragged", gate="ouro", threshold=0.6, max_new_tokens=MAX_TOKENS, ignore_eos=True
        )
        assert (result.token_ids, result.depths) == (expected.token_ids, expected.depths)


def test_float32_agrees_as_well():
    from looped import generate

    model = micro_ouro(dtype=torch.float32)
    engine = make_engine("ouro", "refill", "ragged", "ouro", model=model)
    results = run(engine, prompts(), SamplingParams(0, MAX_TOKENS, ignore_eos=True))
    same = [
        result.token_ids
        == generate(
            model, prompt, layout="ragged", gate="ouro", threshold=0.6, max_new_tokens=MAX_TOKENS, ignore_eos=True
        ).token_ids
        for result, prompt in zip(results, prompts(), strict=True)
    ]
    assert sum(same) >= len(same) - 1
