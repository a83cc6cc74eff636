"""Free pages and page tables on the host: numpy, no torch."""

# S slots, P planes

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class PageAllocator:
    """A stack of free page numbers 1..num_pages; page 0 is padding and never handed out.

    `reserved` pages are promised to admitted sequences but not taken yet: `available` is what admission may promise.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages
        self.reserved = 0
        self.peak = 0

    @property
    def available(self) -> int:
        return self.num_free - self.reserved

    @property
    def in_use(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> Ints:
        """`count` pages, consecutive where the stack is fresh. Admission guarantees that they exist."""
        if count > self.num_free:
            raise RuntimeError(f"KV pool exhausted: {count} pages wanted, {self.num_free} free")
        self.num_free -= count
        self.peak = max(self.peak, self.in_use)
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def give(self, pages: Ints) -> None:
        """Return pages; the last one given is the first taken again."""
        count = len(pages)
        if self.num_free + count > self.num_pages:
            raise RuntimeError("KV pages were returned twice")
        self._stack[self.num_free : self.num_free + count] = pages[::-1]
        self.num_free += count


class SlotPages:
    """Which pages each slot holds: `table[slot, plane, block]`, 0 where there is none.

    A page is `page_size` tokens of one plane, over all layers of the pool. What a slot was promised and has not taken
    is counted in `owed[slot]`. Behind block `used[slot]` a slot has no pages, so long contexts cost what they hold.
    """

    def __init__(self, num_slots: int, num_planes: int, max_len: int, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_planes = num_planes
        self.pages = PageAllocator(num_pages)
        self.table = np.zeros((num_slots, num_planes, -(-max_len // page_size)), dtype=np.int32)
        self.owed = np.zeros(num_slots, dtype=np.int64)
        self.used = np.zeros(num_slots, dtype=np.int64)
        self.dirty: set[int] = set()

    def pages_for(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens with every plane of their own."""
        return self.num_planes * -(-num_tokens // self.page_size)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Promise `slot` the pages of `num_tokens` tokens."""
        self.owed[slot] = self.pages_for(num_tokens)
        self.pages.reserved += int(self.owed[slot])

    def cover(self, slot: int, start: int, stop: int) -> None:
        """Give tokens `start` to `stop` of a slot their pages in every plane, unless their blocks have them."""
        first, last = -(-start // self.page_size), -(-stop // self.page_size)
        if first < last:
            count = (last - first) * self.num_planes
            self.table[slot, :, first:last] = self._take(slot, count).reshape(self.num_planes, -1)
            self.used[slot] = last
            self.dirty.add(slot)

    def open(self, slots: Ints, planes: Ints, positions: Ints) -> None:
        """Give one token of each slot a page of its own in one plane (pages of one token)."""
        pages = self.pages.take(len(slots))
        self.table[slots, planes, positions] = pages
        self.used[slots] = positions + 1
        self._paid(slots, 1)

    def alias(self, slots: Ints, positions: Ints, depths: Ints) -> None:
        """Let the planes a token never wrote share the page of its last one, and return what they were promised."""
        last = self.table[slots, depths - 1, positions]
        for plane in range(self.num_planes):
            missing = plane >= depths
            self.table[slots[missing], plane, positions[missing]] = last[missing]
        self._paid(slots, self.num_planes - depths)

    def release(self, slot: int) -> Ints:
        """Take everything back from a slot; returns its pages, each once."""
        mine = self.table[slot, :, : self.used[slot]]
        held = np.unique(mine)
        held = held[held > 0]
        self.pages.give(held)
        self.pages.reserved -= int(self.owed[slot])
        mine[:] = 0
        self.owed[slot] = self.used[slot] = 0
        return held

    def _take(self, slot: int, count: int) -> Ints:
        pages = self.pages.take(count)
        self.owed[slot] -= count
        self.pages.reserved -= count
        return pages

    def _paid(self, slots: Ints, count: int | Ints) -> None:
        """Strike `count` pages off what each slot is owed; a slot stands once in `slots`."""
        self.owed[slots] -= count
        self.pages.reserved -= int(np.sum(count)) if isinstance(count, np.ndarray) else count * len(slots)
        self.dirty.update(slots.tolist())
