"""Pages on the host: promises, taking, aliasing, returning."""

import numpy as np
import pytest

from looped.infer.allocator import PageAllocator, SlotPages


def ints(*values):
    return np.array(values, dtype=np.int32)


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


def test_blocks_are_covered_once():
    slots = SlotPages(3, 2, 40, page_size=16, num_pages=12)
    slots.reserve(1, 40)
    assert slots.pages.available == 12 - 6
    for start, stop, blocks in ((0, 10, 1), (10, 16, 1), (16, 17, 2), (17, 40, 3)):
        slots.cover(1, start, stop)
        assert (slots.table[1] > 0).sum() == 2 * blocks
    assert slots.pages.in_use == 6 and slots.owed[1] == 0 and slots.pages.available == 6
    assert len(np.unique(slots.table[1])) == 6
    assert sorted(slots.release(1).tolist()) == [1, 2, 3, 4, 5, 6]
    assert not slots.table.any() and slots.pages.available == 12


def test_ragged_tokens_take_planes_one_by_one_and_give_back_the_rest():
    slots = SlotPages(3, 4, 8, page_size=1, num_pages=40)
    for slot in (1, 2):
        slots.reserve(slot, 3)
    slots.open(ints(1, 2), ints(0, 0), ints(0, 0))
    slots.open(ints(1, 2), ints(1, 1), ints(0, 0))
    assert slots.pages.available == 40 - 24 and slots.pages.in_use == 4
    slots.alias(ints(1, 2), ints(0, 0), ints(2, 2))
    assert slots.table[1, :, 0].tolist() == [1, 3, 3, 3]
    assert slots.table[2, :, 0].tolist() == [2, 4, 4, 4]
    # Two planes of each token will never be needed.
    assert slots.pages.available == 40 - 24 + 4
    assert sorted(slots.release(1).tolist()) == [1, 3]
    assert slots.pages.available == 40 - 2 - 8


def test_blocks_in_use_are_known():
    slots = SlotPages(3, 2, 40, page_size=16, num_pages=12)
    slots.reserve(1, 40)
    slots.cover(1, 0, 33)
    assert slots.used.tolist() == [0, 3, 0]
    slots.release(1)
    assert slots.used.tolist() == [0, 0, 0] and not slots.table.any()


def test_release_gives_a_shared_page_back_once():
    slots = SlotPages(2, 4, 2, page_size=1, num_pages=8)
    slots.reserve(1, 2)
    slots.open(ints(1), ints(0), ints(0))
    slots.alias(ints(1), ints(0), ints(1))
    assert slots.release(1).tolist() == [1]
    assert slots.pages.num_free == 8
