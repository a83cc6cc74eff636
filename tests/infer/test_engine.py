"""The engine's edges: ends of sequences, aborts, failures, refusals, statistics."""

import math

import pytest

from looped import LoopedError, generate
from looped.infer import Engine, EngineOptions, Request, SamplingParams
from looped.infer.scheduler import Stage
from tests.infer.harness import check_books, drain, make_engine, micro, prompts, reference, run
from tests.models import micro_ouro

GREEDY = SamplingParams(0, 6, ignore_eos=True)


def test_eos_ends_a_sequence_and_is_kept():
    model = micro_ouro()
    engine = make_engine("ouro", gate="ouro", model=model)
    work = prompts((5, 9, 12, 20, 7), seed=3)
    results = run(engine, work, SamplingParams(1.0, 40, seed=7))
    reasons = set()
    for result, prompt in zip(results, work, strict=True):
        expected = generate(
            model, prompt, layout="ragged", gate="ouro", threshold=0.6, max_new_tokens=40, temperature=1.0, seed=7
        )
        assert (result.token_ids, result.depths) == (expected.token_ids, expected.depths)
        assert result.finish_reason == expected.finish_reason
        reasons.add(result.finish_reason)
    assert "stop" in reasons


def test_stop_token_ids_end_a_sequence_and_are_kept():
    token_ids, _ = reference("ouro", "ragged", "none", prompts()[1], 6)
    stop = token_ids[2]
    result = run(make_engine("ouro"), prompts()[1:2], SamplingParams(0, 6, True, stop_token_ids=[stop]))[0]
    assert result.token_ids == token_ids[: token_ids.index(stop) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
def test_the_context_ends_a_sequence(mode):
    model = micro_ouro(max_positions=20)
    work = prompts((19, 18, 10))
    results = run(make_engine("ouro", mode, model=model), work, SamplingParams(0, 99, True))
    assert [len(result.token_ids) for result in results] == [1, 2, 10]
    for result, prompt in zip(results, work, strict=True):
        expected = generate(model, prompt, layout="ragged", max_new_tokens=99, ignore_eos=True)
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, "length")


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
def test_one_token_requests_never_decode(mode):
    engine = make_engine("ouro", mode)
    results = run(engine, prompts(), SamplingParams(0, 1, True))
    assert all(len(result.token_ids) == 1 and result.depths == [4] for result in results)
    assert engine.stats.stages[Stage.CORE].batches == 0


def test_an_aborted_request_leaves_the_others_alone():
    engine = make_engine("ouro", gate="ouro", max_num_seqs=3)
    for number, prompt in enumerate(prompts()):
        engine.add(Request(str(number), prompt, GREEDY))
    outputs = {}
    for _ in range(4):
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
    assert engine.abort("1") and engine.abort("4") and not engine.abort("4")
    check_books(engine)
    drain(engine, outputs)
    for number in (0, 2, 3):
        expected = reference("ouro", "ragged", "ouro", prompts()[number], 6)
        assert [o.token for o in outputs[str(number)]] == expected[0]


def test_a_small_pool_makes_requests_wait_and_the_impossible_is_refused():
    engine = make_engine("ouro", layout="last-exited", num_pages=4 * 3, page_size=16)
    assert engine.kv.capacity_tokens == 48
    with pytest.raises(LoopedError, match="do not fit into a KV pool of 48 tokens"):
        engine.add(Request("big", tuple(range(1, 40)), SamplingParams(0, 20, True)))
    results = run(engine, prompts(), GREEDY)
    for result, prompt in zip(results, prompts(), strict=True):
        assert result.token_ids == reference("ouro", "last-exited", "none", prompt, 6)[0]
    assert engine.kv.usage().peak_pages == 12


