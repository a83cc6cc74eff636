"""Who holds which pages, on the host: free pages, promises, page tables and what of them the device has yet to hear.

numpy, no torch. Nothing here waits for the device, and no page is handed out that could be owned twice.
"""

# S slots, P planes, N entries

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


class PageAllocator:
    """A stack of free page numbers 1..num_pages; page 0 is padding and never handed out.

    `reserved` pages are promised to admitted sequences but not taken yet. `evictable` pages hold cached K/V that nobody
    uses; `reclaim(n)` frees at least n of them. `available` is what admission may promise.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages
        self.reserved = 0
        self.evictable = 0
        self.peak = 0
        self.reclaim: Callable[[int], None] | None = None

    @property
    def available(self) -> int:
        return self.num_free + self.evictable - self.reserved

    @property
    def in_use(self) -> int:
        """Pages that hold something somebody uses."""
        return self.num_pages - self.num_free - self.evictable

    def take(self, count: int) -> Ints:
        """`count` pages, consecutive where the stack is fresh. The caller has made sure that they exist."""
        if count > self.num_free and self.reclaim is not None:
            self.reclaim(count - self.num_free)
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

    def free_pages(self) -> Ints:
        return self._stack[: self.num_free]


class Writes:
    """Entries of device tables that the host has changed and not sent yet.

    An entry is (slot, index, value); `index` counts through one flat int32 array that holds all tables. Everything of a
    slot in `cleared` is set to 0 before the entries are written.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Longs, Longs, Ints]] = []
        self.cleared: set[int] = set()
        self.repeated = False
        """An index may stand twice among the entries; the later one counts."""

    def __bool__(self) -> bool:
        return bool(self._parts or self.cleared)

    def put(self, slots: Longs, index: Longs, values: Ints) -> None:
        """All [N]. No index stands twice between two `drain`s unless `repeated` is set."""
        self._parts.append((slots, index, values))

    def clear(self, slot: int) -> None:
        """Forget the slot's entries, those that wait included."""
        self.cleared.add(slot)
        kept = [(slots != slot, slots, index, values) for slots, index, values in self._parts]
        self._parts = [(slots[k], index[k], values[k]) for k, slots, index, values in kept if k.any()]

    def drain(self) -> tuple[Longs, Longs, Ints]:
        """(slots to clear, indices, values) of all that waits."""
        cleared = np.array(sorted(self.cleared), dtype=np.int64)
        index = np.concatenate([part[1] for part in self._parts]) if self._parts else np.zeros(0, np.int64)
        values = np.concatenate([part[2] for part in self._parts]) if self._parts else np.zeros(0, np.int32)
        if self.repeated:
            _, last = np.unique(index[::-1], return_index=True)
            index, values = index[::-1][last], values[::-1][last]
        self._parts.clear()
        self.cleared.clear()
        self.repeated = False
        return cleared, index, values


