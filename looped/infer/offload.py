"""A sequence's K/V on the host: taken out of the pools at a preemption, and put back exactly.

Both directions may wait for the device.
"""

# P planes, B blocks, L layers, N pages

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from looped.infer.allocator import Ints
from looped.infer.pool import Pool


@dataclass(frozen=True)
class SavedPages:
    """The pages of one pool that hold a sequence's tokens. `index_PB` says which of the N pages is plane by block, from
    1, with 0 where there is none; planes that share a page share its number. `data_LN` is [L, N * page_size, 2, H, K]
    in pinned memory, where there is a GPU."""

    index_PB: Ints
    data_LN: Tensor

    @property
    def num_pages(self) -> int:
        return int(self.index_PB.max(initial=0))

    @property
    def num_bytes(self) -> int:
        return self.data_LN.numel() * self.data_LN.element_size()


@dataclass(frozen=True)
class SavedKV:
    """All of a sequence's K/V: `num_tokens` positions, of which the first `num_complete` have all their planes; the
    token behind them was in the loop."""

    num_tokens: int
    num_complete: int
    pools: tuple[SavedPages, ...]

    @property
    def num_bytes(self) -> int:
        """Host memory it takes."""
        return sum(saved.num_bytes for saved in self.pools)


def save_pages(pool: Pool, slot: int, num_tokens: int) -> SavedPages:
    """Copy the pages of a slot's first `num_tokens` tokens to the host, as the device's table has them."""
    blocks = pool.pages.blocks_for(num_tokens)
    pages, index = np.unique(pool.table_SPB[slot, :, :blocks].cpu().numpy(), return_inverse=True)
    index = index.reshape(-1, blocks)
    if len(pages) and pages[0] == 0:
        pages = pages[1:]
    else:
        index = index + 1
    shape = (pool.data.shape[0], len(pages) * pool.page_size, *pool.data.shape[2:])
    on_gpu = pool.data.device.type == "cuda"
    data = torch.empty(shape, dtype=pool.data.dtype, pin_memory=on_gpu)
    rows = pool.rows_of(pages)
    # Layer by layer, so that the copy on the device stays small.
    for target, layer in zip(data, pool.data, strict=True):
        target.copy_(layer.index_select(0, rows), non_blocking=True)
    if on_gpu:
        torch.cuda.current_stream(pool.data.device).synchronize()
    return SavedPages(index.astype(np.int32), data)


def load_pages(pool: Pool, saved: SavedPages, pages: Ints) -> None:
    """Write saved K/V to fresh pages, in the order of their numbers."""
    rows = pool.rows_of(pages)
    for source, layer in zip(saved.data_LN, pool.data, strict=True):
        layer.index_copy_(0, rows, source.to(layer.device, non_blocking=True))
