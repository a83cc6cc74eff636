"""K/V tensors on the device and the tables that find a token in them.

All tables are views of one flat int32 tensor, so that what the host wrote since the last launch goes over in one
transfer.
"""

# S slots, P planes, N rows, H key/value heads, K head dim, C pages of a ring

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from looped.config import ModelConfig
from looped.infer.allocator import Ints, SlotPages, Writes
from looped.infer.ragged import RaggedPages
from looped.infer.sizing import allocate
from looped.infer.transfer import upload


class Pool:
    """K/V of some layers and the table that finds a slot's tokens in it.

    `data[layer]` is [pages * page_size, 2, H, K]: K and V of one token are neighbours, so one gather fetches both.
    """

    def __init__(self, layers: range, pages: SlotPages, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        self.layers = layers
        self.pages = pages
        rows = (pages.pages.num_pages + 1) * pages.page_size
        shape = (len(layers), rows, 2, config.num_kv_heads, config.head_dim)
        self.data = allocate(shape, dtype, device)
        self.data[:, : pages.page_size] = 0
        self.table_SPB: Tensor = torch.empty(0)

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

    def rows_of(self, pages: Ints) -> Tensor:
        """All rows of some pages, page by page: [pages * page_size] on the device."""
        rows = pages.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        return upload(rows.reshape(-1), torch.long, self.data.device)

    def fill(self, pages: Ints, value: float) -> None:
        """Overwrite pages with one value."""
        if len(pages):
            self.data.index_fill_(1, self.rows_of(pages), value)


class OuterPool(Pool):
    """K/V of the layers before and after the core, in one table with a single plane."""

    def __init__(self, config: ModelConfig, pages: SlotPages, dtype: torch.dtype, device: torch.device):
        super().__init__(range(config.num_prelude_layers + config.num_coda_layers), pages, config, dtype, device)
        self._core = config.core_layers

    def layer(self, layer: int) -> Tensor:
        return self.data[layer if layer < self._core.start else layer - len(self._core)]


class Tables:
    """The page tables of all pools, and of a ragged core its rings, in one tensor on the device.

    `ring_SC[slot]` holds spare pages, of which the slot has taken `taken_S[slot]` so far, in turn; slot 0's are page 0.
    """

    def __init__(self, pools: Sequence[Pool], device: torch.device) -> None:
        self.writes = Writes()
        self.ring_SC: Tensor | None = None
        self.taken_S: Tensor | None = None
        core = pools[0].pages
        num_slots = core.table.shape[0]
        shapes: list[tuple[int, ...]] = [pool.pages.table.shape for pool in pools]
        if isinstance(core, RaggedPages):
            shapes.append((num_slots, core.ring_size))
        sizes = [int(np.prod(shape)) for shape in shapes]
        starts = np.cumsum([0, *sizes]).tolist()
        self._flat = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        views = [
            self._flat[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]
        for pool, view, start in zip(pools, views, starts, strict=False):
            pool.table_SPB = view
            pool.pages.base, pool.pages.writes = start, self.writes
        if isinstance(core, RaggedPages):
            self.ring_SC, core.ring_base = views[-1], starts[len(pools)]
            self.taken_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
            views = [*views, self.taken_S]
        self._cleared = views

    def flush(self) -> None:
        """Send what waits, in stream order and in one transfer, without waiting for the device."""
        if not self.writes:
            return
        cleared, index, values = self.writes.drain()
        packed = np.concatenate((cleared, index, values.astype(np.int64)))
        sent = upload(packed, torch.long, self._flat.device)
        if len(cleared):
            for view in self._cleared:
                view.index_fill_(0, sent[: len(cleared)], 0)
        if len(index):
            at, value = sent[len(cleared) :].view(2, -1)
            self._flat.index_copy_(0, at, value.int())
