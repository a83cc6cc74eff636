"""Pages on the host: promises, taking, growing, aliasing, returning, and what the device is told of it."""

import numpy as np
import pytest

from looped.infer.allocator import PageAllocator, SlotPages, Writes
from looped.infer.ragged import RaggedPages, ring_size

NONE = np.zeros(0, dtype=np.int32)


def ints(*values):
    return np.array(values, dtype=np.int32)


def longs(*values):
    return np.array(values, dtype=np.int64)


# Free pages.


def test_pages_are_taken_in_order_and_page_0_never():
    pages = PageAllocator(5)
    first = pages.take(3)
    assert first.tolist() == [1, 2, 3] and pages.in_use == 3
    pages.give(first)
    assert pages.take(5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="exhausted"):
        pages.take(1)
    assert pages.peak == 5


def test_pages_cannot_be_returned_twice():
    pages = PageAllocator(3)
    with pytest.raises(RuntimeError, match="twice"):
        pages.give(ints(1))


def test_what_nobody_uses_is_taken_back_when_pages_are_short():
    pages = PageAllocator(4)
    kept = pages.take(3)
    pages.evictable = 3
    asked = []

    def reclaim(count):
        asked.append(count)
        pages.give(kept)
        pages.evictable = 0

    pages.reclaim = reclaim
    assert pages.available == 4 and pages.in_use == 0
    assert pages.take(1).tolist() == [4] and not asked
    assert len(pages.take(2)) == 2 and asked == [2]
    assert pages.in_use == 3


# Entries for the device.


def test_entries_of_a_cleared_slot_are_forgotten():
    writes = Writes()
    assert not writes
    writes.put(longs(1, 2), longs(10, 20), ints(5, 6))
    writes.put(longs(1), longs(11), ints(7))
    writes.clear(1)
    writes.put(longs(1), longs(12), ints(8))
    cleared, index, values = writes.drain()
    assert (cleared.tolist(), index.tolist(), values.tolist()) == ([1], [20, 12], [6, 8])
    assert not writes and len(writes.drain()[1]) == 0


def test_the_later_of_two_entries_counts():
    writes = Writes()
    writes.put(longs(1, 1), longs(10, 11), ints(1, 2))
    writes.put(longs(1), longs(10), ints(3))
    writes.repeated = True
    _, index, values = writes.drain()
    assert dict(zip(index.tolist(), values.tolist(), strict=True)) == {10: 3, 11: 2}


# Slots.


def make_slots(num_slots=3, planes=2, max_len=40, size=16, num_pages=12):
    return SlotPages(num_slots, planes, max_len, size, num_pages)


def test_blocks_are_covered_once():
    slots = make_slots()
    slots.reserve(1, 40, 40)
    assert slots.pages.available == 12 - 6
    for start, stop, blocks in ((0, 10, 1), (10, 16, 1), (16, 17, 2), (17, 40, 3), (17, 40, 3)):
        slots.cover(1, start, stop)
        assert (slots.table[1] > 0).sum() == 2 * blocks
        slots.check(NONE)
    assert slots.pages.in_use == 6 and slots.owed[1] == 0 and slots.pages.available == 6
    assert (slots.tokens, slots.rows) == (40, 80)
    assert sorted(slots.release(1).tolist()) == [1, 2, 3, 4, 5, 6]
    assert not slots.table.any() and slots.pages.available == 12


def test_slots_grow_together_up_to_their_ends():
    slots = make_slots(num_slots=4, planes=2, max_len=8, size=4, num_pages=20)
    for slot, longest in ((1, 8), (2, 5), (3, 3)):
        slots.reserve(slot, 1, longest)
        slots.cover(slot, 0, 1)
    at = longs(1, 2, 3)
    wanted = slots.missing(at, longs(4, 7, 7))
    assert wanted.tolist() == [1, 1, 0]
    assert slots.lacking(at, wanted) == 4
    slots.extend(at, wanted)
    slots.check(NONE)
    assert slots.used.tolist() == [0, 2, 2, 1]
    assert (slots.table[1] > 0).all()
    assert slots.missing(at, longs(7, 7, 7)).tolist() == [0, 0, 0]


def test_what_was_promised_is_not_lacking():
    slots = make_slots(size=4)
    slots.reserve(1, 8, 16)
    assert slots.lacking(longs(1), longs(2)) == 0
    assert slots.lacking(longs(1), longs(3)) == 2


def test_several_blocks_for_several_slots_at_once():
    slots = make_slots(num_slots=4, planes=2, max_len=9, size=1, num_pages=60)
    for slot in (1, 2, 3):
        slots.reserve(slot, 9, 9)
    slots.extend(longs(3, 1, 2), longs(2, 3, 0))
    slots.extend(longs(1, 2, 3), longs(1, 4, 0))
    slots.check(NONE)
    assert slots.used.tolist() == [0, 4, 4, 2]
    assert len(np.unique(slots.table[slots.table > 0])) == 20
    _, index, values = slots.writes.drain()
    flat = np.zeros(slots.table.size, dtype=np.int32)
    flat[index] = values
    assert (flat.reshape(slots.table.shape) == slots.table).all()


def test_the_books_know_a_page_that_is_held_twice():
    slots = make_slots()
    slots.reserve(1, 16, 16)
    slots.cover(1, 0, 16)
    slots.check(NONE)
    slots.table[2, 0, 0] = slots.table[1, 0, 0]
    with pytest.raises(RuntimeError, match="does not hold"):
        slots.check(NONE)
    slots.table[2, 0, 0] = 0
    slots.pages.give(slots.table[1, 0, :1])
    with pytest.raises(RuntimeError, match="held twice"):
        slots.check(NONE)


