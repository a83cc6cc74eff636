"""The paged K/V memory: both pools, who may use how much of them, and what they do for each KV layout.

A page holds `page_size` tokens of one plane, over all layers of its pool. The core has P planes (the KV layout says
how many), the layers outside the core a pool and a table of their own with one plane. Slot 0 and page 0 are padding.

The host hands out pages and never waits for the device; table entries wait in a queue until `flush`. Under `ragged`
the device takes a decode token's pages itself, from rings of spare ones (`ragged.py`). Every method that the host calls
is meant for the state after the launches made so far: on one stream, a page given away now is written by its new owner
after its old one.
"""

# S slots, P planes, N rows

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.infer.allocator import Ints, Longs, SlotPages
from looped.infer.offload import SavedKV, load_pages, save_pages
from looped.infer.planes import plane_ops
from looped.infer.pool import OuterPool, Pool, Tables
from looped.infer.prefix import Match, PrefixCache
from looped.infer.ragged import RaggedPages
from looped.infer.sizing import (
    DEFAULT_PAGE_SIZE,
    GPU_RESERVE_BYTES,
    Demand,
    PoolSizes,
    activation_bytes,
    size_pools,
)
from looped.kv import KVLayout

# Blocks of the prefix cache have at least this many tokens.
MIN_PREFIX_BLOCK = 16


@dataclass(frozen=True)
class KVUsage:
    """What the core's pool holds now and what it held at most. `full_rows` is what N tokens would keep with R planes
    each, `rows` what they kept; both count core planes of all tokens so far. `cached_pages` hold prompt blocks that
    nobody uses now and count as free. Of `query_tokens` prompt tokens looked up, `hit_tokens` were in the cache."""

    num_pages: int
    page_size: int
    pages_in_use: int
    peak_pages: int
    capacity_tokens: int
    bytes_per_token: int
    rows: int
    full_rows: int
    cached_pages: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0


class Admission(Protocol):
    """What admission looks at: `scheduler.Job`."""

    @property
    def slot(self) -> int: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def reserve_len(self) -> int: ...
    @property
    def prefix(self) -> tuple[bytes, ...]: ...
    @property
    def parked(self) -> object | None:
        """Not None: it brings all its K/V along, so nothing is looked up for it."""


