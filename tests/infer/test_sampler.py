"""Sampling by slot: a row depends on its slot's parameters alone, whatever runs beside it and whoever was there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looped import LoopedError, SamplingParams
from looped.infer.sampler import Sampler
from looped.sampling import ends
from looped.sampling_options import FULL, GREEDY, RANDOM

V, SLOTS = 31, 7
EOS = (0,)
CPU = torch.device("cpu")

KINDS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.2, top_p=0.7),
    SamplingParams(0.7, top_k=5, min_p=0.05),
    SamplingParams(1.0, logit_bias={3: 4.0, 9: -50.0}),
    SamplingParams(0.0, min_tokens=4, stop_token_ids=(7, 8)),
    SamplingParams(1.0, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(0.0, frequency_penalty=1.0),
    SamplingParams(1.0, logprobs=3),
]


def stops(sampler: Sampler, tokens: torch.Tensor, slots: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Whether tokens end the sequences in their slots."""
    return ends(tokens, sampler.end_ids[slots], sampler.min_tokens[slots], index)


def sampler() -> Sampler:
    return Sampler(SLOTS, V, EOS, CPU)


def logits(seed: int, position: int) -> torch.Tensor:
    """Made-up logits of one sequence at one position."""
    return torch.randn(V, generator=torch.Generator().manual_seed(seed * 1000 + position), dtype=torch.float64) * 2


class Run:
    """One sequence that is drawn token by token."""

    def __init__(self, seed: int, params: SamplingParams, prompt: list[int]) -> None:
        self.seed, self.params, self.prompt, self.tokens = seed, params, prompt, list[int]()
        self.slot = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1


def admit(at: Sampler, runs: list[Run]) -> None:
    at.admit(
        [run.slot for run in runs],
        [run.params for run in runs],
        [run.seed for run in runs],
        [run.prompt for run in runs],
        [run.tokens for run in runs],
    )


def launch(at: Sampler, runs: list[Run], level: int, padding: int = 0) -> None:
    slots = torch.tensor([run.slot for run in runs] + [0] * padding)
    rows = torch.stack([logits(run.seed, run.position) for run in runs] + [torch.zeros(V).double()] * padding)
    positions = torch.tensor([run.position for run in runs] + [0] * padding)
    index = torch.tensor([len(run.tokens) for run in runs] + [0] * padding)
    drawn = at(rows, slots, positions, index, level)
    for run, token in zip(runs, drawn.tokens.tolist(), strict=False):
        run.tokens.append(token)


def alone(seed: int, params: SamplingParams, prompt: list[int], count: int) -> list[int]:
    run, at = Run(seed, params, prompt), sampler()
    run.slot = 1
    admit(at, [run])
    for _ in range(count):
        launch(at, [run], Sampler.level(params))
    return run.tokens


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_runs_beside_a_row_never_matters(data: st.DataObject) -> None:
    """Random arrivals, slots, launches, preemptions and reuse: every sequence draws what it draws alone."""
    at, free, runs, done = sampler(), list(range(1, SLOTS)), list[Run](), list[Run]()
    parked: list[Run] = []
    for number in range(data.draw(st.integers(3, 25))):
        action = data.draw(st.sampled_from(["admit", "launch", "launch", "preempt", "end"]))
        if action == "admit" and free:
            if parked:
                run = parked.pop()
            else:
                prompt = data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=4))
                run = Run(number, data.draw(st.sampled_from(KINDS)), prompt)
            run.slot = free.pop(data.draw(st.integers(0, len(free) - 1)))
            admit(at, [run])
            runs.append(run)
        elif action == "launch" and runs:
            chosen = data.draw(st.lists(st.sampled_from(runs), min_size=1, unique=True))
            level = max(Sampler.level(run.params) for run in runs)
            launch(at, chosen, level, padding=data.draw(st.integers(0, 3)))
        elif action in ("preempt", "end") and runs:
            run = runs.pop(data.draw(st.integers(0, len(runs) - 1)))
            free.append(run.slot)
            (parked if action == "preempt" else done).append(run)
    for run in (*runs, *parked, *done):
        assert run.tokens == alone(run.seed, run.params, run.prompt, len(run.tokens))


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_higher_levels_draw_the_same(params: SamplingParams) -> None:
    expected = alone(5, params, [1, 2], 8)
    for level in range(Sampler.level(params), Sampler.LEVELS):
        at, run = sampler(), Run(5, params, [1, 2])
        other = Run(6, SamplingParams(0, frequency_penalty=0.5), [1])  # makes the counts
        run.slot, other.slot = 4, 2
        admit(at, [run, other])
        for _ in range(8):
            launch(at, [run], level)
        assert run.tokens == expected


