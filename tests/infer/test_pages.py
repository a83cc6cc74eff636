"""K/V memory: sizes, admission, growth that may fail, and what the device does to tables and planes."""

import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from looped.errors import LoopedError
from looped.infer import planes, sizing
from looped.infer.pages import check_page_size, prefix_block, stored
from looped.kv import get_layout
from looped.sampling import Knobs, Lists, Seen, draw
from looped.sampling_options import FULL
from tests.infer.kv_sim import Sequence, Simulation, config, make_memory

GIB = 1 << 30


def ints(*values):
    return np.array(values, dtype=np.int32)


def job(prompt=4, new=5, reserve=None, slot=1):
    return Sequence(tuple(range(1, prompt + 1)), prompt + new, reserve or prompt + new - 1, slot=slot)


# Sizes.


def test_page_sizes():
    assert check_page_size(None, get_layout("shared")) == 16
    assert check_page_size(None, get_layout("ragged")) == check_page_size(1, get_layout("ragged")) == 1
    with pytest.raises(LoopedError, match="page_size must be 1, got 16"):
        check_page_size(16, get_layout("ragged"))
    with pytest.raises(LoopedError, match="at least 1, got 0"):
        check_page_size(0, get_layout("shared"))


@pytest.mark.parametrize(
    ("layout", "size", "chunk", "block"),
    [
        ("ragged", 1, None, 16),
        ("last-exited", 16, 8, 16),
        ("last-exited", 64, None, 64),
        ("depth", 1, None, 16),
        ("shared", 16, 24, 48),
        ("modulo-2", 1, 8, 8),
        ("shared", 16, None, 0),
    ],
)
def test_blocks_of_the_prefix_cache_are_whole_pages_and_end_on_the_grid(layout, size, chunk, block):
    assert prefix_block(get_layout(layout), size, chunk) == block


def test_a_given_number_of_pages_is_what_there_is():
    memory = make_memory("last-exited", num_pages=11, page_size=16)
    assert memory.core.pages.pages.num_pages == 11 and memory.capacity_tokens == 48
    # One token's K and V in two layers, three planes, one head of two float64.
    assert memory.bytes_per_token == 2 * 2 * 3 * 2 * 8
    assert memory.fits(49) and not memory.fits(50)
    with pytest.raises(LoopedError, match="at least 3"):
        make_memory("last-exited", num_pages=2)


def test_no_more_pages_than_the_sequences_can_use():
    memory = make_memory("last-exited", num_slots=5, max_len=80)
    assert memory.core.pages.pages.num_pages == 4 * 5 * 3
    assert memory.outer is None


@pytest.mark.parametrize("layout", ["ragged", "last-exited", "shared"])
def test_free_memory_sets_the_number_of_pages(layout, monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 40_000)
    memory = make_memory(layout, outer=True, max_len=4000, reserve_bytes=4_000)
    used = sum(pool.data.numel() * 8 for pool in memory.pools)
    assert 12_000 < used < 0.5 * 36_000 + 2 * 16 * 192
    assert memory.capacity_tokens < 4 * 4000


def test_too_little_memory_says_what_to_lower(monkeypatch):
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 300)
    with pytest.raises(LoopedError, match="lower max_num_seqs or max_num_batched_tokens, or give num_pages"):
        make_memory("ragged", reserve_bytes=0)


def test_a_pool_beyond_memory_is_one_sentence():
    with pytest.raises(LoopedError, match="lower num_pages"):
        make_memory("shared", num_pages=10**14, poison=False)
    started = time.perf_counter()
    with pytest.raises(LoopedError, match=r"does not fit into the \d+ MiB that are free"):
        make_memory("ragged", num_pages=(1 << 31) - 1, poison=False)
    assert time.perf_counter() - started < 1  # before the books of so many pages are made


def test_the_prefix_cache_needs_a_grid_where_cuts_matter():
    with pytest.raises(LoopedError, match="'shared' needs chunk_size"):
        make_memory("shared", prefix_caching=True)
    assert make_memory("shared", prefix_caching=True, chunk_size=8).prefix_block == 16