class KVMemory:
    """Both pools and their books (`scheduler.Memory`)."""

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        max_loops: int,
        num_slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int | None = None,
        num_pages: int | None = None,
        headroom: float = 0.0,
        poison: bool = False,
        prefix_caching: bool = False,
        chunk_size: int | None = None,
        max_num_batched_tokens: int = 8192,
        reserve_bytes: int | None = None,
        graphs: bool = False,
    ) -> None:
        """`max_loops` is R, `num_slots` counts slot 0, `max_len` is the longest a sequence may get, prompt included.

        `num_pages` core pages if given, else as many as are of use and fit into the free memory, of which
        `reserve_bytes` stay free: by default, on a GPU, what CUDA graphs (with `graphs`), tables and batches of
        `max_num_batched_tokens` take.
        `headroom` is the share of each pool that admission keeps free while anything runs. `chunk_size` is the grid on
        which prompts are cut; the prefix cache needs one where a layout's results depend on the cuts. `poison` fills
        free pages with NaN. Raises `LoopedError` for a page size the layout does not take, for a cache without its
        grid, and where memory is too small.
        """
        self.layout, self.max_loops, self.headroom, self._poison = layout, max_loops, headroom, poison
        self.device = device
        self.page_size = check_page_size(page_size, layout)
        num_planes = layout.num_planes(max_loops)
        self.bytes_per_token = config.kv_bytes_per_token(num_planes, dtype.itemsize)
        outer_bytes = config.kv_bytes_per_token(0, dtype.itemsize)
        demand = Demand(
            num_seqs=num_slots - 1,
            max_len=max_len,
            page_size=self.page_size,
            planes=num_planes,
            core_bytes=self.bytes_per_token - outer_bytes,
            outer_bytes=outer_bytes,
            aliases=layout.aliases,
            caching=prefix_caching,
        )
        if reserve_bytes is None:
            reserve_bytes = 0
            if device.type == "cuda":
                tables = 4 * num_slots * (num_planes + 1) * -(-max_len // self.page_size)
                batches = activation_bytes(config, max_num_batched_tokens, num_slots, dtype, graphs)
                reserve_bytes = GPU_RESERVE_BYTES + tables + batches
        sizes = size_pools(demand, device, num_pages, reserve_bytes)
        self.capacity_tokens = sizes.capacity_tokens
        self.max_len = min(max_len, self.capacity_tokens + 1)
        """The longest sequence that `fits`, and that a table has room for."""
        try:
            self.core, self.outer = self._build(config, num_slots, sizes, demand.outer_page_size, dtype)
        except MemoryError as error:
            raise LoopedError(
                f"the books of {sizes.core_pages} KV pages do not fit into memory; lower num_pages"
            ) from error
        self.pools: tuple[Pool, ...] = (self.core,) if self.outer is None else (self.core, self.outer)
        self.tables = Tables(self.pools, device)
        self.prefix_block = prefix_block(layout, self.page_size, chunk_size)
        self._cache = self._prefix_cache() if prefix_caching else None
        self._ops = plane_ops(device)
        if poison:
            for pool in self.pools:
                pool.data[:, pool.page_size :] = torch.nan

    def _build(
        self, config: ModelConfig, num_slots: int, sizes: PoolSizes, outer_page_size: int, dtype: torch.dtype
    ) -> tuple[Pool, OuterPool | None]:
        num_planes = self.layout.num_planes(self.max_loops)
        pages: SlotPages
        if self.layout.aliases:
            pages = RaggedPages(num_slots, num_planes, self.max_len, sizes.core_pages)
        else:
            pages = SlotPages(num_slots, num_planes, self.max_len, self.page_size, sizes.core_pages)
        core = Pool(config.core_layers, pages, config, dtype, self.device)
        if not sizes.outer_pages:
            return core, None
        outside = SlotPages(num_slots, 1, self.max_len, outer_page_size, sizes.outer_pages)
        return core, OuterPool(config, outside, dtype, self.device)

    def _prefix_cache(self) -> PrefixCache:
        if not self.prefix_block:
            raise LoopedError(
                f"prefix caching under layout {self.layout.name!r} needs chunk_size: what such a layout stores depends "
                "on where prompts are cut"
            )
        return PrefixCache([pool.pages for pool in self.pools], self.prefix_block, self._evicted)

    @property
    def _ragged(self) -> RaggedPages:
        assert isinstance(self.core.pages, RaggedPages)
        return self.core.pages

    # Admission.

    def fits(self, max_len: int) -> bool:
        """Whether a sequence that may grow to `max_len` tokens fits into the empty pools."""
        return all(pool.pages.pages_for(stored(max_len)) <= pool.pages.pages.num_pages for pool in self.pools)

    def can_admit(self, job: Admission, idle: bool) -> bool:
        """Whether `job.reserve_len` tokens can be promised now, with the headroom kept unless nothing is active."""
        match = self._match(job)
        for number, pool in enumerate(self.pools):
            pages = pool.pages
            needed = pages.pages_for(job.reserve_len)
            if match is not None:
                needed += match.idle[number] - pages.pages_for(match.tokens)
            spare = 0 if idle else int(self.headroom * pages.pages.num_pages)
            if pages.pages.available - needed < spare:
                return False
        return True

    def admit(self, job: Admission) -> int:
        """Promise `job.reserve_len` tokens to `job.slot`, which holds nothing; returns how many prompt tokens need not
        be run, since the slot shares their pages with the prefix cache: always fewer than the prompt has."""
        match = self._match(job)
        for pool in self.pools:
            pool.pages.reserve(job.slot, job.reserve_len, stored(job.max_len))
        if match is None or self._cache is None:
            return 0
        self._cache.attach(job.slot, match, job.prompt_len)
        return match.tokens

    def _match(self, job: Admission) -> Match | None:
        if self._cache is None or job.parked is not None:
            return None
        return self._cache.match(job.prefix, job.prompt_len)

    def release(self, slot: int, scrub: bool = False) -> None:
        """Everything of a slot is free, but for blocks in the prefix cache. `scrub` zeroes its pages: some may hold
        NaN, which attention kernels that multiply a masked tail by 0 would pass on."""
        for pool in self.pools:
            pages = pool.pages.release(slot)
            if self._poison:
                pool.fill(pages, torch.nan)
            elif scrub:
                pool.fill(pages, 0.0)
        if self._cache is not None:
            self._cache.release(slot)

    def _evicted(self, number: int, pages: Ints) -> None:
        if self._poison:
            self.pools[number].fill(pages, torch.nan)

    # Growth. The host's side.

    def cover_prompt(self, slot: int, start: int, stop: int) -> None:
        """Pages for prompt tokens `start` to `stop` in every plane, unless they have them."""
        self._dropped(self.core.pages.cover(slot, start, stop))
        self.cover_outer(slot, start, stop)

    def cover_outer(self, slot: int, start: int, stop: int) -> None:
        """Pages for prompt tokens `start` to `stop` in the layers outside the core; for prompts of `open_prompt`."""
        if self.outer is not None:
            self.outer.pages.cover(slot, start, stop)

    def grow(self, slots: Ints, positions: Ints) -> bool:
        """Pages for decode tokens up to and including `positions`: in the core unless its planes are aliased, and
        outside it. Positions past a sequence's end count as its end. A slot stands once; slot 0 is passed over.

        False, with nothing changed, where the pools are exhausted even without what the prefix cache keeps.
        """
        at, where = _active(slots, positions)
        pools = [pool.pages for pool in self.pools if not (pool is self.core and self.layout.aliases)]
        wanted = [pages.missing(at, where) for pages in pools]
        for pages, blocks in zip(pools, wanted, strict=True):
            if not _have(pages, pages.lacking(at, blocks)):
                return False
        # Taking may evict cached blocks, which frees pages of every pool and never takes any.
        for pages, blocks in zip(pools, wanted, strict=True):
            pages.extend(at, blocks)
        return True

    def supply(self, slots: Ints, consumed: Longs, spare: int) -> bool:
        """Under `ragged`: see to it that each slot's ring holds `spare` pages beyond the `consumed` ones, or all that
        the sequence can still use. `consumed` is an upper bound of the pages that `open` took since admission or
        `load`. A slot stands once; slot 0 is passed over.

        False, with nothing changed, where the pool is exhausted even without what the prefix cache keeps. A full ring
        is left as it is: it holds what six passes can take, so report passes by `token_done` before there are more.
        """
        if not self.layout.aliases:
            return True
        at, taken = _active(slots, consumed)
        pages = self._ragged
        wanted = pages.spare_wanted(at, taken, spare)
        if not _have(pages, pages.spare_lacking(at, wanted)):
            return False
        pages.fill(at, wanted)
        return True

    def token_done(self, slot: int, depth: int) -> None:
        """A decode token's pass is complete and wrote `depth` planes: count it; what a ragged token was promised
        beyond them is free for others."""
        self.core.pages.token_done(slot, depth)

    def open_prompt(self, slot: int, plane: int, positions: Ints) -> None:
        """Ragged prefill under `ragged`: a page in one plane for each prompt token still in the loop. Plane 0 comes
        first; if it comes again for a token, the earlier pass was abandoned and its pages are taken back."""
        if self.layout.aliases and len(positions):
            self._dropped(self._ragged.open_prompt(slot, plane, positions.astype(np.int64)))

    def close_prompt(self, slot: int, positions: Ints, depth: int) -> None:
        """Prompt tokens of `open_prompt` left after `depth` steps: their later planes are aliases of the last."""
        if self.layout.aliases and len(positions):
            self._ragged.close_prompt(slot, positions.astype(np.int64), depth)

    def _dropped(self, pages: Ints) -> None:
        """Core pages of prompt tokens whose pass was abandoned are free again."""
        if self._poison:
            self.core.fill(pages, torch.nan)

    def flush(self) -> None:
        """Send what the host wrote to the tables, in stream order; call it before a launch that may read it."""
        self.tables.flush()

    # The device's side: fixed shapes, no wait. Padding rows have slot 0.

    def open(self, at_N: Tensor, positions_N: Tensor, steps_N: Tensor) -> None:
        """Before a core step (from 1): under `ragged` the page of the plane that each token writes. int64 [N]."""
        ring, taken = self.tables.ring_SC, self.tables.taken_S
        if ring is not None and taken is not None:
            self._ops.take(self.core.table_SPB, ring, taken, at_N, positions_N, steps_N)

    def close(self, at_N: Tensor, positions_N: Tensor, depths_N: Tensor, leaving_N: Tensor) -> None:
        """After a core step: fill the planes that `leaving` rows, which ran `depths` steps, never wrote; by aliases or
        by copies. int64 [N], and bool [N]; other rows change nothing."""
        num_planes = self.core.pages.num_planes
        if num_planes == 1:
            return
        if self.layout.aliases:
            self._ops.alias(self.core.table_SPB, at_N, positions_N, depths_N, leaving_N)
        else:
            self._ops.copy(self.core, at_N, positions_N, depths_N, leaving_N, num_planes)

    # Preemption by offload. These may wait for the device.

    def save(self, slot: int, num_tokens: int) -> SavedKV:
        """Host copies of the K/V of a slot's first `num_tokens` positions, a token in the loop included. Every pass
        that is complete was reported by `token_done`."""
        self.flush()
        complete = num_tokens
        if self.layout.aliases:
            complete = min(num_tokens, int(self._ragged.counted[slot]))
        return SavedKV(num_tokens, complete, tuple(save_pages(pool, slot, num_tokens) for pool in self.pools))

    def load(self, slot: int, saved: SavedKV) -> None:
        """Put saved K/V into fresh pages of a slot that was admitted as a parked job and holds nothing. Admission
        promised these pages; `supply` counts consumed pages from 0 again."""
        for pool, pages in zip(self.pools, saved.pools, strict=True):
            load_pages(pool, pages, pool.pages.restore(slot, pages.index_PB, saved.num_complete))

    # Prefix cache.

    def publish(self, slot: int, prefix: Sequence[bytes], num_tokens: int) -> None:
        """Share the prompt blocks within a slot's first `num_tokens` tokens, whose K/V are complete and finite in
        every launch made so far. Blocks that are cached already stay the slot's own."""
        if self._cache is not None:
            self._cache.publish(slot, prefix, num_tokens)

    def drop_cache(self) -> None:
        """Forget cached blocks that nobody uses."""
        if self._cache is not None:
            self._cache.clear()

    # Books.

    def usage(self) -> KVUsage:
        pages, cache = self.core.pages.pages, self._cache
        return KVUsage(
            num_pages=pages.num_pages,
            page_size=self.page_size,
            pages_in_use=pages.in_use,
            peak_pages=pages.peak,
            capacity_tokens=self.capacity_tokens,
            bytes_per_token=self.bytes_per_token,
            rows=self.core.pages.rows,
            full_rows=self.core.pages.tokens * self.max_loops,
            cached_pages=pages.evictable,
            hit_tokens=cache.hit_tokens if cache else 0,
            query_tokens=cache.query_tokens if cache else 0,
        )

    def check(self) -> None:
        """Every page is free, or some slot's own, or cached, and only one of these; promises add up and can be kept.
        Raises RuntimeError otherwise. For tests: it looks at every page."""
        for number, pool in enumerate(self.pools):
            pool.pages.check(self._cache.cached_pages(number) if self._cache else np.zeros(0, dtype=np.int32))


def stored(max_len: int) -> int:
    """Tokens whose K/V a sequence of `max_len` tokens keeps: the last one generated never runs."""
    return max_len - 1


def check_page_size(page_size: int | None, layout: KVLayout) -> int:
    """The page size: 16, and 1 where planes are aliased token by token (`ragged`), which takes no other."""
    if layout.aliases:
        if page_size not in (None, 1):
            raise LoopedError(
                f"layout {layout.name!r} shares pages token by token: page_size must be 1, got {page_size}"
            )
        return 1
    if page_size is not None and page_size < 1:
        raise LoopedError(f"page_size must be at least 1, got {page_size}")
    return page_size or DEFAULT_PAGE_SIZE


def prefix_block(layout: KVLayout, page_size: int, chunk_size: int | None) -> int:
    """Tokens in a block of the prefix cache: whole pages of every pool, at least 16 tokens, and a multiple of the
    grid on which prompts are cut where the cuts matter; 0 there without a grid."""
    if layout.cut_sensitive:
        return math.lcm(chunk_size, page_size) if chunk_size else 0
    return -(-MIN_PREFIX_BLOCK // page_size) * page_size


def _active(slots: Ints, values: Ints | Longs) -> tuple[Longs, Longs]:
    """Both as int64, without padding rows."""
    at, numbers = np.asarray(slots, dtype=np.int64), np.asarray(values, dtype=np.int64)
    return (at, numbers) if at.all() else (at[at > 0], numbers[at > 0])


def _have(pages: SlotPages, lacking: int) -> bool:
    return lacking == 0 or lacking <= pages.pages.available
