"""The paged KV pool: K/V tensors, the page table in the plane dimension, and the pages each slot is promised.

A page holds `page_size` tokens of one plane, over all layers of its pool. The core has P planes (the KV layout says
how many), the layers outside the core a pool and a table of their own with one plane. Slot 0 and page 0 are padding.
"""

# S slots, P planes, N rows, H key/value heads, K head dim

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.infer.allocator import Ints, SlotPages
from looped.kv import KVLayout

# On a CPU a pool is never larger than this unless `num_pages` asks for it: pages take memory only once touched.
CPU_POOL_BYTES = 2 << 30
# Share of the free memory that a pool may take.
POOL_SHARE = {"cpu": 0.5, "cuda": 0.85}
DEFAULT_PAGE_SIZE = 16


class Pool:
    """K/V of some layers and the table that finds a slot's tokens in it.

    `data[layer]` is [pages * page_size, 2, H, K]: K and V of one token are neighbours, so one gather fetches both.
    """

    def __init__(self, layers: range, pages: SlotPages, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.layers = layers
        self.pages = pages
        rows = (pages.pages.num_pages + 1) * pages.page_size
        shape = (len(layers), rows, 2, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.data[:, : pages.page_size] = 0
        host = torch.from_numpy(pages.table)
        self.table_SPB = host if device.type == "cpu" else host.to(device)

    @property
    def page_size(self) -> int:
        return self.pages.page_size

    def layer(self, layer: int) -> Tensor:
        """K/V rows [rows, 2, H, K] of a layer, counting prelude, core, coda."""
        return self.data[layer - self.layers.start]

    def rows(self, slots_N: Tensor, planes_N: Tensor, positions_N: Tensor) -> Tensor:
        """Where in the pool each (slot, plane, position) lies: [N] row numbers."""
        page = self.table_SPB[slots_N, planes_N, positions_N // self.page_size]
        return page.long() * self.page_size + positions_N % self.page_size

    def flush(self) -> None:
        """Bring the device's table up to date with the host's. On a CPU they are one memory."""
        if self.table_SPB.device.type != "cpu" and self.pages.dirty:
            slots, device = sorted(self.pages.dirty), self.table_SPB.device
            width = int(self.pages.used[slots].max())  # what the device holds behind it is never looked up
            fresh = torch.from_numpy(self.pages.table[slots, :, :width])
            self.table_SPB[torch.tensor(slots, device=device), :, :width] = fresh.to(device)
        self.pages.dirty.clear()

    def poison(self, pages: Ints) -> None:
        """Fill pages with NaN; a correct engine never reads them again before it writes them."""
        rows = pages.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        self.data[:, torch.from_numpy(rows.reshape(-1)).to(self.data.device)] = torch.nan


class OuterPool(Pool):
    """K/V of the layers before and after the core, in one table with a single plane."""

    def __init__(self, config: ModelConfig, pages: SlotPages, dtype: torch.dtype, device: torch.device):
        super().__init__(range(config.num_prelude_layers + config.num_coda_layers), pages, config, dtype, device)
        self._core = config.core_layers

    def layer(self, layer: int) -> Tensor:
        return self.data[layer if layer < self._core.start else layer - len(self._core)]


@dataclass(frozen=True)
class KVUsage:
    """What the pool holds now and what it held at most. `full_rows` is what N tokens would keep with R planes each,
    `rows` what they kept; both count core planes of all tokens so far."""

    num_pages: int
    page_size: int
    pages_in_use: int
    peak_pages: int
    capacity_tokens: int
    bytes_per_token: int
    rows: int
    full_rows: int


class KVMemory:
    """Both pools, and who may use how much of them (`scheduler.Memory`)."""

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
    ) -> None:
        self.layout, self.max_loops, self.headroom, self._poison = layout, max_loops, headroom, poison
        self.page_size = check_page_size(page_size, layout)
        planes = layout.num_planes(max_loops)
        self.bytes_per_token = config.kv_bytes_per_token(planes, dtype.itemsize)
        if num_pages is None:
            num_pages = _num_pages(self.page_size, planes, self.bytes_per_token, num_slots - 1, max_len, device)
        elif num_pages < planes:
            raise LoopedError(f"num_pages must be at least {planes} (one page a plane), got {num_pages}")
        self.capacity_tokens = num_pages // planes * self.page_size
        max_len = min(max_len, self.capacity_tokens + 1)
        pages = SlotPages(num_slots, planes, max_len, self.page_size, num_pages)
        self.core = Pool(config.core_layers, pages, config, dtype, device)
        self.outer = self._outer_pool(config, num_slots, max_len, dtype, device)
        self.tokens = 0
        self.rows = 0
        if poison:
            for pool in self._pools:
                pool.data[:, pool.page_size :] = torch.nan

    def _outer_pool(
        self, config: ModelConfig, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> OuterPool | None:
        if config.fully_looped:
            return None
        size = DEFAULT_PAGE_SIZE if self.layout.aliases else self.page_size
        # A ragged core may hold more tokens than `capacity_tokens`, which counts every plane.
        tokens = self.capacity_tokens * (2 if self.layout.aliases else 1)
        num_pages = min(-(-tokens // size) + num_slots, (num_slots - 1) * -(-max_len // size))
        return OuterPool(config, SlotPages(num_slots, 1, max_len, size, num_pages), dtype, device)

    @property
    def _pools(self) -> tuple[Pool, ...]:
        return (self.core,) if self.outer is None else (self.core, self.outer)

    # Admission.

    def fits(self, max_len: int) -> bool:
        """Whether a sequence that may grow to `max_len` tokens fits into the empty pool."""
        return all(pool.pages.pages_for(stored(max_len)) <= pool.pages.pages.num_pages for pool in self._pools)

    def can_admit(self, max_len: int, idle: bool) -> bool:
        for pool in self._pools:
            pages = pool.pages.pages
            spare = 0 if idle else int(self.headroom * pages.num_pages)
            if pages.available - pool.pages.pages_for(stored(max_len)) < spare:
                return False
        return True

    def reserve(self, slot: int, max_len: int) -> None:
        for pool in self._pools:
            pool.pages.reserve(slot, stored(max_len))

    def release(self, slot: int) -> None:
        for pool in self._pools:
            pages = pool.pages.release(slot)
            if self._poison:
                pool.poison(pages)

    # Tokens of admitted sequences.

    def cover_prompt(self, slot: int, start: int, stop: int) -> None:
        """Pages for prompt tokens `start` to `stop`, every plane."""
        for pool in self._pools:
            pool.pages.cover(slot, start, stop)
        self._count(stop - start, (stop - start) * self.core.pages.num_planes)

    def cover_token(self, slot: int, position: int) -> None:
        """Pages for one new token; where planes are aliased the core's come loop step by loop step (`open_planes`)."""
        for pool in self._pools:
            if pool is self.core and self.layout.aliases:
                continue
            pool.pages.cover(slot, position, position + 1)
        self._count(1, 0 if self.layout.aliases else self.core.pages.num_planes)

    def open_planes(self, slots: Ints, positions: Ints, steps: Ints) -> None:
        """Before a core step: a page for the plane that each token writes, where planes get theirs on demand."""
        if self.layout.aliases:
            self.core.pages.open(slots, steps - 1, positions)

    def close(self, slots: Ints, positions: Ints, depths: Ints) -> None:
        """After a core step: fill the planes that tokens which exit after `depths` steps never wrote."""
        if self.layout.aliases:
            self.core.pages.alias(slots, positions, depths)
            self._count(0, int(depths.sum()))
            return
        src, dst = self._missing(slots, positions, depths)
        if len(src):
            device = self.core.data.device
            self.core.data[:, torch.from_numpy(dst).to(device)] = self.core.data[:, torch.from_numpy(src).to(device)]

    def _missing(self, slots: Ints, positions: Ints, depths: Ints) -> tuple[np.ndarray, np.ndarray]:
        """(source row, destination row) of every plane to copy."""
        table, size = self.core.pages.table, self.page_size
        blocks, offsets = positions // size, (positions % size).astype(np.int64)
        src: list[np.ndarray] = []
        dst: list[np.ndarray] = []
        for depth in np.unique(depths):
            at = depths == depth
            for plane, source in self.layout.missing_planes(int(depth), self.max_loops):
                src.append(table[slots[at], source, blocks[at]] * np.int64(size) + offsets[at])
                dst.append(table[slots[at], plane, blocks[at]] * np.int64(size) + offsets[at])
        none = np.zeros(0, dtype=np.int64)
        return (np.concatenate(src), np.concatenate(dst)) if src else (none, none)

    def flush(self) -> None:
        for pool in self._pools:
            pool.flush()

    def _count(self, tokens: int, rows: int) -> None:
        self.tokens += tokens
        self.rows += rows

    def usage(self) -> KVUsage:
        pages = self.core.pages.pages
        return KVUsage(
            num_pages=pages.num_pages,
            page_size=self.page_size,
            pages_in_use=pages.in_use,
            peak_pages=pages.peak,
            capacity_tokens=self.capacity_tokens,
            bytes_per_token=self.bytes_per_token,
            rows=self.rows,
            full_rows=self.tokens * self.max_loops,
        )


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


def _num_pages(
    page_size: int, planes: int, bytes_per_token: int, num_seqs: int, max_len: int, device: torch.device
) -> int:
    """Core pages for `num_seqs` sequences of `max_len` tokens, or as many as the free memory allows."""
    budget = int(_free_bytes(device) * POOL_SHARE.get(device.type, 0.5))
    if device.type == "cpu":
        budget = min(budget, CPU_POOL_BYTES)
    blocks = min(num_seqs * -(-max_len // page_size), budget // (bytes_per_token * page_size))
    if blocks < 1:
        raise LoopedError(
            f"there is not enough free memory for KV pages ({bytes_per_token} bytes a token): lower max_num_seqs, or "
            "give num_pages"
        )
    return blocks * planes


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return CPU_POOL_BYTES * 2