def test_activations_grow_with_the_batch():
    small = sizing.activation_bytes(config(), 100, 4, torch.bfloat16)
    assert small < sizing.activation_bytes(config(), 200, 4, torch.bfloat16)
    assert small < sizing.activation_bytes(config(), 100, 8, torch.bfloat16)
    # Graphs keep their memory while launches without one run; the counts of tokens that occurred are there once.
    seen = 4 * config().vocab_size * (4 + 1)
    assert 2 * (small - seen) + seen == sizing.activation_bytes(config(), 100, 4, torch.bfloat16, graphs=True)


def test_activations_cover_a_draw_at_the_highest_level():
    rows, vocab = 8, 20_000
    shape = dataclasses.replace(config(), vocab_size=vocab)
    knobs = Knobs(
        *(torch.full((rows,), value, dtype=torch.float64) for value in (0.8, 0.9, 0.01, 1.2, 0.5, 0.5)),
        *(torch.full((rows,), value) for value in (1, 50, 0)),
    )
    lists = Lists(torch.zeros(rows, 4).long(), torch.zeros(rows, 4).double(), torch.full((rows, 2), -1))
    seen = Seen(torch.zeros(rows, vocab, dtype=torch.int32), torch.zeros(rows, vocab, dtype=torch.bool))
    logits, at = torch.randn(rows, vocab), torch.zeros(rows).long()
    with torch.profiler.profile(profile_memory=True) as profile:
        draw(logits, knobs, at, at, FULL, lists, seen)
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert peak > 50 * rows * vocab  # it was measured
    assert peak <= sizing.activation_bytes(shape, 0, rows, torch.float32)


def test_the_pool_outside_the_core_is_never_the_tighter_one():
    """Every token leaves after one loop, so a ragged core holds three times `capacity_tokens`."""
    memory = make_memory("ragged", outer=True, num_slots=4, num_pages=63, max_len=64)
    sim = Simulation(memory, preempting=True)
    one = sim.sequence((1,), 62)
    assert sim.admit(one)
    sim.prefill(one, 1)
    for _ in range(20):
        assert sim.decode([(one, True)], spare=1, ahead=0)
        sim.check()
    assert one.done == 21 == memory.capacity_tokens
    others = [sim.sequence((number,), 20) for number in (2, 3)]
    for other in others:
        assert sim.admit(other)
        sim.prefill(other, 1)
    while memory.core.pages.pages.num_free > 3:
        for other in others:
            sim.decode([(other, True)], spare=1, ahead=0)
    assert memory.outer.pages.pages.num_free > 0
    sim.check()


# Admission.


def test_admission_promises_whole_lengths_and_keeps_the_headroom():
    memory = make_memory("last-exited", num_pages=3 * 4, page_size=16, headroom=0.25)
    assert memory.can_admit(job(30, 3), idle=False)  # two blocks; three pages stay free
    assert not memory.can_admit(job(30, 30), idle=False)
    assert memory.can_admit(job(30, 30), idle=True)
    memory.admit(job(30, 3))
    assert memory.core.pages.pages.available == 6
    assert memory.can_admit(job(16, 1, slot=2), idle=False)
    assert not memory.can_admit(job(17, 1, slot=2), idle=False)
    memory.release(1)
    assert memory.core.pages.pages.available == 12
    memory.check()


def test_the_last_page_can_be_used():
    memory = make_memory("shared", num_pages=2, page_size=16)
    sim = Simulation(memory, preempting=False)
    one = sim.sequence((5,) * 31, 2)
    assert stored(one.max_len) == 32 and sim.admit(one)
    sim.prefill(one, 31)
    while not one.full:
        assert sim.decode([(one, False)], 1, 2)
        sim.check()
    assert memory.core.pages.pages.num_free == 0 and memory.usage().peak_pages == 2
    sim.release(one)
    sim.assert_empty()


# Growth.


