"""The prefix cache: blocks of prompt tokens whose K/V stay in the pools for later prompts that begin alike.

A block is found by a hash over its tokens and the hash of the block before it, so it stands for everything up to its
end. Blocks in use are shared and never written again; those that nobody uses stay until pages are short and leave then,
least recently used first. numpy, no torch.
"""

# P planes, B pages of a plane in a block

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from looped.infer.allocator import Ints, SlotPages


def block_hashes(prompt_ids: Sequence[int], block: int, salt: bytes) -> tuple[bytes, ...]:
    """The hash of every full block of `block` tokens, each over all tokens up to its end; none where `block` is 0.

    `salt` names all else that K/V depend on: layout, prefill policy, chunk grid, loops, dtype, and for models that
    start from noise the request's seed.
    """
    hashes: list[bytes] = []
    if block < 1:
        return ()
    parent = blake2b(salt, digest_size=16).digest()
    ids = np.asarray(prompt_ids, dtype=np.int64)
    for stop in range(block, len(ids) + 1, block):
        parent = blake2b(parent + ids[stop - block : stop].tobytes(), digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


@dataclass(eq=False)
class Block:
    """Pages of one block in every pool: the table a slot gets, and each physical page once."""

    hash: bytes
    tables: tuple[Ints, ...]
    """By pool, [P, B]."""
    users: int = 0
    pages: tuple[Ints, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = tuple(np.unique(table) for table in self.tables)


class Match(NamedTuple):
    """Cached blocks at the start of a prompt."""

    blocks: list[Block]
    tokens: int
    idle: tuple[int, ...]
    """By pool, how many pages of theirs nobody uses: they stop being evictable when the blocks are attached."""


class PrefixCache:
    """Blocks of `block` tokens, a whole number of pages in every pool. `evicted` is told which pages of which pool
    became free."""

    def __init__(self, pools: Sequence[SlotPages], block: int, evicted: Callable[[int, Ints], None]) -> None:
        self.block, self.hit_tokens, self.query_tokens = block, 0, 0
        self._pools, self._evicted = pools, evicted
        self._blocks: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()
        self._held: dict[int, list[Block]] = {}
        for number, pool in enumerate(pools):
            pool.pages.reclaim = self._reclaimer(number)

    def match(self, prefix: Sequence[bytes], prompt_len: int) -> Match:
        """The longest cached chain that leaves a token of the prompt to run."""
        blocks: list[Block] = []
        for key in prefix[: (prompt_len - 1) // self.block]:
            found = self._blocks.get(key)
            if found is None:
                break
            blocks.append(found)
        idle = tuple(
            sum(len(block.pages[number]) for block in blocks if not block.users) for number in range(len(self._pools))
        )
        return Match(blocks, len(blocks) * self.block, idle)

    def attach(self, slot: int, match: Match, prompt_len: int) -> None:
        """Give a slot that holds nothing yet the blocks of its prompt that are there."""
        for block in match.blocks:
            self._use(block)
            for pool, table in zip(self._pools, block.tables, strict=True):
                pool.attach(slot, table)
        if match.blocks:
            self._held[slot] = list(match.blocks)
        self.query_tokens += prompt_len
        self.hit_tokens += match.tokens

    def publish(self, slot: int, prefix: Sequence[bytes], num_tokens: int) -> None:
        """Share the blocks within a slot's first `num_tokens` tokens. What is cached already stays the slot's own."""
        for number, key in enumerate(prefix[: num_tokens // self.block]):
            if key in self._blocks:
                continue
            tables = []
            for pool in self._pools:
                size = self.block // pool.page_size
                tables.append(pool.table[slot, :, number * size : (number + 1) * size].copy())
            block = Block(key, tuple(tables), users=1)
            for pool, pages in zip(self._pools, block.pages, strict=True):
                pool.disown(slot, pages)
            self._blocks[key] = block
            self._held.setdefault(slot, []).append(block)

    def release(self, slot: int) -> None:
        """A slot is gone: nobody else may use its blocks now. Long chains lose their ends first."""
        for block in reversed(self._held.pop(slot, [])):
            block.users -= 1
            if not block.users:
                self._idle[block.hash] = block
                self._count_idle(block, 1)

    def clear(self) -> None:
        """Drop every block that nobody uses."""
        while self._idle:
            self._evict()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def cached_pages(self, pool: int) -> Ints:
        """All pages of a pool that blocks hold, used or not."""
        pages = [block.pages[pool] for block in self._blocks.values()]
        return np.concatenate(pages) if pages else np.zeros(0, dtype=np.int32)

    def _use(self, block: Block) -> None:
        if not block.users:
            del self._idle[block.hash]
            self._count_idle(block, -1)
        block.users += 1

    def _count_idle(self, block: Block, sign: int) -> None:
        for pool, pages in zip(self._pools, block.pages, strict=True):
            pool.pages.evictable += sign * len(pages)
            pool.pages.peak = max(pool.pages.peak, pool.pages.in_use)

    def _evict(self) -> None:
        _, block = self._idle.popitem(last=False)
        del self._blocks[block.hash]
        for number, (pool, pages) in enumerate(zip(self._pools, block.pages, strict=True)):
            pool.pages.give(pages)
            self._evicted(number, pages)
        self._count_idle(block, -1)

    def _reclaimer(self, number: int) -> Callable[[int], None]:
        def reclaim(count: int) -> None:
            pages = self._pools[number].pages
            target = pages.num_free + count
            while pages.num_free < target and self._idle:
                self._evict()

        return reclaim
