"""Planes that a token never wrote, filled with its last one (layouts that copy: `last-exited`, and the like)."""

# N rows, P planes
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.lookup import padded, pool_row
from looped.infer.pool import Pool

BLOCK = 2048


@triton.jit
def _copy(
    data, table, slots, positions, depths, leaving, layer_stride, table_slot, table_plane,
    NUM_PLANES: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, layers, blocks of a token's K/V). Programs of rows that stay return at once."""
    row = tl.program_id(0)
    depth = tl.load(depths + row).to(tl.int32)
    if (tl.load(leaving + row) != 0) & (depth < NUM_PLANES):
        position = tl.load(positions + row)
        entry = table + tl.load(slots + row) * table_slot
        layer = data + tl.program_id(1).to(tl.int64) * layer_stride
        at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = at < WIDTH
        source = pool_row(entry + (depth - 1) * table_plane, position, PAGE)
        values = tl.load(layer + source * WIDTH + at, mask=inside)
        for plane in range(depth, NUM_PLANES):
            target = pool_row(entry + plane * table_plane, position, PAGE)
            tl.store(layer + target * WIDTH + at, values, mask=inside)


def copy_planes(
    pool: Pool, at_N: Tensor, positions_N: Tensor, depths_N: Tensor, leaving_N: Tensor, num_planes: int
) -> None:
    """For rows with `leaving_N` (bool), copy plane depth - 1 of (slot, position) to planes depth..P-1, all layers.

    That is what `KVLayout.missing_planes` says for every layout. Slots, positions and depths are int64 [N]; depths of
    rows that stay are not used. Fixed shapes, no wait for the device: it may be captured in a graph.
    """
    if num_planes < 2:
        return
    data, table = pool.data, pool.table_SPB
    width = data[0, 0].numel()
    block = min(padded(width), BLOCK)
    grid = (at_N.shape[0], data.shape[0], -(-width // block))
    _copy[grid](
        data, table, at_N, positions_N, depths_N, leaving_N, data.stride(0), *table.stride()[:2],
        NUM_PLANES=num_planes, WIDTH=width, PAGE=pool.page_size, BLOCK=block, num_warps=8,
    )  # fmt: skip
