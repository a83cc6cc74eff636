"""Paged decode attention where several query heads share K/V: one matrix product a block of keys for the whole group.

The queries of a group are padded to the 16 rows that a matrix unit takes; K/V are read once for all of them.
"""

# N rows, G key/value heads, Q query heads of a group, S splits, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.base import DecodeBatch
from looped.infer.backends.kernels.lookup import accumulator, padded, pool_row, pool_rows, rows_apart
from looped.infer.backends.kernels.splits import Scratch, last_to_arrive, listed_split, next_item, split_keys
from looped.model.kernels.launch import after_previous, launch_options


@triton.jit
def _one_split(
    entry, kv_k, kv_v, q_QK, start, stop, inside_K, NEVER: tl.constexpr, SCALE: tl.constexpr,
    ROW: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Maximum [Q], sum of weights [Q] and weighted V [Q, K] of the keys from `start` to `stop`."""
    dims = tl.arange(0, PADDED)
    lanes = tl.arange(0, BLOCK)
    top_Q = tl.full((ROWS,), NEVER, dtype=ACC)
    sum_Q = tl.zeros((ROWS,), dtype=ACC)
    acc_QK = tl.zeros((ROWS, PADDED), dtype=ACC)
    for block in tl.range(start, stop, BLOCK, num_stages=STAGES):
        keys = block + lanes
        inside = keys < stop
        at = pool_rows(entry, keys, inside, PAGE)[:, None] * ROW + dims[None, :]
        mask = inside[:, None] & inside_K[None, :]
        k = tl.load(kv_k + at, mask=mask, other=0.0)
        v = tl.load(kv_v + at, mask=mask, other=0.0)
        score_QB = tl.dot(q_QK, tl.trans(k), input_precision="ieee").to(ACC) * SCALE
        score_QB = tl.where(inside[None, :], score_QB, NEVER)
        new_Q = tl.maximum(top_Q, tl.max(score_QB, 1))
        keep_Q = tl.exp2(top_Q - new_Q)
        weight_QB = tl.exp2(score_QB - new_Q[:, None])
        sum_Q = sum_Q * keep_Q + tl.sum(weight_QB, 1)
        acc_QK = acc_QK * keep_Q[:, None] + tl.dot(weight_QB.to(v.dtype), v, input_precision="ieee").to(ACC)
        top_Q = new_Q
    return top_Q, sum_Q, acc_QK


@triton.jit(do_not_specialize=["num_splits"])
def _decode(
    out, q_ptr, k_new, v_new, kv, table, slots, planes, positions,
    items, num_items, taken, scratch_acc, scratch_stats, arrived,
    q_row, q_head, k_row, k_head, v_row, v_head, table_slot, table_plane, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, SCALE: tl.constexpr, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs take the batch's splits one after another, KV head by KV head."""
    after_previous(OVERLAP)
    NEVER: tl.constexpr = -1.0e30  # below every score; finite, so that differences of two are numbers
    ROW: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    dims = tl.arange(0, PADDED)
    inside_K = dims < HEAD_DIM
    members = tl.arange(0, ROWS)
    inside_Q = members < GROUP
    mask_QK = inside_Q[:, None] & inside_K[None, :]
    left = tl.load(num_items) * KV_HEADS
    item = tl.program_id(0)
    while item < left:
        following = next_item(taken, left)
        kv_head = item % KV_HEADS
        row, split = listed_split(items, item // KV_HEADS)
        position = tl.load(positions + row).to(tl.int32)
        entry = table + tl.load(slots + row) * table_slot + tl.load(planes + row) * table_plane
        heads = kv_head * GROUP + members
        q_at = row * q_row + heads[:, None] * q_head + dims[None, :]
        q_QK = tl.load(q_ptr + q_at, mask=mask_QK, other=0.0)
        k_own = tl.load(k_new + row * k_row + kv_head * k_head + dims, mask=inside_K, other=0.0)
        v_own = tl.load(v_new + row * v_row + kv_head * v_head + dims, mask=inside_K, other=0.0)
        kv_k = kv + kv_head * HEAD_DIM
        kv_v = kv_k + KV_HEADS * HEAD_DIM
        if split == 0:  # nobody reads the new token's place in this launch
            own = pool_row(entry, position, PAGE) * ROW + dims
            tl.store(kv_k + own, k_own, mask=inside_K)
            tl.store(kv_v + own, v_own, mask=inside_K)
        each = split_keys(position, SPLIT_KEYS, MAX_SPLITS)
        used = tl.maximum(tl.cdiv(position, each), 1)
        part_top, part_sum, part_QK = _one_split(
            entry, kv_k, kv_v, q_QK, split * each, tl.minimum(split * each + each, position), inside_K, NEVER, SCALE,
            ROW, ROWS, PADDED, PAGE, BLOCK, STAGES, ACC,
        )  # fmt: skip
        # The new token itself is where folding starts.
        top_Q = tl.sum(q_QK.to(ACC) * k_own.to(ACC)[None, :], 1) * SCALE
        sum_Q = tl.full((ROWS,), 1.0, dtype=ACC)
        acc_QK = tl.zeros((ROWS, PADDED), dtype=ACC) + v_own.to(ACC)[None, :]
        line_Q = row * (KV_HEADS * GROUP) + heads
        out_at = line_Q[:, None] * HEAD_DIM + dims[None, :]
        if used == 1:
            new_Q = tl.maximum(top_Q, part_top)
            keep_Q, weight_Q = tl.exp2(top_Q - new_Q), tl.exp2(part_top - new_Q)
            sum_Q = sum_Q * keep_Q + part_sum * weight_Q
            acc_QK = acc_QK * keep_Q[:, None] + part_QK * weight_Q[:, None]
            tl.store(out + out_at, acc_QK / sum_Q[:, None], mask=mask_QK)
        else:
            part_Q = line_Q * num_splits + split
            tl.store(scratch_acc + part_Q[:, None] * HEAD_DIM + dims[None, :], part_QK, mask=mask_QK)
            tl.store(scratch_stats + part_Q * 2, part_top, mask=inside_Q)
            tl.store(scratch_stats + part_Q * 2 + 1, part_sum, mask=inside_Q)
            if last_to_arrive(arrived + row * (KV_HEADS * GROUP) + kv_head, used):
                for other in tl.range(0, used, num_stages=3):
                    part_Q = line_Q * num_splits + other
                    stats = scratch_stats + part_Q * 2
                    part_top = tl.load(stats, mask=inside_Q, other=0.0, cache_modifier=".cg")
                    part_sum = tl.load(stats + 1, mask=inside_Q, other=0.0, cache_modifier=".cg")
                    part_QK = tl.load(
                        scratch_acc + part_Q[:, None] * HEAD_DIM + dims[None, :],
                        mask=mask_QK, other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new_Q = tl.maximum(top_Q, part_top)
                    keep_Q, weight_Q = tl.exp2(top_Q - new_Q), tl.exp2(part_top - new_Q)
                    sum_Q = sum_Q * keep_Q + part_sum * weight_Q
                    acc_QK = acc_QK * keep_Q[:, None] + part_QK * weight_Q[:, None]
                    top_Q = new_Q
                tl.store(out + out_at, acc_QK / sum_Q[:, None], mask=mask_QK)
        item = following


def decode_groups(
    kv: Tensor,
    table_SPB: Tensor,
    page_size: int,
    batch: DecodeBatch,
    scratch: Scratch,
    q_NHK: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
    block: int | None = None,
    num_stages: int = 2,
    num_warps: int = 4,
) -> Tensor:
    """Store K/V of one new token a row in `kv` [rows, 2, G, K] and attend to it and all earlier ones: [N, H, K].

    `block`, `num_stages` and `num_warps` are the launch's; the defaults are meant for Hopper.
    """
    q_NHK, k_NGK, v_NGK = rows_apart(q_NHK), rows_apart(k_NGK), rows_apart(v_NGK)
    num_rows, heads, head_dim = q_NHK.shape
    kv_heads = k_NGK.shape[1]
    out_NHK = torch.empty((num_rows, heads, head_dim), dtype=q_NHK.dtype, device=q_NHK.device)
    width = padded(head_dim, least=16)
    _decode[(scratch.num_programs,)](
        out_NHK, q_NHK, k_NGK, v_NGK, kv, table_SPB, batch.slots, batch.planes, batch.positions,
        scratch.items, scratch.num_items, scratch.taken, scratch.acc, scratch.stats, scratch.arrived,
        *q_NHK.stride()[:2], *k_NGK.stride()[:2], *v_NGK.stride()[:2], *table_SPB.stride()[:2], scratch.num_splits,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, ROWS=padded(heads // kv_heads, least=16), HEAD_DIM=head_dim,
        PADDED=width, PAGE=page_size, SCALE=math.log2(math.e) * head_dim**-0.5, SPLIT_KEYS=scratch.split_keys,
        MAX_SPLITS=scratch.max_splits, BLOCK=block or block_keys(width, kv.dtype), STAGES=num_stages,
        ACC=accumulator(kv.dtype), num_warps=num_warps, **launch_options(kv.device),
    )  # fmt: skip
    return out_NHK


def block_keys(width: int, dtype: torch.dtype) -> int:
    """Keys of a block: 16 KiB of K, so that a few blocks of K and V fit the shared memory."""
    return min(max(16384 // (width * dtype.itemsize), 16), 64)
