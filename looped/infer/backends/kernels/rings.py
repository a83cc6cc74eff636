"""Page tables of a ragged pool, as the device changes them itself: one small kernel where PyTorch takes ten."""

# N rows, S slots, P planes, C pages of a ring
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.lookup import padded

BLOCK = 128


@triton.jit
def _take(
    table, ring, taken, slots, positions, steps, num_rows, table_slot, table_plane,
    RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    inside = slot > 0
    position = tl.load(positions + row, mask=inside, other=0)
    step = tl.load(steps + row, mask=inside, other=1)
    count = tl.load(taken + slot, mask=inside, other=0)
    page = tl.load(ring + slot * RING + (count & (RING - 1)), mask=inside, other=0)
    tl.store(table + slot * table_slot + (step - 1) * table_plane + position, page, mask=inside)
    tl.store(taken + slot, count + 1, mask=inside)


@triton.jit
def _alias(
    table, slots, positions, depths, leaving, num_rows, table_slot, table_plane,
    NUM_PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    inside = (slot > 0) & (tl.load(leaving + row, mask=inside, other=0) != 0)
    depth = tl.load(depths + row, mask=inside, other=NUM_PLANES)
    entry = table + slot * table_slot + tl.load(positions + row, mask=inside, other=0)
    page = tl.load(entry + (depth - 1) * table_plane, mask=inside, other=0)
    for plane in range(1, NUM_PLANES):
        tl.store(entry + plane * table_plane, page, mask=inside & (depth <= plane))


def take_pages(
    table_SPB: Tensor, ring_SC: Tensor, taken_S: Tensor, at_N: Tensor, positions_N: Tensor, steps_N: Tensor
) -> None:
    """The next page of each slot's ring becomes the page of (plane `steps` - 1, `positions`); padding rows, which may
    be many, do nothing. C is a power of two. Rows are int64 [N]; fit for a graph."""
    num_rows = at_N.shape[0]
    block = min(padded(num_rows), BLOCK)
    _take[(-(-num_rows // block),)](
        table_SPB, ring_SC, taken_S, at_N, positions_N, steps_N, num_rows, *table_SPB.stride()[:2],
        RING=ring_SC.shape[1], BLOCK=block, num_warps=1,
    )  # fmt: skip


def alias_planes(table_SPB: Tensor, at_N: Tensor, positions_N: Tensor, depths_N: Tensor, leaving_N: Tensor) -> None:
    """Rows with `leaving_N` (bool) leave after `depths` steps: every later plane is the last one they wrote. Padding
    rows do nothing. Slots, positions and depths are int64 [N]; fit for a graph."""
    num_rows = at_N.shape[0]
    block = min(padded(num_rows), BLOCK)
    _alias[(-(-num_rows // block),)](
        table_SPB, at_N, positions_N, depths_N, leaving_N, num_rows, *table_SPB.stride()[:2],
        NUM_PLANES=table_SPB.shape[1], BLOCK=block, num_warps=1,
    )  # fmt: skip
