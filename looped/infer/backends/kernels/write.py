"""New K/V of some tokens into the rows of the pool that the page table names."""

# N rows, G key/value heads, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.lookup import padded, pool_row, rows_apart

BLOCK = 1024


@triton.jit
def _write(
    kv, k_new, v_new, table, slots, planes, positions,
    k_row, k_head, v_row, v_head, table_slot, table_plane,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of a token's K)."""
    row = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(slots + row) * table_slot + tl.load(planes + row) * table_plane
    target = kv + pool_row(entry, tl.load(positions + row), PAGE) * (2 * KV_HEADS * HEAD_DIM)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < KV_HEADS * HEAD_DIM
    head, dim = at // HEAD_DIM, at % HEAD_DIM
    k = tl.load(k_new + row * k_row + head * k_head + dim, mask=inside)
    v = tl.load(v_new + row * v_row + head * v_head + dim, mask=inside)
    tl.store(target + at, k, mask=inside)
    tl.store(target + KV_HEADS * HEAD_DIM + at, v, mask=inside)


def write_kv(
    kv: Tensor,
    table_SPB: Tensor,
    page_size: int,
    slots_N: Tensor,
    planes_N: Tensor,
    positions_N: Tensor,
    k_NGK: Tensor,
    v_NGK: Tensor,
) -> None:
    """Store K/V of N tokens in `kv` [rows, 2, G, K], one layer of a pool. Padding rows may all name one place."""
    k_NGK, v_NGK = rows_apart(k_NGK), rows_apart(v_NGK)
    num_rows, kv_heads, head_dim = k_NGK.shape
    block = min(padded(kv_heads * head_dim), BLOCK)
    grid = (num_rows, -(-kv_heads * head_dim // block))
    _write[grid](
        kv, k_NGK, v_NGK, table_SPB, slots_N, planes_N, positions_N,
        *k_NGK.stride()[:2], *v_NGK.stride()[:2], *table_SPB.stride()[:2],
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page_size, BLOCK=block, num_warps=4,
    )  # fmt: skip