def test_the_last_page_can_be_used():
    engine = make_engine("ouro", layout="shared", num_pages=2, page_size=16)
    # 27 + 6 - 1 tokens are stored.
    results = run(engine, prompts((27,)), GREEDY)
    assert results[0].token_ids == reference("ouro", "shared", "none", prompts((27,))[0], 6)[0]
    with pytest.raises(LoopedError, match="do not fit"):
        engine.add(Request("x", prompts((28,))[0], GREEDY))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "refil"}, "did you mean 'refill'"),
        ({"layout": "raged"}, "did you mean 'ragged'"),
        ({"exits": "now"}, "unknown exits"),
        ({"gate": "ouro", "exits": "lookahead"}, "the gate delayed-ouro"),
        ({"exits": "device", "mix_prefill": True}, "mix_prefill works with exits 'sync' and 'lookahead'"),
        ({"mode": "cb", "mix_prefill": True}, "mix_prefill needs mode"),
        ({"gate": "ouro", "prefill": "ragged", "mix_prefill": True}, "dense prefill"),
        ({"prefill": "sparse"}, "unknown prefill"),
        ({"prefill": "ragged"}, "ragged prefill need a gate"),
        ({"gate": "pre-loop", "prefill": "ragged"}, "cannot run in a ragged prefill"),
        ({"gate": "ouro", "prefill_threshold": 0.5}, "needs prefill='ragged'"),
        ({"gate": "ouro", "prefill": "ragged", "mode": "cb"}, "a ragged prefill needs"),
        ({"preemption": "recomputed"}, "did you mean 'recompute'"),
        ({"layout": "shared", "preemption": "recompute"}, "use 'offload'"),
        ({"layout": "shared", "prefix_caching": True}, "needs chunk_size"),
        ({"backend": "spda"}, "did you mean 'sdpa'"),
        ({"layout": "ragged", "page_size": 16}, "page_size must be 1"),
        ({"layout": "shared", "page_size": 0}, "page_size must be at least 1"),
        ({"num_pages": 3}, "num_pages must be at least 4"),
        ({"num_pages": 10**15}, "num_pages must be at most"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"depth": 5}, "depth must be between 1 and"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"min_coda_batch": 9}, "min_coda_batch"),
        ({"kv_headroom": 1.5}, "kv_headroom"),
        ({"compute": "spare"}, "unknown compute"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(options, message):
    with pytest.raises(LoopedError, match=message):
        make_engine("ouro", **options)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_depth": 0}, "min_depth"),
        ({"min_depth": 3, "max_depth": 2}, "above max_depth"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n must be"),
        ({"stop": ("",)}, "empty"),
        ({"seed": 1 << 63}, "64 bits"),
    ],
)
def test_bad_parameters_are_refused_in_a_sentence(params, message):
    with pytest.raises(LoopedError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("engine", "params", "message"),
    [
        ({"gate": "ouro"}, {"exit_threshold": 1.5}, "outside the range"),
        ({"gate": "ouro"}, {"max_depth": 5}, "between 1 and 4"),
        ({"gate": "none"}, {"exit_threshold": 0.5}, "without a gate"),
        ({"gate": "ouro", "mode": "cb"}, {"exit_threshold": 0.5}, "under mode 'cb'"),
        ({"gate": "ouro", "mode": "cb"}, {"max_depth": 2}, "under mode 'cb'"),
        ({}, {"stop": "x"}, "no.*tokenizer|has none"),
    ],
)
def test_requests_that_cannot_run_are_refused_at_once(engine, params, message):
    built = make_engine("ouro", **engine)
    with pytest.raises(LoopedError, match=message):
        built.add(Request("a", (1, 2), SamplingParams(**params)))
    assert not built.has_work


@pytest.mark.parametrize("prompt", [(), (61,), (-1,), tuple(range(1, 49)) * 2])
def test_bad_prompts_are_refused_at_once(prompt):
    with pytest.raises(LoopedError):
        make_engine("ouro").add(Request("a", prompt, GREEDY))


def test_a_key_in_use_is_refused_and_free_again_afterwards():
    engine = make_engine("ouro")
    engine.add(Request("a", (1, 2), GREEDY))
    with pytest.raises(LoopedError, match="'a'"):
        engine.add(Request("a", (1, 2), GREEDY))
    drain(engine)
    engine.add(Request("a", (1, 2), GREEDY))
    drain(engine)


def test_statistics_add_up():
    engine = make_engine("ouro", gate="ouro")
    results = run(engine, prompts(), GREEDY)
    stats = engine.stats
    decode = [depth for result in results for depth in result.depths[1:]]
    assert stats.prompt_tokens == sum(map(len, prompts()))
    assert (stats.first_tokens, stats.decode_tokens) == (len(results), len(decode))
    assert stats.mean_depth == pytest.approx(sum(decode) / len(decode))
    assert stats.mean_depth_with_first == pytest.approx((sum(decode) + 4 * len(results)) / stats.tokens)
    assert stats.stages[Stage.CORE].rows == sum(decode)
    assert stats.stages[Stage.CODA].rows == stats.stages[Stage.PRELUDE].rows == len(decode)
    assert 0 < stats.prefill_share < 1
    engine.reset_stats()
    assert engine.stats.tokens == 0


def test_replayed_engine_is_the_same_again():
    engine = make_engine("huginn", "refill", "shared", "convergence")
    first = run(engine, prompts(), SamplingParams(0.9, 6, True, seed=3))
    assert run(engine, prompts(), SamplingParams(0.9, 6, True, seed=3)) == first
    assert run(engine, prompts(), SamplingParams(0.9, 6, True, seed=4)) != first


def test_the_start_message_names_what_was_chosen(caplog):
    with caplog.at_level("INFO", logger="looped.infer"):
        Engine(micro("ouro"), EngineOptions(kv="ragged", num_pages=400))
    text = caplog.text
    assert "room for 100 tokens" in text and "bytes a token" in text and "sdpa" in text and "layout ragged" in text
