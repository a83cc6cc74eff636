"""Random admissions, prefills, decode steps, failures, evictions and preemptions: what is read is what was written."""

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.infer.kv_sim import Sequence, Simulation, make_memory, random_prompt

LAYOUTS = ["depth", "last-exited", "ragged", "shared", "first-shared", "modulo-2"]
LONGEST_PROMPT, MOST_NEW = 49, 15
LONGEST = LONGEST_PROMPT + MOST_NEW - 1


class Setup(NamedTuple):
    layout: str
    page_size: int
    outer: bool
    pool: float
    """Pages, in multiples of what the longest sequence needs."""
    preempting: bool
    caching: bool
    ragged_prompts: bool
    headroom: float


setups = st.builds(
    Setup,
    st.sampled_from(LAYOUTS),
    st.sampled_from([1, 16, 64]),
    st.booleans(),
    st.sampled_from([1.0, 1.1, 1.3, 2.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
)
seeds = st.integers(0, 2**16)


class Run:
    """One memory under either admission policy, and things that happen to it.

    With whole lengths promised, nothing that was admitted may ever find the pool short: `Simulation.decode` asserts it.
    """

    def __init__(self, setup: Setup, device: str = "cpu") -> None:
        size = 1 if setup.layout == "ragged" else setup.page_size
        planes = {"shared": 1, "first-shared": 2, "modulo-2": 2}.get(setup.layout, 3)
        memory = make_memory(
            setup.layout,
            setup.outer,
            page_size=size,
            num_pages=int(planes * -(-LONGEST // size) * setup.pool),
            headroom=setup.headroom,
            prefix_caching=setup.caching,
            chunk_size=16,
            device=torch.device(device),
        )
        self.sim = Simulation(memory, setup.preempting, setup.ragged_prompts and setup.layout != "depth")
        self.dense = setup.layout == "depth"
        self.parked: list[Sequence] = []

    @property
    def decoding(self) -> list[Sequence]:
        return [one for one in self.sim.active.values() if one.done >= one.prompt_len]

    @property
    def prefilling(self) -> list[Sequence]:
        return [one for one in self.sim.active.values() if one.done < one.prompt_len]

    def arrive(self, draw: random.Random) -> None:
        sequence = self.sim.sequence(random_prompt(draw, LONGEST_PROMPT), draw.randint(1, MOST_NEW))
        assert self.sim.memory.fits(sequence.max_len)
        admitted = self.sim.admit(sequence)
        assert admitted or self.sim.active, "an empty pool takes any sequence that fits"

    def prefill(self, draw: random.Random) -> None:
        if self.prefilling:
            fails = draw.choice([None] * 9 + [1, 2, 3])
            self.sim.prefill(draw.choice(self.prefilling), draw.choice([1, 15, 16, 17, 64, 64]), abandon_after=fails)

    def decode(self, draw: random.Random) -> None:
        spare, ahead, leaving = draw.randint(1, 9), draw.randint(0, 2), draw.random()
        for _ in range(draw.randint(1, 8)):
            rows = [one for one in self.decoding if not one.full and draw.random() < 0.8]
            while rows and not self.sim.decode(
                [(row, not self.dense and draw.random() < leaving) for row in rows], spare, ahead
            ):
                self.preempt(draw)
                rows = [row for row in rows if row.slot]
            for one in self.decoding:
                if one.full:
                    self.sim.release(one)

    def preempt(self, draw: random.Random) -> None:
        """Somebody gives way: parked, or to begin again."""
        if self.sim.active:
            one = draw.choice(list(self.sim.active.values()))
            if one.done < one.prompt_len or draw.random() < 0.3:
                self.sim.release(one)
            else:
                self.sim.park(one)
                self.parked.append(one)

    def come_back(self, draw: random.Random) -> None:
        if self.parked and self.sim.unpark(self.parked[0]):
            self.parked.pop(0)
        else:
            assert not self.parked or self.sim.active, "an empty pool takes back what it held"

    def abort(self, draw: random.Random) -> None:
        if self.sim.active:
            self.sim.release(draw.choice(list(self.sim.active.values())), scrub=draw.random() < 0.5)

    def end(self) -> None:
        for one in list(self.sim.active.values()):
            self.sim.release(one)
        self.sim.assert_empty()
        self.sim.memory.drop_cache()
        assert all(pool.pages.pages.num_free == pool.pages.pages.num_pages for pool in self.sim.memory.pools)


ACTIONS = {
    Run.arrive: 8,
    Run.prefill: 10,
    Run.decode: 10,
    Run.preempt: 1,
    Run.come_back: 4,
    Run.abort: 1,
}


def run_long(setup: Setup, seed: int, actions: int, device: str = "cpu") -> None:
    draw, run = random.Random(seed), Run(setup, device)
    for action in draw.choices(list(ACTIONS), list(ACTIONS.values()), k=actions):
        action(run, draw)
        run.sim.check()
    run.end()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(setup=setups, seed=seeds, actions=st.integers(20, 60))
def test_long_runs(setup, seed, actions):
    run_long(setup, seed, actions)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(setup=setups, seed=seeds, actions=st.integers(5, 200))
def test_many_long_runs(setup, seed, actions):
    run_long(setup, seed, actions)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, derandomize=True)
@given(setup=setups, seed=seeds, actions=st.integers(20, 60))
def test_long_runs_on_a_gpu(setup, seed, actions):
    run_long(setup, seed, actions, "cuda")


class KVMachine(RuleBasedStateMachine):
    """The same, step by step, so that a failure shrinks to the few steps that lead to it."""

    run: Run | None = None

    @initialize(setup=setups)
    def start(self, setup):
        self.run = Run(setup)

    @rule(action=st.sampled_from(list(ACTIONS)), seed=seeds)
    def act(self, action, seed):
        action(self.run, random.Random(seed))

    @invariant()
    def books_and_contents(self):
        if self.run is not None:
            self.run.sim.check()

    def teardown(self):
        if self.run is not None:
            self.run.end()


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
