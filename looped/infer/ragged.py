"""The host's books of a ragged pool: pages of one token, taken plane by plane as far as a token runs.

A decode token's pages are taken on the device, from a ring of spare pages that each slot has there and the host tops
up. So the host knows which pages a slot owns and how many its tokens kept, but not which page went where: the device's
table says that. Prompt tokens get their pages from the host. numpy, no torch.
"""

# S slots, P planes, N tokens

from __future__ import annotations

import numpy as np

from looped.infer.allocator import Ints, Longs, SlotPages, spread


class RaggedPages(SlotPages):
    """`counted[slot]` tokens have all their planes, however few pages that took; `ahead[slot]` pages belong to none of
    them: spare ones in the ring, and those of tokens still in the loop. A slot is owed what it was promised for the
    tokens to come, less what it holds ahead.

    `used` counts the tokens whose table the host has written: prompts.
    """

    def __init__(self, num_slots: int, num_planes: int, max_len: int, num_pages: int) -> None:
        self.ring_size = ring_size(num_planes)
        super().__init__(num_slots, num_planes, max_len, 1, num_pages, spare=self.ring_size)
        self.ring_base = 0
        self.counted = np.zeros(num_slots, dtype=np.int64)
        self.ahead = np.zeros(num_slots, dtype=np.int64)
        self.given = np.zeros(num_slots, dtype=np.int64)
        # Depth at which a prompt token left the loop, 0 while it is in it.
        self._depths = np.zeros((num_slots, max_len), dtype=np.int16)

    def _due(self, slots: Longs) -> Longs:
        due: Longs = self.num_planes * (self.promised[slots] - self.counted[slots]) - self.ahead[slots]
        return due

    def release(self, slot: int) -> Ints:
        self._depths[slot, : self.used[slot]] = 0
        self.counted[slot] = self.ahead[slot] = self.given[slot] = 0
        return super().release(slot)

    def _advance(self, slot: int, blocks: int) -> None:
        self._close(slot, np.arange(self.used[slot], self.used[slot] + blocks), self.num_planes)
        super()._advance(slot, blocks)

    def restore(self, slot: int, index_PB: Ints, num_complete: int) -> Ints:
        self.counted[slot] = num_complete
        self.ahead[slot] = len(np.unique(index_PB[:, num_complete:][index_PB[:, num_complete:] > 0]))
        return super().restore(slot, index_PB, num_complete)

    # Decode tokens.

    def spare_wanted(self, slots: Longs, consumed: Longs, spare: int) -> Longs:
        """Pages each ring lacks to hold `spare` beyond `consumed`; fewer where the sequence can use no more, or where
        the ring is full, which is enough while fewer than six passes are unreported."""
        room = self.ring_size - self.ahead[slots]
        use = self.num_planes * (self.limit[slots] - self.counted[slots]) - self.ahead[slots]
        wanted: Longs = np.maximum(0, np.minimum(consumed + spare - self.given[slots], np.minimum(room, use)))
        return wanted

    def spare_lacking(self, slots: Longs, wanted: Longs) -> int:
        """How many of the wanted pages must come from what nobody was promised."""
        return int((wanted - (self.owed[slots] - np.maximum(0, self._due(slots) - wanted))).sum())

    def fill(self, slots: Longs, wanted: Longs) -> None:
        """Put `wanted` pages into the ring of each slot, which stands once in `slots`."""
        lacks = wanted > 0
        slots, wanted = slots[lacks], wanted[lacks]
        if not len(slots):
            return
        at, nth = spread(slots, wanted)
        pages = self.pages.take(len(at))
        self._owned[at, self._num_owned[at] + nth] = pages
        self._num_owned[slots] += wanted
        place = (self.given[at] + nth) % self.ring_size
        self.writes.put(at, self.ring_base + at * self.ring_size + place, pages)
        self.given[slots] += wanted
        self.ahead[slots] += wanted
        self._settle(slots)

    def token_done(self, slot: int, depth: int) -> None:
        """A decode token kept `depth` pages; what it was promised beyond that is free for others."""
        self.tokens += 1
        self.rows += depth
        # What `_settle` does, for one slot and often: plain integers are ten times as fast.
        counted, ahead = int(self.counted[slot]) + 1, int(self.ahead[slot]) - depth
        owed = max(0, self.num_planes * (int(self.promised[slot]) - counted) - ahead)
        self.pages.reserved += owed - int(self.owed[slot])
        self.counted[slot], self.ahead[slot], self.owed[slot] = counted, ahead, owed

    # Prompt tokens.

    def cover(self, slot: int, start: int, stop: int) -> Ints:
        dropped, begun = _none(), np.arange(start, min(stop, int(self.used[slot])))
        if (self._depths[slot, begun] != self.num_planes).any():
            dropped = self._drop(slot, begun)
            self.used[slot] = start
        fresh = np.arange(self.used[slot], stop)
        self.extend(np.array([slot]), np.array([len(fresh)]))
        self._close(slot, fresh, self.num_planes)
        self.tokens += len(fresh)
        self.rows += len(fresh) * self.num_planes
        self._settle(np.array([slot]))
        return dropped

    def open_prompt(self, slot: int, plane: int, positions: Longs) -> Ints:
        """A page of its own in one plane for each prompt token, unless it has one.

        Plane 0 starts a token: one that was begun before, and abandoned, is taken back first. Returns the pages that
        this set free.
        """
        dropped = self._drop(slot, positions[self.table[slot, 0, positions] > 0]) if plane == 0 else _none()
        self.ahead[slot] += len(positions)
        pages = self.pages.take(len(positions))
        self._own(slot, pages)
        self.table[slot, plane, positions] = pages
        self._queue(np.array([slot]), np.array(plane), positions, pages)
        self.used[slot] = max(int(self.used[slot]), int(positions.max()) + 1)
        self._settle(np.array([slot]))
        return dropped

    def close_prompt(self, slot: int, positions: Longs, depth: int) -> None:
        """Prompt tokens left the loop after `depth` steps: their other planes are the last one they wrote."""
        if depth < self.num_planes:
            missing = np.arange(depth, self.num_planes)[:, None]
            last = np.broadcast_to(self.table[slot, depth - 1, positions], (len(missing), len(positions)))
            self.table[slot, missing, positions] = last
            self._queue(np.array(slot), missing, positions, last)
        self._close(slot, positions, depth)
        self.tokens += len(positions)
        self.rows += depth * len(positions)
        self.ahead[slot] -= depth * len(positions)
        self._settle(np.array([slot]))

    def _close(self, slot: int, positions: Longs, depth: int) -> None:
        self._depths[slot, positions] = depth
        self.counted[slot] += len(positions)

    def _drop(self, slot: int, positions: Longs) -> Ints:
        """Take back the pages of prompt tokens whose passes were abandoned."""
        if not len(positions):
            return _none()
        pages = np.unique(self.table[slot][:, positions])
        pages = pages[pages > 0]
        self.disown(slot, pages)
        self.pages.give(pages)
        closed = self._depths[slot, positions]
        num_closed, rows = int((closed > 0).sum()), int(closed.sum())
        self.tokens -= num_closed
        self.rows -= rows
        self.counted[slot] -= num_closed
        self.ahead[slot] -= len(pages) - rows
        self.table[slot][:, positions] = 0
        self.writes.repeated = True
        self._depths[slot, positions] = 0
        self._settle(np.array([slot]))
        return pages


def ring_size(num_planes: int) -> int:
    """Pages a ring holds: a power of two with room for what six passes can take, those included that the host has not
    heard of."""
    return max(8, 1 << (6 * num_planes - 1).bit_length())


def _none() -> Ints:
    return np.zeros(0, dtype=np.int32)
