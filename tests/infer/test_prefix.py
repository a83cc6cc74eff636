"""The prefix cache: what is found, who may write where, what leaves first, and that promises still hold."""

import numpy as np
import pytest

from looped.infer.prefix import block_hashes
from tests.infer.kv_sim import Sequence, Simulation, make_memory

LAYOUTS = ["ragged", "last-exited", "depth", "shared", "first-shared", "modulo-2"]


def ints(*values):
    return np.array(values, dtype=np.int32)


def make_sim(layout="last-exited", outer=False, preempting=False, ragged_prompts=False, **options):
    values = {"prefix_caching": True, "chunk_size": 16, "num_slots": 6} | options
    return Simulation(make_memory(layout, outer, **values), preempting, ragged_prompts)


def run(sim: Simulation, prompt: tuple[int, ...], new: int = 2) -> Sequence:
    """Admit and prefill."""
    one = sim.sequence(prompt, new)
    assert sim.admit(one)
    while one.done < one.prompt_len:
        sim.prefill(one, 64)
    sim.check()
    return one


def hits(sim):
    return sim.memory.usage().hit_tokens


# Hashes.


def test_a_hash_stands_for_everything_up_to_its_end():
    one, other = block_hashes(range(40), 16, b"a"), block_hashes([9, *range(1, 40)], 16, b"a")
    assert len(one) == 2 and len(set(one)) == 2
    assert not set(one) & set(other)
    assert one == block_hashes(np.arange(47), 16, b"a")
    assert block_hashes(list(range(16)) + [5] * 16, 16, b"a")[0] == one[0]


def test_the_salt_and_the_block_size_tell_hashes_apart():
    seen = [block_hashes(range(32), block, salt) for block, salt in ((16, b"a"), (16, b"b"), (8, b"a"), (32, b"a"))]
    flat = [key for keys in seen for key in keys]
    assert len(set(flat)) == len(flat)
    assert block_hashes(range(15), 16, b"") == block_hashes(range(99), 0, b"") == ()


# Finding.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("ragged_prompts", [False, True])
def test_a_cached_prompt_reads_the_same(layout, outer, ragged_prompts):
    sim = make_sim(layout, outer, ragged_prompts=ragged_prompts and layout != "depth")
    first = run(sim, (7,) * 40)
    second = sim.sequence((7,) * 40, 2)
    assert sim.admit(second) and second.done == 32
    sim.check()
    # Both decode and write; neither disturbs the other.
    sim.prefill(second, 64)
    for _ in range(3):
        sim.decode([(first, False), (second, False)], spare=1, ahead=0)
        sim.check()
    sim.release(first)
    third = sim.sequence((7,) * 33, 1)
    assert sim.admit(third) and third.done == 32
    sim.check()
    for one in (second, third):
        sim.release(one)
    sim.assert_empty()


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (80, 32)])
def test_at_least_one_token_is_left_to_run(length, cached):
    sim = make_sim(max_len=100)
    run(sim, (7,) * 40)
    one = sim.sequence((7,) * length, 1)
    assert sim.admit(one) and one.done == cached
    assert hits(sim) == cached and sim.memory.usage().query_tokens == 40 + length


def test_a_chain_ends_where_tokens_differ():
    sim = make_sim()
    run(sim, (7,) * 49)
    one = sim.sequence((*(7,) * 20, *(8,) * 29), 1)
    assert sim.admit(one) and one.done == 16


def test_blocks_end_on_the_grid_where_cuts_matter():
    sim = make_sim("shared", chunk_size=24, page_size=16)
    assert sim.memory.prefix_block == 48
    run(sim, (7,) * 70)
    one = sim.sequence((7,) * 70, 1)
    assert sim.admit(one) and one.done == 48


def test_without_a_cache_nothing_is_found():
    sim = make_sim(prefix_caching=False)
    run(sim, (7,) * 40)
    assert run(sim, (7,) * 40).done == 40 and sim.memory.usage().query_tokens == 0


def test_a_job_that_brings_its_kv_along_is_not_looked_up():
    sim = make_sim()
    run(sim, (7,) * 40)
    one = run(sim, (7,) * 40)
    before = sim.memory.usage()
    sim.park(one)
    assert sim.unpark(one)
    sim.check()
    assert sim.memory.usage().query_tokens == before.query_tokens


# Sharing.


def test_shared_pages_are_held_once():
    sim = make_sim(page_size=16)
    run(sim, (7,) * 40)
    alone = sim.memory.usage().pages_in_use
    run(sim, (7,) * 40)
    assert alone == 3 * 3 and sim.memory.usage().pages_in_use == alone + 3


