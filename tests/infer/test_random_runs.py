"""Random runs of the engine on small models in float64: whatever happens, the output is the reference decoder's.

Arrivals, lengths, exits, aborts, preemptions, pools, layouts, batching parameters, ways to hear of exits, prompts cut
or mixed in, cached prefixes and sampling are drawn at random and driven through every scheduler. After every step the
books must add up; at the end everything is free.

`LOOPED_EXAMPLES` sets the number of runs of each scheduler; the slow test has 2,000.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from looped.decode import Generation, PrefillSchedule
from looped.infer import Engine, Output, Request, SamplingParams
from looped.infer.late import LateScheduler
from looped.infer.scheduler import Counts, Stage
from looped.infer.state import CODA, CORE, PRELUDE
from looped.kv import get_layout
from looped.sampling_options import child_seed
from tests.infer.harness import (
    REPLAYED,
    assert_empty,
    check_books,
    decoded,
    exits_modes,
    has_gate,
    make_engine,
    micro,
    prompts,
)

EXAMPLES = int(os.environ.get("LOOPED_EXAMPLES", "300"))
MODES = ("cb", "no-refill", "refill")
SEED, MAX_TOKENS = 5, 6
# Beginnings of one text, so that the prefix cache has something to find; 26 tokens are the whole context.
WORK = tuple(prompts((24,))[0][:length] for length in (1, 2, 4, 9, 17, 21, 24))
FAMILIES = ("small-ouro", "small-ouro", "small-huginn")
LAYOUTS = ("ragged", "ragged", "last-exited", "shared", "first-shared", "modulo-2", "depth")
GATES = ("none", "ouro", "convergence", "entropy-diff", "delay", "lookahead", "hybrid", "pre-loop", "replay", "fixed-1")
TRAINED = ("ouro", "lookahead", "hybrid", "pre-loop")
SCHEDULES = (None, None, PrefillSchedule(0.5), PrefillSchedule(0.3, cosine=True, protected=2))
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 8, "presence_penalty": 1.0, "logprobs": 2},
    # Ends where nobody foresees it.
    {"temperature": 1.0, "stop_token_ids": tuple(range(1, 14))},
)


class Ask(NamedTuple):
    """A request of a run: what it wants, and what of the engine it overrides."""

    prompt: int
    max_tokens: int
    sampling: int = 0
    threshold: float | None = None
    min_depth: int | None = None
    max_depth: int | None = None
    samples: int = 1


class Setup(NamedTuple):
    """An engine of a run."""

    family: str
    layout: str
    gate: str
    schedule: PrefillSchedule | None
    options: dict[str, Any]


@st.composite
def setups(draw: st.DrawFn, mode: str) -> Setup:
    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    family, layout = pick(*FAMILIES), pick(*LAYOUTS)
    gate = pick(*(gate for gate in GATES if has_gate(family, gate))) if mode != "cb" else pick("none", "lookahead")
    sensitive, aliases = get_layout(layout).cut_sensitive, get_layout(layout).aliases
    page_size = 1 if aliases else pick(1, 4, 16)
    width, chunk = pick(1, 2, 3, 4, 5, 5), pick(None, 4)
    ragged = gate in ("ouro", "convergence", "delay", "lookahead") and mode != "cb"
    schedule = pick(*SCHEDULES) if ragged else None
    mixed = schedule is None and mode != "cb" and pick(False, False, True)
    exits = [way for way in exits_modes(family, gate, mode) if not (mixed and way == "device")]
    caching = pick(False, True) and not (sensitive and chunk is None)
    # From the smallest pool that holds the longest request, where few fit, to three times as much.
    model = micro(family)
    planes = get_layout(layout).num_planes(model.config.max_loops)
    smallest = planes * -(-(model.config.max_positions - 1) // page_size)
    options = {
        "exits": pick(*exits),
        "page_size": page_size,
        "num_pages": smallest + pick(0, 0, 0, 0, 0, 1, planes, smallest // 3, smallest, 2 * smallest),
        "max_num_seqs": width,
        "min_coda_batch": draw(st.integers(1, width)),
        "min_free_slots": pick(1, 1, width),
        "max_num_batched_tokens": pick(64, 11, 4),
        "chunk_size": chunk,
        "kv_headroom": pick(0.0, 0.0, 0.3),
        "preemption": pick("auto", "auto", "offload", "off"),
        "prefix_caching": caching,
        "mix_prefill": mixed,
        "pad_batches": pick(False, True),
        "compute": pick("sparse", "sparse", "sparse", "dense"),
    }
    return Setup(family, layout, gate, schedule, options)


asks = st.builds(
    Ask,
    prompt=st.sampled_from([0, 1, 2, 3, 3, 4, 4, 5, 5, 6]),
    max_tokens=st.sampled_from([*range(1, MAX_TOKENS), *[MAX_TOKENS] * 5]),
    sampling=st.sampled_from([0, 0, 0, 1, 2, 3]),
    threshold=st.sampled_from([None, None, 0.3]),
    min_depth=st.sampled_from([None, None, None, 3]),
    max_depth=st.sampled_from([None, None, None, 3, 1]),
    samples=st.sampled_from([1, 1, 2, 3]),
)
actions = st.one_of(
    asks, asks, st.tuples(st.just("step"), st.integers(1, 9)), st.tuples(st.just("abort"), st.integers(0, 9))
)
scripts = st.lists(actions, min_size=3, max_size=10)


@functools.cache
def wanted(setup: tuple[Any, ...], ask: Ask, index: int, replayed: int) -> Generation:
    family, layout, gate, chunk, compute, schedule = setup
    return decoded(
        family, layout, gate, WORK[ask.prompt], MAX_TOKENS, chunk, compute, None, child_seed(SEED, index), schedule,
        ask.threshold, ask.min_depth, ask.max_depth, replayed, params_of(ask).sampling,
    )  # fmt: skip


def params_of(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens,
        ignore_eos=True,
        exit_threshold=ask.threshold,
        min_depth=ask.min_depth,
        max_depth=ask.max_depth,
        n=ask.samples,
        **SAMPLING[ask.sampling],
    )


class Run:
    """An engine under watch."""

    def __init__(self, mode: str, setup: Setup) -> None:
        prefill = {"prefill": "ragged", "prefill_threshold": setup.schedule} if setup.schedule else {}
        self.setup, self.mode = setup, mode
        self.engine: Engine = make_engine(
            setup.family, mode, setup.layout, setup.gate, seed=SEED, **setup.options, **prefill
        )
        self.asked: dict[str, tuple[Ask, int, int]] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.aborted: set[str] = set()
        self.steps = self.limit = 0
        self._choose = self.engine.scheduler._choose
        self.engine.scheduler._choose = self._watch

    def add(self, ask: Ask) -> None:
        """Ask for something, less what this engine does not take."""
        if self.mode == "cb" or self.setup.gate not in TRAINED:
            ask = ask._replace(threshold=None)
        if self.mode == "cb" or self.engine.gate is None:
            ask = ask._replace(min_depth=None)
        if self.mode == "cb" or (ask.max_depth or 4) < (ask.min_depth or 1):
            ask = ask._replace(max_depth=None)
        params = params_of(ask)
        for index in range(ask.samples):
            number = len(self.asked)
            ordinal = number % len(REPLAYED)
            self.engine.add(Request(str(number), WORK[ask.prompt], params.child(index, SEED), ordinal))
            self.asked[str(number)] = (ask, index, ordinal)
            self.limit += 3 * (len(WORK[ask.prompt]) + ask.max_tokens * 7)

    def abort(self, number: int) -> None:
        if self.engine.abort(str(number)):
            self.aborted.add(str(number))

    def step(self) -> None:
        """One step: something happens, and everything still adds up."""
        engine, scheduler = self.engine, self.engine.scheduler
        before, active = self._progress(), set(scheduler.active.values())
        outputs = engine.step()
        assert outputs or self._progress() != before, "nothing happened"
        for output in outputs:
            self.outputs.setdefault(output.key, []).append(output)
        check_books(engine)
        # First come, first served, after a preemption too.
        arrivals = [job.arrival for job in scheduler.waiting]
        assert arrivals == sorted(arrivals)
        admitted = [job.arrival for job in scheduler.active.values() if job not in active]
        assert not admitted or not arrivals or max(admitted) < arrivals[0]
        self.steps += 1

    def _progress(self) -> tuple[int, int]:
        return sum(stage.batches for stage in self.engine.stats.stages.values()), len(self.engine._inflight)

    def _watch(self, counts: Counts, min_coda_batch: int) -> Stage | None:
        """The scheduler's choice, checked: codas are full unless nothing else can run, bounds are bounds."""
        stage, scheduler = self._choose(counts, min_coda_batch), self.engine.scheduler
        if isinstance(scheduler, LateScheduler):
            phase = self.engine.runner.state.phase.clone()
            phase[self.engine._kill] = 0
            bounds = scheduler.bounds()
            assert (phase == PRELUDE).sum() <= bounds.prelude
            if not scheduler.fuse:
                assert (phase == CORE).sum() <= bounds.core
                assert (phase == CODA).sum() >= bounds.coda or not bounds.core
        if stage is Stage.CODA and self.mode == "refill" and counts.coda < min_coda_batch:
            assert not counts.core and not counts.prelude and not counts.can_prefill
        return stage

    def finish(self) -> None:
        """Run to the end and compare everything."""
        self.steps = 0
        while self.engine.has_work:
            self.step()
            assert self.steps <= 20 + self.limit * (1 + self.setup.options["max_num_seqs"]), "no end in sight"
        self.engine.kv.drop_cache()
        assert_empty(self.engine)
        for key in self.asked:
            self._compare(key)

    def _compare(self, key: str) -> None:
        (ask, index, ordinal), (family, layout, gate, schedule, options) = self.asked[key], self.setup
        chunk = options["chunk_size"] if get_layout(layout).cut_sensitive else None
        # Two storages of one function.
        layout = "last-exited" if layout == "ragged" else layout
        setup = family, layout, "none" if self.mode == "cb" else gate, chunk, options["compute"], schedule
        replayed = ordinal if gate == "replay" else 0
        right = wanted(setup, ask._replace(max_tokens=MAX_TOKENS, samples=1), index, replayed)
        got = self.outputs.get(key, [])
        length = min(ask.max_tokens, len(right.token_ids))
        tokens = [output.token for output in got if output.token is not None]
        assert tokens == right.token_ids[:length][: len(tokens)]
        assert [output.depth for output in got] == right.depths[: len(got)]
        if right.logprobs is not None:
            assert [output.logprob for output in got] == pytest.approx(right.logprobs[: len(got)], abs=1e-9)
        if key not in self.aborted:
            stopped = right.finish_reason == "stop" and len(right.token_ids) <= ask.max_tokens
            assert len(tokens) == length and got[-1].finish_reason == ("stop" if stopped else "length")


def check(mode: str, data: st.DataObject) -> None:
    run = Run(mode, data.draw(setups(mode), label="engine"))
    for action in data.draw(scripts, label="script"):
        if isinstance(action, Ask):
            run.add(action)
        elif action[0] == "abort":
            run.abort(action[1])
        else:
            for _ in range(action[1]):
                if run.engine.has_work:
                    run.step()
    run.finish()


quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(max(300, EXAMPLES))
@quick
@given(data=st.data())
def test_random_runs_equal_the_reference(mode: str, data: st.DataObject) -> None:
    check(mode, data)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(3600)
@settings(quick, max_examples=max(2000, EXAMPLES))
@given(data=st.data())
def test_many_random_runs_equal_the_reference(mode: str, data: st.DataObject) -> None:
    check(mode, data)