class SlotPages:
    """The pages of one pool by slot: `table[slot, plane, block]`, 0 where there is none.

    A page is `page_size` tokens of one plane, over all layers of the pool. `table` is the host's view of the device's
    table, which lies at `base` of the flat array that `writes` counts through. `promised[slot]` blocks are the slot's
    to take; `owed[slot]` pages of them it has not taken yet. `used[slot]` blocks have pages; `limit[slot]` is how many
    the sequence can ever need. Pages a slot owns alone are listed apart from those it shares through the prefix cache.
    `tokens` and `rows` count tokens and their planes since the start.
    """

    def __init__(
        self, num_slots: int, num_planes: int, max_len: int, page_size: int, num_pages: int, spare: int = 0
    ) -> None:
        self.page_size, self.num_planes = page_size, num_planes
        self.pages = PageAllocator(num_pages)
        self.num_blocks = -(-max_len // page_size)
        self.table = np.zeros((num_slots, num_planes, self.num_blocks), dtype=np.int32)
        self.writes, self.base = Writes(), 0
        self.promised = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(num_slots, dtype=np.int64)
        self.owed = np.zeros(num_slots, dtype=np.int64)
        self.used = np.zeros(num_slots, dtype=np.int64)
        self.tokens = self.rows = 0
        # Prompt tokens that were counted: a batch may be abandoned and come again.
        self._covered = np.zeros(num_slots, dtype=np.int64)
        # Room for every page a slot can own; untouched rows of zeros take no memory.
        self._owned = np.zeros((num_slots, num_planes * self.num_blocks + spare), dtype=np.int32)
        self._num_owned = np.zeros(num_slots, dtype=np.int64)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_for(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens with every plane of their own."""
        return self.num_planes * self.blocks_for(num_tokens)

    def owned(self, slot: int) -> Ints:
        """The pages that only this slot uses, each once."""
        return self._owned[slot, : self._num_owned[slot]]

    # Admission.

    def reserve(self, slot: int, num_tokens: int, max_tokens: int) -> None:
        """Promise `slot` the pages of `num_tokens` tokens, of the `max_tokens` it may ever store."""
        self.promised[slot] = self.blocks_for(num_tokens)
        self.limit[slot] = self.blocks_for(max_tokens)
        self._settle(np.array([slot]))

    def attach(self, slot: int, table_PB: Ints) -> None:
        """Let the slot's next blocks be pages that others hold too."""
        self._place(slot, int(self.used[slot]), table_PB)
        self._advance(slot, table_PB.shape[1])

    def release(self, slot: int) -> Ints:
        """Take everything back from a slot; returns the pages that only it held, which are free now."""
        pages = self.owned(slot).copy()
        self.pages.give(pages)
        self._num_owned[slot] = 0
        self.table[slot, :, : self.used[slot]] = 0
        self.promised[slot] = self.limit[slot] = self.used[slot] = self._covered[slot] = 0
        self._settle(np.array([slot]))
        self.writes.clear(slot)
        return pages

    def disown(self, slot: int, pages: Ints) -> None:
        """Strike pages off the slot's own: the prefix cache holds them now, or they were given back."""
        kept = np.setdiff1d(self.owned(slot), pages, assume_unique=True)
        self._owned[slot, : len(kept)] = kept
        self._num_owned[slot] = len(kept)

    # Growth.

    def cover(self, slot: int, start: int, stop: int) -> Ints:
        """Pages for prompt tokens `start` to `stop` in every plane, unless they have them. They were promised. Returns
        pages that this set free: none here."""
        self.extend(np.array([slot]), np.array([self.blocks_for(stop) - self.used[slot]]))
        fresh = max(0, stop - max(start, int(self._covered[slot])))
        self._covered[slot] = max(int(self._covered[slot]), stop)
        self.tokens += fresh
        self.rows += fresh * self.num_planes
        return np.zeros(0, dtype=np.int32)

    def token_done(self, slot: int, depth: int) -> None:
        """A decode token has run `depth` loops."""
        self.tokens += 1
        self.rows += self.num_planes

    def missing(self, slots: Longs, positions: Longs) -> Longs:
        """Blocks that each slot needs for its tokens up to and including `positions`, up to its limit."""
        return np.maximum(0, np.minimum(positions // self.page_size + 1, self.limit[slots]) - self.used[slots])

    def lacking(self, slots: Longs, blocks: Longs) -> int:
        """How many pages must come from what nobody was promised to give each slot `blocks` more blocks."""
        return int(np.maximum(0, blocks * self.num_planes - self.owed[slots]).sum())

    def extend(self, slots: Longs, blocks: Longs) -> None:
        """Give each slot, which stands once in `slots`, `blocks` more blocks behind those it has, in every plane."""
        growing = blocks > 0
        slots, blocks = slots[growing], blocks[growing]
        if not len(slots):
            return
        at, offset = spread(slots, blocks)
        pages = self.pages.take(len(at) * self.num_planes)
        # A prompt's pages are consecutive within a plane, which reads best.
        pages_NP = pages.reshape(self.num_planes, -1).T if len(slots) == 1 else pages.reshape(-1, self.num_planes)
        place = (self._num_owned[at] + offset * self.num_planes)[:, None] + np.arange(self.num_planes)
        self._owned[at[:, None], place] = pages_NP
        self._num_owned[slots] += blocks * self.num_planes
        block = self.used[at] + offset
        self.table[at, :, block] = pages_NP
        self._queue(at[:, None], np.arange(self.num_planes), block[:, None], pages_NP)
        self.used[slots] += blocks
        self._settle(slots)

    def restore(self, slot: int, index_PB: Ints, num_complete: int) -> Ints:
        """Give a slot that holds nothing a table of saved pages: `index_PB` counts them from 1, 0 where there is none.
        Returns their new numbers, in that order. They were promised."""
        if self.used[slot]:
            raise RuntimeError(f"slot {slot} holds pages already")
        pages = self.pages.take(int(index_PB.max(initial=0)))
        self._own(slot, pages)
        self._place(slot, 0, np.concatenate((np.zeros(1, dtype=np.int32), pages))[index_PB])
        self.used[slot] = index_PB.shape[1]
        self._settle(np.array([slot]))
        return pages

    def check(self, cached: Ints) -> None:
        """Raise RuntimeError unless every page is free, one slot's own or `cached`, tables hold no other, and promises
        add up and can be kept."""
        slots = np.arange(len(self.table))
        owned = [self.owned(int(slot)) for slot in slots]
        everything = np.sort(np.concatenate((self.pages.free_pages(), cached, *owned)))
        if not np.array_equal(everything, np.arange(1, self.pages.num_pages + 1)):
            raise RuntimeError("KV pages are lost or held twice")
        if len(owned[0]) or self.table[0].any() or self.used[0]:
            raise RuntimeError("slot 0, which is padding, holds pages")
        holder = np.full(self.pages.num_pages + 1, -1)
        holder[np.concatenate(owned)] = np.repeat(slots, self._num_owned)
        anyone = np.zeros(self.pages.num_pages + 1, dtype=bool)
        anyone[0] = anyone[cached] = True
        if not (anyone[self.table] | (holder[self.table] == slots[:, None, None])).all():
            raise RuntimeError("a page table has pages that its slot does not hold")
        if self.pages.reserved != self.owed.sum() or (self.owed < 0).any():
            raise RuntimeError("promises of KV pages do not add up")
        if self.pages.available < 0:
            raise RuntimeError(f"{-self.pages.available} KV pages are promised that there are not")

    # Common parts.

    def _place(self, slot: int, start: int, table_PB: Ints) -> None:
        """Write part of a slot's table, from block `start` on."""
        planes, blocks = np.arange(self.num_planes)[:, None], np.arange(start, start + table_PB.shape[1])
        self.table[slot, :, start : start + table_PB.shape[1]] = table_PB
        self._queue(np.array(slot), planes, blocks, table_PB)

    def _advance(self, slot: int, blocks: int) -> None:
        self.used[slot] += blocks
        self._settle(np.array([slot]))

    def _queue(self, slots: Longs, planes: Longs, blocks: Longs, values: Ints) -> None:
        """Table entries for the device; the four broadcast against each other."""
        index = self.base + (slots * self.num_planes + planes) * self.num_blocks + blocks
        slots, index, values = np.broadcast_arrays(slots, index, values)
        self.writes.put(slots.reshape(-1), index.reshape(-1), values.reshape(-1))

    def _own(self, slot: int, pages: Ints) -> None:
        """List `pages` as the slot's own."""
        count = int(self._num_owned[slot])
        self._owned[slot, count : count + len(pages)] = pages
        self._num_owned[slot] = count + len(pages)

    def _due(self, slots: Longs) -> Longs:
        """Pages that were promised and not taken; negative where more was taken."""
        return self.num_planes * (self.promised[slots] - self.used[slots])

    def _settle(self, slots: Longs) -> None:
        """Bring the promises of slots up to date with what they hold."""
        owed = np.maximum(0, self._due(slots))
        self.pages.reserved += int((owed - self.owed[slots]).sum())
        self.owed[slots] = owed


def spread(slots: Longs, counts: Longs) -> tuple[Longs, Longs]:
    """Each slot repeated `counts` times, and the number of the repetition from 0."""
    at = np.repeat(slots, counts)
    return at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
