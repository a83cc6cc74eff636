"""Random arrivals, lengths, aborts and pool sizes: output equals the reference whatever else happens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.infer import Request, SamplingParams
from looped.kv import get_layout
from tests.infer.harness import advance, drain, make_engine, prompts, reference

LENS = (1, 2, 5, 9, 14)
MAX_TOKENS = 6

arrivals = st.tuples(st.just("add"), st.integers(0, len(LENS) - 1), st.integers(1, MAX_TOKENS))
steps = st.tuples(st.just("step"), st.integers(1, 6), st.just(0))
aborts = st.tuples(st.just("abort"), st.integers(0, 7), st.just(0))
scripts = st.lists(st.one_of(arrivals, arrivals, steps, aborts), min_size=1, max_size=14)


@st.composite
def setups(draw):
    layout = draw(st.sampled_from(["ragged", "last-exited", "shared", "first-shared"]))
    page_size = 1 if layout == "ragged" else draw(st.sampled_from([1, 4, 16]))
    width = draw(st.integers(1, 4))
    # The smallest pool that holds the longest request, and up to three times as much.
    planes = get_layout(layout).num_planes(4)
    smallest = planes * -(-(max(LENS) + MAX_TOKENS - 1) // page_size)
    return {
        "layout": layout,
        "page_size": page_size,
        "num_pages": draw(st.integers(smallest, 3 * smallest)),
        "max_num_seqs": width,
        "min_coda_batch": draw(st.integers(1, width)),
        "min_free_slots": draw(st.integers(1, width)),
        "max_num_batched_tokens": draw(st.sampled_from([4, 11, 64])),
        "chunk_size": draw(st.sampled_from([None, 4])),
        "kv_headroom": draw(st.sampled_from([0.0, 0.3])),
    }


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(setup=setups(), script=scripts)
def test_random_runs_equal_the_reference(mode, setup, script):
    setup = dict(setup)
    layout, gate = setup.pop("layout"), "none" if mode == "cb" else "ouro"
    engine = make_engine("ouro", mode, layout, gate, **setup)
    work, wanted, outputs, aborted = prompts(LENS), {}, {}, set()
    for action, number, tokens in script:
        if action == "add":
            key = str(len(wanted))
            wanted[key] = (work[number], tokens)
            engine.add(Request(key, work[number], SamplingParams(0, tokens, ignore_eos=True)))
        elif action == "abort" and engine.abort(str(number)):
            aborted.add(str(number))
        elif action == "step":
            for _ in range(number):
                if engine.has_work:
                    advance(engine, outputs)
    drain(engine, outputs)
    chunk = setup["chunk_size"] if engine.policy.layout.cut_sensitive else None
    for key, (prompt, tokens) in wanted.items():
        token_ids, depths = reference("ouro", layout, gate, prompt, MAX_TOKENS, chunk_size=chunk)
        got = outputs.get(key, [])
        assert [output.token for output in got] == token_ids[: len(got)]
        assert [output.depth for output in got] == depths[: len(got)]
        if key not in aborted:
            assert len(got) == tokens and got[-1].finish_reason == "length"