def test_counts_are_made_when_first_needed() -> None:
    at = sampler()
    first = Run(1, KINDS[2], [1])
    first.slot = 1
    admit(at, [first])
    assert at._seen is None
    second = Run(2, KINDS[6], [1])
    second.slot = 2
    admit(at, [second])
    assert at._seen is not None
    counts = at._seen.counts_NV
    launch(at, [second], FULL, padding=2)
    assert counts[2].sum() == 1 and counts[0].sum() == 0
    third = Run(3, KINDS[7], [1])
    third.slot = 2
    admit(at, [third])
    assert at._seen.counts_NV is counts and counts[2].sum() == 0  # captured launches keep their tensors


def test_a_slot_forgets_its_last_sequence() -> None:
    at = sampler()
    old = Run(1, SamplingParams(0, logit_bias={5: 100.0}, stop_token_ids=(9,), min_tokens=9), [1])
    old.slot = 3
    admit(at, [old])
    launch(at, [old], 2)
    assert old.tokens == [5]
    new = Run(2, SamplingParams(0, logit_bias={}), [1])
    new.slot = 3
    admit(at, [new])
    launch(at, [new], 2)
    assert new.tokens == alone(2, SamplingParams(0), [1], 1)
    assert not stops(at, torch.tensor([9]), torch.tensor([3]), torch.tensor([50])).any()


def test_stops() -> None:
    at = sampler()
    at.admit(
        [1, 2, 3],
        [SamplingParams(stop_token_ids=(7, V + 3)), SamplingParams(ignore_eos=True), SamplingParams(min_tokens=2)],
        [0, 0, 0],
        [[1]] * 3,
        [[]] * 3,
    )
    slots = torch.tensor([1, 1, 1, 2, 3, 3, 0])
    tokens = torch.tensor([0, 7, 8, 0, 0, 0, 0])
    index = torch.tensor([0, 0, 0, 0, 1, 2, 9])
    assert stops(at, tokens, slots, index).tolist() == [True, True, False, False, False, True, False]


def test_the_widest_lists_fit() -> None:
    wide = Sampler(3, 2000, (0, 1), CPU)
    params = SamplingParams(0, logit_bias=dict.fromkeys(range(1024), -100.0), stop_token_ids=range(100, 164))
    wide.admit([2], [params], [0], [[1]], [[]])
    at, index = torch.tensor([2]), torch.tensor([0])
    assert wide(torch.zeros(1, 2000), at, index, index, 2).tokens.tolist() == [1024]
    for token in (0, 1, 100, 163):
        assert stops(wide, torch.tensor([token]), at, index).all()


def test_parameters_are_checked_against_the_vocabulary() -> None:
    with pytest.raises(LoopedError, match="logit_bias"):
        sampler().check(SamplingParams(logit_bias={V: 1.0}))
    sampler().check(SamplingParams(logit_bias={V - 1: 1.0}))


def test_nothing_to_admit() -> None:
    sampler().admit([], [], [], [], [])


def test_slots_that_were_never_admitted_are_greedy() -> None:
    at, rows = sampler(), torch.randn(4, V)
    zeros = torch.zeros(4, dtype=torch.long)
    for level in (GREEDY, RANDOM, 2):
        assert torch.equal(at(rows, torch.tensor([0, 0, 3, 5]), zeros, zeros, level).tokens, rows.argmax(-1))