def test_what_another_sequence_cached_first_stays_private():
    """Two prompts that run at once both compute their blocks; the second keeps its copies to itself."""
    sim = make_sim(page_size=16)
    one, two = sim.sequence((7,) * 40, 1), sim.sequence((7,) * 40, 1)
    assert sim.admit(one) and sim.admit(two)
    sim.prefill(one, 64)
    sim.prefill(two, 64)
    sim.check()
    assert len(sim.memory.core.pages.owned(one.slot)) == 3 and len(sim.memory.core.pages.owned(two.slot)) == 9
    sim.release(one)
    sim.release(two)
    assert sim.memory.usage().cached_pages == 6
    sim.assert_empty()


def test_ragged_aliases_are_cached_each_page_once():
    sim = make_sim("ragged", ragged_prompts=True)
    one = run(sim, (7,) * 17)
    depths = [sim.prompt_depth(one, position) for position in range(16)]
    assert 16 < sum(depths) < 48
    sim.release(one)
    assert sim.memory.usage().cached_pages == sum(depths)


# Leaving.


def test_the_least_recently_used_block_leaves_first_and_chains_lose_their_ends():
    sim = make_sim(page_size=16, num_pages=3 * 6)
    for prompt in ((1,) * 33, (2,) * 33):
        sim.release(run(sim, prompt, 1))
    sim.release(run(sim, (1,) * 17, 1))  # the first block of the older prompt is used again
    usage = sim.memory.usage()
    assert usage.cached_pages == 12 and usage.pages_in_use == 0
    sim.release(run(sim, (3,) * 47, 1))  # three blocks; two pages a plane are free
    kept = {}
    for number in (1, 2):
        match = sim.memory._cache.match(block_hashes((number,) * 33, 16, b""), 33)
        kept[number] = len(match.blocks)
    assert kept == {1: 1, 2: 2}


def test_pages_in_use_are_never_evicted():
    sim = make_sim(page_size=16, num_pages=3 * 4)
    held = run(sim, (1,) * 33, 1)  # three blocks, two of them shared
    one = sim.sequence((2,) * 17, 1)
    assert not sim.admit(one)
    sim.release(held)
    assert run(sim, (2,) * 33, 1).done == 33
    sim.check()


def test_admission_counts_what_is_cached_as_there_and_as_free():
    sim = make_sim(page_size=16, num_pages=3 * 4)
    sim.release(run(sim, (1,) * 60, 1))
    usage = sim.memory.usage()
    assert (usage.cached_pages, usage.pages_in_use) == (9, 0)
    # As much as the whole pool, in part cached, in part evicted.
    one = sim.sequence((1,) * 33, 30)
    assert sim.admit(one) and one.done == 32
    sim.check()
    assert sim.memory.core.pages.pages.available == 0
    assert not sim.memory.can_admit(sim.sequence((1,) * 17, 1), idle=False)
    sim.prefill(one, 64)
    while not one.full:
        assert sim.decode([(one, False)], 1, 0)
        sim.check()


def test_growth_evicts_before_it_fails():
    sim = make_sim(page_size=16, num_pages=3 * 4, preempting=True, outer=True)
    sim.release(run(sim, (1,) * 33, 1))
    one, two = run(sim, (2,) * 15, 30), run(sim, (3,) * 15, 30)
    # Two blocks are held, two cached; both sequences grow into what was cached.
    assert sim.memory.usage().cached_pages == 6
    assert sim.memory.grow(ints(one.slot, two.slot), ints(16, 16))
    sim.check()
    assert sim.memory.usage().cached_pages == 0
    assert not sim.memory.grow(ints(one.slot, two.slot), ints(32, 32))
    sim.check()


def test_evicted_pages_are_poisoned_and_cached_ones_are_not():
    sim = make_sim(page_size=16)
    one = run(sim, (1,) * 33, 1)
    rows = sim.memory.core.pages.table[one.slot, 0, :2].copy()
    sim.release(one, scrub=True)
    pool = sim.memory.core
    assert not pool.data[:, pool.rows_of(rows)].isnan().any()
    sim.memory.drop_cache()
    assert pool.data[:, pool.rows_of(rows)].isnan().all()
    sim.assert_empty()


def test_a_chain_loses_its_end_first():
    sim = make_sim(page_size=16, num_pages=3 * 4)
    sim.release(run(sim, (1,) * 33, 1))
    sim.release(run(sim, (2,) * 47, 1))  # one page a plane more than is free
    assert len(sim.memory._cache.match(block_hashes((1,) * 33, 16, b""), 33).blocks) == 1


def test_the_rest_of_a_chain_is_cached_though_others_cached_its_start():
    sim = make_sim()
    one, two = sim.sequence((7,) * 20, 1), sim.sequence((7,) * 60, 1)
    assert sim.admit(one) and sim.admit(two)
    sim.prefill(one, 64)
    sim.prefill(two, 64)
    three = sim.sequence((7,) * 60, 1)
    assert sim.admit(three) and three.done == 48
    for sequence in (one, two, three):
        sim.check()
        sim.release(sequence)
    sim.assert_empty()
