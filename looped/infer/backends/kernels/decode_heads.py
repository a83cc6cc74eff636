"""Paged decode attention where every query head has K/V of its own: vector arithmetic.

One query has nothing for a matrix unit to do. Each of BLOCK lanes runs a softmax of its own over every BLOCK-th key, so
that nothing crosses lanes inside the loop; they are joined once a split.
"""

# N rows, H heads, S splits, K head dim
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

# Rows times heads below which programs are large, and from which they are single warps.
FEW, MANY = 128, 512


@triton.jit
def _one_split(
    entry, kv_k, kv_v, q, start, stop, inside_K, NEVER: tl.constexpr,
    ROW: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights and weighted V [K] of the keys from `start` to `stop`."""
    dims = tl.arange(0, PADDED)
    lanes = tl.arange(0, BLOCK)
    top_B = tl.full((BLOCK,), NEVER, dtype=ACC)
    sum_B = tl.zeros((BLOCK,), dtype=ACC)
    acc_BK = tl.zeros((BLOCK, PADDED), dtype=ACC)
    for block in tl.range(start, stop, BLOCK, num_stages=STAGES):
        keys = block + lanes
        inside = keys < stop
        at = pool_rows(entry, keys, inside, PAGE)[:, None] * ROW + dims[None, :]
        mask = inside[:, None] & inside_K[None, :]
        k = tl.load(kv_k + at, mask=mask, other=0.0)
        v = tl.load(kv_v + at, mask=mask, other=0.0)
        score_B = tl.where(inside, tl.sum(k.to(ACC) * q[None, :], 1), NEVER)
        new_B = tl.maximum(top_B, score_B)
        keep_B, weight_B = tl.exp2(top_B - new_B), tl.exp2(score_B - new_B)
        sum_B = sum_B * keep_B + weight_B
        acc_BK = acc_BK * keep_B[:, None] + v.to(ACC) * weight_B[:, None]
        top_B = new_B
    top = tl.max(top_B, 0)
    weight_B = tl.exp2(top_B - top)
    return top, tl.sum(sum_B * weight_B, 0), tl.sum(acc_BK * weight_B[:, None], 0)


@triton.jit(do_not_specialize=["num_splits"])
def _decode(
    out, q_ptr, k_new, v_new, kv, table, slots, planes, positions,
    items, num_items, taken, scratch_acc, scratch_stats, arrived,
    q_row, q_head, k_row, k_head, v_row, v_head, table_slot, table_plane, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs take the batch's splits one after another, head by head."""
    after_previous(OVERLAP)
    NEVER: tl.constexpr = -1.0e30  # below every score; finite, so that differences of two are numbers
    ROW: tl.constexpr = 2 * HEADS * HEAD_DIM
    dims = tl.arange(0, PADDED)
    inside_K = dims < HEAD_DIM
    left = tl.load(num_items) * HEADS
    item = tl.program_id(0)
    while item < left:
        following = next_item(taken, left)
        head = item % HEADS
        row, split = listed_split(items, item // HEADS)
        position = tl.load(positions + row).to(tl.int32)
        entry = table + tl.load(slots + row) * table_slot + tl.load(planes + row) * table_plane
        q = tl.load(q_ptr + row * q_row + head * q_head + dims, mask=inside_K, other=0.0).to(ACC) * SCALE
        k_own = tl.load(k_new + row * k_row + head * k_head + dims, mask=inside_K, other=0.0)
        v_own = tl.load(v_new + row * v_row + head * v_head + dims, mask=inside_K, other=0.0)
        kv_k = kv + head * HEAD_DIM
        kv_v = kv_k + HEADS * HEAD_DIM
        if split == 0:  # nobody reads the new token's place in this launch
            own = pool_row(entry, position, PAGE) * ROW + dims
            tl.store(kv_k + own, k_own, mask=inside_K)
            tl.store(kv_v + own, v_own, mask=inside_K)
        each = split_keys(position, SPLIT_KEYS, MAX_SPLITS)
        used = tl.maximum(tl.cdiv(position, each), 1)
        part_top, part_sum, part_K = _one_split(
            entry, kv_k, kv_v, q, split * each, tl.minimum(split * each + each, position), inside_K, NEVER,
            ROW, PADDED, PAGE, BLOCK, STAGES, ACC,
        )  # fmt: skip
        # The new token itself is where folding starts.
        top = tl.sum(k_own.to(ACC) * q, 0)
        total = tl.full([], 1.0, dtype=ACC)
        acc_K = v_own.to(ACC)
        out_at = out + (row * HEADS + head) * HEAD_DIM + dims
        if used == 1:
            new = tl.maximum(top, part_top)
            keep, weight = tl.exp2(top - new), tl.exp2(part_top - new)
            total = total * keep + part_sum * weight
            acc_K = acc_K * keep + part_K * weight
            tl.store(out_at, acc_K / total, mask=inside_K)
        else:
            line = (row * HEADS + head) * num_splits
            tl.store(scratch_acc + (line + split) * HEAD_DIM + dims, part_K, mask=inside_K)
            tl.store(scratch_stats + (line + split) * 2, part_top)
            tl.store(scratch_stats + (line + split) * 2 + 1, part_sum)
            if last_to_arrive(arrived + row * HEADS + head, used):
                for first in range(0, used, FOLD):
                    parts = first + tl.arange(0, FOLD)
                    inside = parts < used
                    stats = scratch_stats + (line + parts) * 2
                    tops = tl.load(stats, mask=inside, other=NEVER, cache_modifier=".cg")
                    sums = tl.load(stats + 1, mask=inside, other=0.0, cache_modifier=".cg")
                    accs = tl.load(
                        scratch_acc + (line + parts)[:, None] * HEAD_DIM + dims[None, :],
                        mask=inside[:, None] & inside_K[None, :], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    new = tl.maximum(top, tl.max(tops, 0))
                    keep, weights = tl.exp2(top - new), tl.exp2(tops - new)
                    total = total * keep + tl.sum(sums * weights, 0)
                    acc_K = acc_K * keep + tl.sum(accs * weights[:, None], 0)
                    top = new
                tl.store(out_at, acc_K / total, mask=inside_K)
        item = following


def decode_heads(
    kv: Tensor,
    table_SPB: Tensor,
    page_size: int,
    batch: DecodeBatch,
    scratch: Scratch,
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    block: int | None = None,
    num_stages: int | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """Store K/V of one new token a row in `kv` [rows, 2, H, K] and attend to it and all earlier ones: [N, H, K].

    `block`, `num_stages` and `num_warps` are the launch's; the defaults are meant for Hopper. Larger batches
    take smaller programs, of which more fit beside each other.
    """
    q_NHK, k_NHK, v_NHK = rows_apart(q_NHK), rows_apart(k_NHK), rows_apart(v_NHK)
    num_rows, heads, head_dim = q_NHK.shape
    out_NHK = torch.empty((num_rows, heads, head_dim), dtype=q_NHK.dtype, device=q_NHK.device)
    width = padded(head_dim)
    few, many = num_rows * heads < FEW, num_rows * heads >= MANY
    block = block or block_keys(width, kv.dtype) // (1 if few else 2)
    num_stages, num_warps = num_stages or (2 if few else 3), num_warps or (4 if few else 1 if many else 2)
    _decode[(scratch.num_programs,)](
        out_NHK, q_NHK, k_NHK, v_NHK, kv, table_SPB, batch.slots, batch.planes, batch.positions,
        scratch.items, scratch.num_items, scratch.taken, scratch.acc, scratch.stats, scratch.arrived,
        *q_NHK.stride()[:2], *k_NHK.stride()[:2], *v_NHK.stride()[:2], *table_SPB.stride()[:2], scratch.num_splits,
        HEADS=heads, HEAD_DIM=head_dim, PADDED=width, PAGE=page_size, SCALE=math.log2(math.e) * head_dim**-0.5,
        SPLIT_KEYS=scratch.split_keys, MAX_SPLITS=scratch.max_splits, BLOCK=block,
        FOLD=16, STAGES=num_stages, ACC=accumulator(kv.dtype), num_warps=num_warps, **launch_options(kv.device),
    )  # fmt: skip
    return out_NHK


def block_keys(width: int, dtype: torch.dtype) -> int:
    """Lanes: a lane's output of `width` numbers lies in registers, so 32 lanes for heads of 128."""
    return min(max(4096 * 4 // max(dtype.itemsize, 4) // width, 16), 128)
