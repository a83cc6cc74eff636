"""Causal attention of packed pieces of prompts over the paged pool: a tile of queries against blocks of keys.

K/V of the whole batch are in the pool before this runs. Rows carry their own positions, which may leave holes; every
key up to a row's position counts, whether its token is in the batch or was stored earlier.
"""

# N rows, G key/value heads, Q query heads of a group, M queries of a tile (tokens x Q), B keys of a block, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.base import PrefillBatch
from looped.infer.backends.kernels.lookup import accumulator, padded, pool_rows, rows_apart


@triton.jit
def _attend(
    top_M, sum_M, acc_MK, q_MK, at_M, entry, kv_k, kv_v, start, stop, MASKED: tl.constexpr, NEVER: tl.constexpr,
    SCALE: tl.constexpr, ROW: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys from `start` to `stop`; without MASKED, every row sees all of them."""
    dims = tl.arange(0, PADDED)
    for block in tl.range(start, stop, BLOCK, num_stages=STAGES):
        keys = block + tl.arange(0, BLOCK)
        inside = keys < stop
        at = pool_rows(entry, keys, inside, PAGE)[:, None] * ROW + dims[None, :]
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(kv_k + at, mask=mask, other=0.0)
        v = tl.load(kv_v + at, mask=mask, other=0.0)
        score_MB = tl.dot(q_MK, tl.trans(k), input_precision="ieee").to(ACC) * SCALE
        if MASKED:
            score_MB = tl.where(keys[None, :] <= at_M[:, None], score_MB, NEVER)
        new_M = tl.maximum(top_M, tl.max(score_MB, 1))
        keep_M = tl.exp2(top_M - new_M)
        weight_MB = tl.exp2(score_MB - new_M[:, None])
        sum_M = sum_M * keep_M + tl.sum(weight_MB, 1)
        acc_MK = acc_MK * keep_M[:, None] + tl.dot(weight_MB.to(v.dtype), v, input_precision="ieee").to(ACC)
        top_M = new_M
    return top_M, sum_M, acc_MK


@triton.jit(do_not_specialize=["plane"])
def _prefill(
    out, q_ptr, kv, table, slots, positions, tiles, plane,
    q_row, q_head, table_slot, table_plane,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G)."""
    NEVER: tl.constexpr = -1.0e30  # below every score; finite, so that differences of two are numbers
    ROW: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    first = tl.load(tiles + tl.program_id(0) * 2).to(tl.int64)
    num_tokens = tl.load(tiles + tl.program_id(0) * 2 + 1)
    if num_tokens == 0:
        return
    kv_head = tl.program_id(1)
    entry = table + tl.load(slots + first) * table_slot + plane * table_plane
    queries = tl.arange(0, QUERIES)
    tokens = queries // GROUP
    inside_M = tokens < num_tokens
    rows = first + tokens
    heads = kv_head * GROUP + queries % GROUP
    dims = tl.arange(0, PADDED)
    mask = inside_M[:, None] & (dims < HEAD_DIM)[None, :]
    at_M = tl.load(positions + rows, mask=inside_M, other=0).to(tl.int32)
    q_MK = tl.load(q_ptr + (rows * q_row + heads * q_head)[:, None] + dims[None, :], mask=mask, other=0.0)
    top_M = tl.full((QUERIES,), NEVER, dtype=ACC)
    sum_M = tl.zeros((QUERIES,), dtype=ACC)
    acc_MK = tl.zeros((QUERIES, PADDED), dtype=ACC)
    kv_k = kv + kv_head * HEAD_DIM
    kv_v = kv_k + KV_HEADS * HEAD_DIM
    # Whole blocks that every row sees, then those where the rows differ.
    shared = (tl.load(positions + first).to(tl.int32) + 1) // BLOCK * BLOCK
    stop = tl.load(positions + first + num_tokens - 1).to(tl.int32) + 1
    top_M, sum_M, acc_MK = _attend(
        top_M, sum_M, acc_MK, q_MK, at_M, entry, kv_k, kv_v, 0, shared, False, NEVER,
        SCALE, ROW, HEAD_DIM, PADDED, PAGE, BLOCK, STAGES, ACC,
    )  # fmt: skip
    top_M, sum_M, acc_MK = _attend(
        top_M, sum_M, acc_MK, q_MK, at_M, entry, kv_k, kv_v, shared, stop, True, NEVER,
        SCALE, ROW, HEAD_DIM, PADDED, PAGE, BLOCK, STAGES, ACC,
    )  # fmt: skip
    at = ((rows * (KV_HEADS * GROUP) + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(out + at, acc_MK / sum_M[:, None], mask=mask)


class Tiles:
    """Which rows each tile of queries holds, for a packed batch; made on the device, once a batch, for all layers.

    How many tiles there are, and their size, follows from the numbers of rows and of places for pieces; tiles beyond
    those that the pieces need have no rows.
    """

    def __init__(self, batch: PrefillBatch, group: int, head_dim: int, dtype: torch.dtype):
        num_rows, starts = len(batch.slots), batch.starts_B1
        self.launch = tile_launch(num_rows * group, group, head_dim, dtype)
        size = self.launch.queries // group
        lens = starts.diff()
        counts = (lens + (size - 1)) // size
        stops = counts.cumsum(0)
        tile = torch.arange(num_rows // size + len(lens), device=starts.device)
        piece = torch.searchsorted(stops, tile, right=True).clamp_(max=len(lens) - 1)
        first = starts[piece] + (tile - (stops - counts)[piece]) * size
        there = tile < stops[-1]
        count = torch.where(there, (starts[1:][piece] - first).clamp(max=size), 0)
        first = torch.where(there, first, 0)
        # Tiles that read the most keys start first, so that none of them is the last to run.
        order = torch.where(there, batch.positions[first], -1).argsort(descending=True, stable=True)
        self.rows_T2 = torch.stack((first, count), 1).index_select(0, order).int()


class TileLaunch(NamedTuple):
    """Sizes of a launch: queries of a tile (tokens times query heads of a group), keys of a block, warps, stages."""

    queries: int
    block: int
    num_warps: int
    num_stages: int


def tile_launch(num_queries: int, group: int, head_dim: int, dtype: torch.dtype) -> TileLaunch:
    """Sizes for a batch of `num_queries` queries a KV head. Only a few different ones: each is compiled once."""
    width = padded(head_dim, least=16)
    if dtype.itemsize > 2:  # true float32 products are done outside the matrix units: small tiles
        queries, block, warps, stages = 32, 32 if width * dtype.itemsize < 512 else 16, 8, 2
    elif num_queries <= 32:
        queries, block, warps, stages = 32, 64, 4, 2
    elif width <= 128:
        queries, block, warps, stages = 128, 64, 8, 3
    else:
        queries, block, warps, stages = 64, 64, 4, 2
    return TileLaunch(max(queries, padded(group)), block, warps, stages)


def prefill_pieces(
    kv: Tensor,
    table_SPB: Tensor,
    page_size: int,
    slots_N: Tensor,
    positions_N: Tensor,
    tiles: Tiles,
    plane: int,
    q_NHK: Tensor,
) -> Tensor:
    """Attention of packed rows to the keys in `kv` [rows, 2, G, K] up to their own: [N, H, K] to [N, H, K]."""
    q_NHK = rows_apart(q_NHK)
    num_rows, heads, head_dim = q_NHK.shape
    kv_heads, launch = kv.shape[2], tiles.launch
    out_NHK = torch.empty((num_rows, heads, head_dim), dtype=q_NHK.dtype, device=q_NHK.device)
    _prefill[(tiles.rows_T2.shape[0], kv_heads)](
        out_NHK, q_NHK, kv, table_SPB, slots_N, positions_N, tiles.rows_T2, plane,
        *q_NHK.stride()[:2], *table_SPB.stride()[:2],
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, PADDED=padded(head_dim, least=16),
        PAGE=page_size, SCALE=math.log2(math.e) * head_dim**-0.5, QUERIES=launch.queries, BLOCK=launch.block,
        STAGES=launch.num_stages, ACC=accumulator(kv.dtype), num_warps=launch.num_warps,
    )  # fmt: skip
    return out_NHK