@pytest.mark.parametrize("outer", [False, True])
def test_growth_that_fails_changes_nothing_and_can_be_tried_again(outer):
    memory = make_memory("last-exited", outer, num_pages=3 * 3, page_size=4)
    for slot in (1, 2):
        memory.admit(job(4, 5, reserve=4, slot=slot))
        memory.cover_prompt(slot, 0, 4)
    memory.flush()
    table = memory.core.table_SPB.clone()
    before = [pool.pages.pages.num_free for pool in memory.pools]
    assert not memory.grow(ints(0, 1, 2), ints(0, 4, 4))
    memory.flush()
    assert torch.equal(memory.core.table_SPB, table)
    assert [pool.pages.pages.num_free for pool in memory.pools] == before
    memory.check()
    assert memory.grow(ints(1), ints(4))
    assert not memory.grow(ints(2), ints(4))
    memory.release(1)
    assert memory.grow(ints(2), ints(7))
    memory.check()


def test_supply_that_fails_changes_nothing_and_can_be_tried_again():
    memory = make_memory("ragged", num_pages=30)
    for slot in (1, 2):
        memory.admit(job(4, 9, reserve=4, slot=slot))
        memory.cover_prompt(slot, 0, 4)
    slots, taken = ints(1, 2), np.zeros(2, dtype=np.int64)
    assert memory.supply(slots, taken, 3)
    assert not memory.supply(slots, taken, 4)
    assert memory.core.pages.given[1:3].tolist() == [3, 3]
    memory.check()
    memory.release(1)
    assert memory.supply(ints(2), taken[1:], 4)
    memory.check()


def test_a_promise_is_kept_though_others_take_all_the_rest():
    memory = make_memory("ragged", num_pages=36)
    memory.admit(job(4, 5, slot=1))  # 24 pages promised
    memory.cover_prompt(1, 0, 4)
    memory.admit(job(3, 30, reserve=3, slot=2))
    memory.cover_prompt(2, 0, 3)
    zero = np.zeros(1, dtype=np.int64)
    assert memory.supply(ints(2), zero, 3) and not memory.supply(ints(2), zero, 4)
    for done in range(0, 12, 3):
        assert memory.supply(ints(1), zero + done, 3)
        memory.check()
        memory.token_done(1, 3)
    assert memory.core.pages.pages.num_free == 0


def test_pages_held_at_rest_are_the_exit_depths_and_the_spare_ones():
    memory = make_memory("ragged", num_pages=300)
    sim = Simulation(memory, preempting=False)
    one = sim.sequence((3,) * 5, 40)
    sim.admit(one)
    sim.prefill(one, 5)
    depths = [1, 3, 2, 2, 1, 3]
    for depth in depths:
        for step in range(1, depth + 1):
            sim.decode([(one, step == depth)], spare=2, ahead=0)
    sim.report()
    assert memory.usage().pages_in_use == 5 * 3 + sum(depths) + 1
    assert memory.usage().rows == 5 * 3 + sum(depths) and memory.usage().full_rows == 3 * (5 + len(depths))
    sim.check()


# The device's side.


@pytest.mark.parametrize("layout", ["ragged", "last-exited", "first-shared", "modulo-2"])
def test_rows_that_stay_and_padding_change_nothing(layout):
    memory = make_memory(layout, num_slots=4, page_size=None, poison=False)
    for slot in (1, 2):
        memory.admit(job(slot=slot))
        memory.cover_prompt(slot, 0, 4)
    memory.grow(ints(1, 2), ints(4, 4))
    memory.supply(ints(1, 2), np.zeros(2, dtype=np.int64), 3)
    memory.flush()
    at = torch.tensor([0, 1, 0, 2, 0])
    positions = torch.tensor([0, 4, 0, 4, 0])
    memory.open(at, positions, torch.tensor([1, 1, 2, 1, 3]))
    pool = memory.core
    pool.data[:, pool.page_size :] = torch.rand_like(pool.data[:, pool.page_size :])
    data, table = pool.data.clone(), pool.table_SPB.clone()
    # Padding rows may claim anything.
    depths, leaving = torch.tensor([0, 1, 7, 1, 1]), torch.tensor([False, False, True, True, True])
    memory.close(at, positions, depths, leaving)
    assert torch.equal(pool.table_SPB[:2], table[:2]) and not pool.table_SPB[0].any()
    page = pool.rows(torch.tensor([1]), torch.tensor([0]), torch.tensor([4]))
    assert torch.equal(pool.data[:, page], data[:, page])
    planes = torch.arange(pool.table_SPB.shape[1])
    mine = pool.data[:, pool.rows(torch.full_like(planes, 2), planes, torch.full_like(planes, 4))]
    assert (mine == mine[:, :1]).all()
    if layout == "ragged":
        assert memory.tables.taken_S[1:3].tolist() == [1, 1]
        assert torch.equal(pool.data, data)


