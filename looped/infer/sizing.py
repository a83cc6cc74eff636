"""How many pages the K/V pools get: from the free memory, or as told. Every refusal says what to lower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.sampling import BYTES_PER_LOGIT, SEEN_BYTES

# On a CPU the pools are never larger than this unless `num_pages` asks for it: pages take memory only once touched.
CPU_POOL_BYTES = 2 << 30
# Share of the free memory that the pools may take, once what batches need is set aside.
POOL_SHARE = {"cpu": 0.5, "cuda": 0.92}
# CUDA graphs and the libraries' workspaces.
GPU_RESERVE_BYTES = 1 << 30
# A ragged core holds the more tokens the earlier they leave. Where memory decides, the pool of the layers outside has
# room for twice `capacity_tokens`: enough down to a mean of half the loops.
OUTER_FACTOR = 2
DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True)
class Demand:
    """What the pools are for: `num_seqs` sequences of up to `max_len` tokens in core pages of `page_size`; a token
    takes `core_bytes` in all its `planes` and `outer_bytes` in the layers outside the core."""

    num_seqs: int
    max_len: int
    page_size: int
    planes: int
    core_bytes: int
    outer_bytes: int
    aliases: bool
    caching: bool
    """Pages beyond what the sequences need are of use: a prefix cache fills them."""

    @property
    def outer_page_size(self) -> int:
        return DEFAULT_PAGE_SIZE if self.aliases else self.page_size


@dataclass(frozen=True)
class PoolSizes:
    """Pages of the core's pool and of the one for the layers outside it (0 without any); `capacity_tokens` tokens fit
    with every plane of their own."""

    core_pages: int
    outer_pages: int
    capacity_tokens: int


def size_pools(demand: Demand, device: torch.device, num_pages: int | None, reserve_bytes: int) -> PoolSizes:
    """As many pages as the sequences can use, or as the free memory less `reserve_bytes` allows; with `num_pages`,
    that many core pages. Raises `LoopedError` where there is no room for one block, or for the pages asked for."""
    if num_pages is not None:
        if num_pages < demand.planes:
            raise LoopedError(f"num_pages must be at least {demand.planes} (one page a plane), got {num_pages}")
        free, size = free_bytes(device), num_pages * demand.page_size * demand.core_bytes // demand.planes
        if size > free:  # known before anything of that size is made
            raise LoopedError(
                f"a KV pool of {size / 2**20:.0f} MiB does not fit into the {free / 2**20:.0f} MiB that are free on "
                f"{device}; lower num_pages"
            )
        blocks, bounded = num_pages // demand.planes, False
    else:
        blocks, bounded = _blocks(demand, device, reserve_bytes)
        num_pages = blocks * demand.planes
    capacity = blocks * demand.page_size
    if not demand.outer_bytes:
        return PoolSizes(num_pages, 0, capacity)
    tokens = capacity
    if demand.aliases:
        tokens = capacity * min(OUTER_FACTOR, demand.planes) if bounded else num_pages
    # Each sequence may leave its last page nearly empty.
    pages = -(-tokens // demand.outer_page_size) + demand.num_seqs
    if not demand.caching:
        pages = min(pages, demand.num_seqs * -(-demand.max_len // demand.outer_page_size))
    return PoolSizes(num_pages, pages, capacity)


def _blocks(demand: Demand, device: torch.device, reserve_bytes: int) -> tuple[int, bool]:
    """(blocks in every plane, whether memory rather than need set their number)."""
    free = free_bytes(device)
    budget = int((free - reserve_bytes) * POOL_SHARE.get(device.type, 0.5))
    if device.type == "cpu":
        budget = min(budget, CPU_POOL_BYTES)
    factor = min(OUTER_FACTOR, demand.planes) if demand.aliases else 1
    block_bytes = demand.page_size * (demand.core_bytes + factor * demand.outer_bytes)
    budget -= demand.num_seqs * demand.outer_page_size * demand.outer_bytes
    affordable = max(0, budget) // block_bytes
    wanted = demand.num_seqs * -(-demand.max_len // demand.page_size)
    if demand.caching:
        wanted = affordable if device.type == "cuda" else 4 * wanted
    blocks = min(wanted, affordable)
    if blocks < 1:
        raise LoopedError(
            f"there is not enough free memory for KV pages: {free / 2**20:.0f} MiB free on {device}, of which "
            f"{reserve_bytes / 2**20:.0f} MiB are kept for batches, and a token takes "
            f"{demand.core_bytes + demand.outer_bytes} bytes; lower max_num_seqs or max_num_batched_tokens, or give "
            "num_pages"
        )
    return blocks, blocks < wanted


def activation_bytes(
    config: ModelConfig, num_tokens: int, num_seqs: int, dtype: torch.dtype, graphs: bool = False
) -> int:
    """What the largest batches hold besides weights and K/V: a prefill of `num_tokens`, logits of `num_seqs` drawn
    from at the highest level, and what that level keeps of the tokens that occurred. CUDA
    graphs keep the memory of the largest one to themselves, so that others take as much again."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = (6 * config.hidden_size + 3 * config.intermediate_size + 2 * heads) * dtype.itemsize
    # Logits in the model's dtype, and what a draw makes of them.
    row = config.vocab_size * (dtype.itemsize + BYTES_PER_LOGIT)
    return (1 + graphs) * (num_tokens * token + num_seqs * row) + num_seqs * config.vocab_size * SEEN_BYTES


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now, what PyTorch's allocator holds unused included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return CPU_POOL_BYTES * 2


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """K/V: zeros on a GPU, where a library may read a last page whole and NaN times 0 is NaN; uninitialised on a CPU,
    where a page takes memory once it is touched. Raises `LoopedError` where it does not fit."""
    try:
        make = torch.empty if device.type == "cpu" else torch.zeros
        return make(shape, dtype=dtype, device=device)
    except (MemoryError, RuntimeError) as error:
        size = dtype.itemsize * float(torch.Size(shape).numel()) / 2**20
        raise LoopedError(
            f"a KV pool of {size:.0f} MiB does not fit into the memory of {device}; lower num_pages, or max_num_seqs "
            "where it is not given"
        ) from error
