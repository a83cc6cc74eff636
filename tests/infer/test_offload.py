"""Sequences whose K/V go to the host and come back, anywhere in a token's pass."""

import pytest

from tests.infer.kv_sim import Sequence, Simulation, make_memory

CASES = [("ragged", 1), ("last-exited", 1), ("last-exited", 16), ("last-exited", 64), ("depth", 16), ("shared", 16),
         ("first-shared", 16), ("modulo-2", 1)]  # fmt: skip


def make_sim(layout, size, outer=False, ragged_prompts=False, **options):
    return Simulation(make_memory(layout, outer, page_size=size, **options), True, ragged_prompts)


def start(sim: Simulation, prompt_len: int = 21, new: int = 20, token: int = 7) -> Sequence:
    one = sim.sequence((token,) * prompt_len, new)
    assert sim.admit(one)
    sim.prefill(one, prompt_len)
    return one


def token(sim: Simulation, one: Sequence, depth: int, steps: int | None = None) -> None:
    """Run a pass of `depth` loops, or only the first of its steps."""
    for step in range(1, (steps or depth) + 1):
        assert sim.decode([(one, step == depth)], spare=2, ahead=1)


@pytest.mark.parametrize(("layout", "size"), CASES)
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("ragged_prompts", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_it_comes_back_as_it_was_and_goes_on(layout, size, outer, ragged_prompts, steps):
    sim = make_sim(layout, size, outer, ragged_prompts and layout != "depth")
    one, other = start(sim), start(sim, 5, token=3)
    depths = (3, 3, 3) if layout == "depth" else (2, 1, 3)
    for depth in depths:
        token(sim, one, depth)
    token(sim, other, 3)
    if steps:
        token(sim, one, 3, steps)
    rows = sim.memory.usage().rows
    sim.park(one)
    sim.check()
    # Somebody else takes its pages meanwhile.
    guest = start(sim, 30, 2, token=4)
    sim.check()
    sim.release(guest)
    assert sim.unpark(one)
    sim.check()
    for depth in range(3 if layout == "depth" else steps + 1, 4):
        token(sim, one, depth, None if not one.step else depth)
        sim.check()
    token(sim, one, 3)
    sim.check()
    sim.report()
    assert sim.memory.usage().rows > rows
    for sequence in (one, other):
        sim.release(sequence)
    sim.assert_empty()


def test_spare_pages_stay_behind_and_aliases_are_kept():
    sim = make_sim("ragged", 1)
    one = start(sim, 4)
    for depth in (1, 2, 3):
        token(sim, one, depth)
    token(sim, one, 3, steps=2)
    sim.report()
    assert sim.memory.usage().pages_in_use > 4 * 3 + 1 + 2 + 3 + 2
    sim.park(one)
    saved = one.saved
    assert (saved.num_tokens, saved.num_complete) == (8, 7)
    assert saved.pools[0].num_pages == 4 * 3 + 1 + 2 + 3 + 2
    assert saved.num_bytes == 2 * saved.pools[0].num_pages * 2 * 2 * 8
    assert len(set(saved.pools[0].index_PB[:, 4].tolist())) == 1
    assert sim.unpark(one)
    assert sim.memory.usage().pages_in_use == saved.pools[0].num_pages
    sim.check()


def test_a_pass_that_was_not_reported_yet_is_saved_like_one_in_the_loop():
    """The engine reports a pass when its token is there, after the coda."""
    sim = make_sim("ragged", 1)
    one = start(sim, 4)
    for step in (1, 2):
        assert sim.decode([(one, step == 2)], spare=1, ahead=0)
    unreported, sim.unreported = sim.unreported, []
    sim.park(one)
    assert (one.saved.num_tokens, one.saved.num_complete) == (5, 4)
    assert sim.unpark(one)
    sim.unreported = unreported
    sim.report()
    pages = sim.memory.core.pages
    assert (pages.counted[one.slot], pages.ahead[one.slot]) == (5, 0)
    token(sim, one, 3)
    sim.check()


def test_blocks_shared_through_the_cache_are_copied_like_any_other():
    sim = make_sim("last-exited", 16, prefix_caching=True)
    one = start(sim, 40)
    two = sim.sequence((7,) * 40, 5)
    assert sim.admit(two) and two.done == 32
    sim.prefill(two, 8)
    sim.park(two)
    assert two.saved.pools[0].num_pages == 9
    sim.release(one)
    sim.memory.drop_cache()
    assert sim.unpark(two)
    sim.check()
    assert len(sim.memory.core.pages.owned(two.slot)) == 9


def test_a_slot_that_holds_pages_is_not_written_over():
    sim = make_sim("last-exited", 16)
    one, other = start(sim), start(sim, 5)
    sim.park(one)
    with pytest.raises(RuntimeError, match="holds pages"):
        sim.memory.load(other.slot, one.saved)