# Pages of one token, taken as far as a token runs.


def make_ragged(num_slots=3, planes=4, max_len=8, num_pages=40):
    return RaggedPages(num_slots, planes, max_len, num_pages)


@pytest.mark.parametrize(("planes", "size"), [(1, 8), (3, 32), (4, 32), (5, 32), (16, 128)])
def test_a_ring_is_a_power_of_two_with_room_ahead(planes, size):
    assert ring_size(planes) == size and size >= 4 * planes


def test_a_ring_is_kept_full_and_tokens_give_back_what_they_do_not_use():
    slots = make_ragged()
    slots.reserve(1, 8, 8)
    slots.cover(1, 0, 2)
    assert (slots.pages.in_use, slots.pages.reserved) == (8, 24)
    at = longs(1)
    slots.fill(at, slots.spare_wanted(at, longs(0), 3))
    assert (slots.given[1], slots.ahead[1], slots.pages.reserved) == (3, 3, 21)
    slots.fill(at, slots.spare_wanted(at, longs(2), 3))
    assert slots.given[1] == 5
    slots.token_done(1, 2)
    # Five tokens to come, three spare pages in the ring.
    assert (slots.ahead[1], slots.pages.reserved) == (3, 5 * 4 - 3)
    assert (slots.tokens, slots.rows) == (3, 10)
    slots.check(NONE)
    assert len(slots.release(1)) == 13
    assert slots.pages.num_free == 40 and slots.pages.reserved == 0


def test_a_ring_gets_no_more_than_the_sequence_can_use():
    slots = make_ragged()
    slots.reserve(1, 3, 3)
    slots.cover(1, 0, 2)
    at = longs(1)
    assert slots.spare_wanted(at, longs(0), 12).tolist() == [4]
    slots.fill(at, longs(4))
    slots.token_done(1, 1)
    assert slots.owed[1] == 0 and slots.spare_wanted(at, longs(1), 12).tolist() == [0]


def test_a_ring_is_not_overfilled():
    slots = make_ragged(max_len=40, num_pages=200)
    slots.reserve(1, 40, 40)
    at = longs(1)
    slots.fill(at, slots.spare_wanted(at, longs(20), 9))
    assert slots.given[1] == 29 and slots.spare_wanted(at, longs(30), 9).tolist() == [3]
    slots.token_done(1, 4)
    assert slots.spare_wanted(at, longs(30), 9).tolist() == [7]


def test_ring_entries_go_round():
    slots = make_ragged(max_len=40, num_pages=200)
    slots.ring_base = 1000
    slots.reserve(1, 40, 40)
    taken, at = 0, longs(1)
    for _ in range(12):
        slots.fill(at, slots.spare_wanted(at, longs(taken), 4))
        taken += 4
        slots.token_done(1, 4)
    _, index, values = slots.writes.drain()
    assert index.tolist() == [1000 + 32 + n % 32 for n in range(48)]
    assert values.tolist() == slots.owned(1).tolist()


def test_growth_beyond_the_promise_is_lacking():
    slots = make_ragged()
    slots.reserve(1, 2, 8)
    slots.cover(1, 0, 1)
    at = longs(1)
    assert slots.spare_lacking(at, longs(4)) == 0
    assert slots.spare_lacking(at, longs(7)) == 3
    slots.fill(at, longs(7))
    slots.token_done(1, 4)
    assert slots.pages.reserved == 0
    slots.check(NONE)


def test_prompt_tokens_take_planes_one_by_one_and_give_back_the_rest():
    slots = make_ragged()
    slots.reserve(1, 3, 3)
    slots.open_prompt(1, 0, longs(0, 1))
    slots.close_prompt(1, longs(1), 1)
    slots.open_prompt(1, 1, longs(0))
    assert (slots.pages.in_use, slots.pages.reserved) == (3, 12 - 4 - 2)
    slots.close_prompt(1, longs(0), 2)
    assert slots.table[1, :, 0].tolist() == [1, 3, 3, 3]
    assert slots.table[1, :, 1].tolist() == [2, 2, 2, 2]
    # Five planes of the two tokens will never be needed.
    assert slots.pages.available == 40 - 3 - 4
    slots.check(NONE)
    assert sorted(slots.release(1).tolist()) == [1, 2, 3]


@pytest.mark.parametrize("again", ["open", "cover"])
def test_a_prompt_pass_that_was_abandoned_gives_its_pages_back(again):
    slots = make_ragged()
    slots.reserve(1, 4, 4)
    slots.cover(1, 0, 1)
    slots.open_prompt(1, 0, longs(1, 2))
    slots.close_prompt(1, longs(2), 1)
    slots.open_prompt(1, 1, longs(1))
    if again == "open":
        assert sorted(slots.open_prompt(1, 0, longs(1, 2)).tolist()) == [5, 6, 7]
        assert slots.table[1, :, 1:3].any(1).tolist() == [True, False, False, False]
        assert (slots.counted[1], slots.ahead[1], slots.pages.in_use) == (1, 2, 6)
        slots.close_prompt(1, longs(1, 2), 1)
        assert (slots.tokens, slots.rows) == (3, 6)
    else:
        assert sorted(slots.cover(1, 1, 3).tolist()) == [5, 6, 7]
        assert (slots.table[1, :, :3] > 0).all() and len(np.unique(slots.table[1, :, :3])) == 12
        assert (slots.tokens, slots.rows) == (3, 12)
    slots.check(NONE)
    slots.release(1)
    assert slots.pages.num_free == 40