def test_padding_may_stand_many_times_and_only_touches_page_0():
    memory = make_memory("ragged", num_slots=3)
    at = torch.zeros(9, dtype=torch.long)
    for step in (1, 2, 3):
        memory.open(at, at, at + step)
    memory.close(at, at, at + 1, torch.ones(9, dtype=torch.bool))
    assert not memory.core.table_SPB.any() and not memory.tables.ring_SC.any()
    assert memory.core.rows(at, at, at).tolist() == [0] * 9


def test_the_fixed_shape_copy_and_the_one_that_looks_are_one():
    torch.manual_seed(0)
    memory = make_memory("last-exited", num_slots=6, page_size=4)
    for slot in range(1, 6):
        memory.admit(job(slot=slot))
        memory.cover_prompt(slot, 0, 4)
    memory.grow(ints(*range(1, 6)), ints(*[4] * 5))
    memory.flush()
    pool = memory.core
    pool.data[:] = torch.rand_like(pool.data)
    at, positions = torch.arange(6), torch.tensor([0, 4, 4, 4, 4, 4])
    depths, leaving = torch.tensor([1, 1, 2, 3, 1, 2]), torch.tensor([True, True, True, True, False, False])
    start = pool.data.clone()
    memory.close(at, positions, depths, leaving)
    looked = pool.data.clone()
    pool.data[:] = start

    class Data:
        """The same tensor, on a device whose values must not be looked at."""

        device = torch.device("meta")

        def __getitem__(self, key):
            return pool.data[key]

        def __setitem__(self, key, value):
            pool.data[key] = value

    elsewhere = SimpleNamespace(rows=pool.rows, data=Data())
    planes.copy_planes(elsewhere, at, positions, depths, leaving, 3)
    assert torch.equal(pool.data[:, 4:], looked[:, 4:])


def test_tables_change_with_flush_alone():
    memory = make_memory("last-exited")
    memory.admit(job())
    memory.cover_prompt(1, 0, 4)
    assert not memory.core.table_SPB.any()
    memory.flush()
    assert memory.core.table_SPB[1].any()
    memory.release(1)
    assert memory.core.table_SPB[1].any()
    memory.flush()
    assert not memory.core.table_SPB.any()


def test_a_slot_that_is_released_and_taken_before_the_flush_starts_clean():
    memory = make_memory("ragged", num_pages=120)
    memory.admit(job(slot=1))
    memory.cover_prompt(1, 0, 4)
    memory.supply(ints(1), np.zeros(1, dtype=np.int64), 5)
    memory.release(1)
    memory.admit(job(prompt=2, slot=1))
    memory.cover_prompt(1, 0, 2)
    memory.flush()
    assert (memory.core.table_SPB[1] > 0).sum() == 2 * 3
    assert not memory.tables.ring_SC.any()


# What is left in freed pages.


@pytest.mark.parametrize("outer", [False, True])
def test_freed_pages_are_poisoned_or_scrubbed(outer):
    for poison, scrub, expected in (
        (True, False, "nan"),
        (True, True, "nan"),
        (False, True, "zero"),
        (False, False, "as it was"),
    ):
        memory = make_memory("last-exited", outer, poison=poison)
        memory.admit(job())
        memory.cover_prompt(1, 0, 4)
        memory.flush()
        rows = [pool.rows_of(pool.pages.owned(1)) for pool in memory.pools]
        for pool, mine in zip(memory.pools, rows, strict=True):
            pool.data[:, mine] = 5.0
        memory.release(1, scrub)
        for pool, mine in zip(memory.pools, rows, strict=True):
            left = pool.data[:, mine]
            assert {"nan": left.isnan(), "zero": left == 0, "as it was": left == 5}[expected].all()
