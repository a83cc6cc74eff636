"""Rotary positions: the angles of a batch, and the rotation of queries and keys as a product's parts are added."""

# N rows, A heads (queries, keys and values), S splits of a product, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.model.kernels.launch import after_previous, launch_options, padded

# Heads of a program and its warps: few rows want many programs, many rows few.
FEW_ROWS, FEW, MANY = 64, (4, 2), (16, 4)


@triton.jit
def _angles(cos, sin, positions, frequencies, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N,)."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = pair < HALF
    frequency = tl.load(frequencies + pair, mask=inside, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * HALF + pair, tl.cos(angle), mask=inside)
    tl.store(sin + row * HALF + pair, tl.sin(angle), mask=inside)


@triton.jit
def _sum_parts(parts, at, mask, step, SPLITS: tl.constexpr, KIND: tl.constexpr):
    total = tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * step + at, mask=mask, other=0.0)
    return total.to(KIND).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rope(
    out, parts, bias, cos, sin, num_rows,
    ROTATED: tl.constexpr, ALL: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
    SPLITS: tl.constexpr, BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N, blocks of heads). The first ROTATED of ALL heads are turned, and have the bias."""
    KIND: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, PADDED)
    turned = (heads < ROTATED)[:, None]
    mask = (heads < ALL)[:, None] & (pair < HALF)[None, :]
    if INTERLEAVED:
        one = heads[:, None] * HEAD_DIM + 2 * pair[None, :]
        two = one + 1
    else:
        one = heads[:, None] * HEAD_DIM + pair[None, :]
        two = one + HALF
    if BIAS:
        one_bias = tl.load(bias + one, mask=mask & turned, other=0.0).to(tl.float32)
        two_bias = tl.load(bias + two, mask=mask & turned, other=0.0).to(tl.float32)
    after_previous(OVERLAP)
    step = num_rows.to(tl.int64) * (ALL * HEAD_DIM)
    at = row * (ALL * HEAD_DIM)
    a = _sum_parts(parts + at, one, mask, step, SPLITS, KIND)
    b = _sum_parts(parts + at, two, mask, step, SPLITS, KIND)
    if BIAS:
        a, b = (a + one_bias).to(KIND).to(tl.float32), (b + two_bias).to(KIND).to(tl.float32)
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    ac, bs, bc, a_s = a * c, b * s, b * c, a * s
    if not INTERLEAVED:  # angles of the activations' dtype: their products are rounded, too
        ac, bs = ac.to(KIND).to(tl.float32), bs.to(KIND).to(tl.float32)
        bc, a_s = bc.to(KIND).to(tl.float32), a_s.to(KIND).to(tl.float32)
    tl.store(out + at + one, tl.where(turned, ac - bs, a), mask=mask)
    tl.store(out + at + two, tl.where(turned, bc + a_s, b), mask=mask)


def angle_rows(positions_N: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, K/2] of positions times frequencies (float32 [K/2]).

    The first kernel of a stage, launched without overlap: what ran before is complete when the stage's layers start.
    """
    num_rows, half = positions_N.shape[0], frequencies.shape[0]
    out_2NK = torch.empty((2, num_rows, half), dtype=dtype, device=positions_N.device)
    _angles[(num_rows,)](
        out_2NK[0], out_2NK[1], positions_N, frequencies, HALF=half, BLOCK=padded(half), num_warps=1
    )  # fmt: skip
    return out_2NK[0], out_2NK[1]


def rope_rows(
    parts_SNF: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    num_rotated: int,
    head_dim: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Add the parts of a product whose rows are heads, add the bias to the first `num_rotated` and turn those by
    angles [N, K/2]: [N, A, K]."""
    splits, num_rows, width = parts_SNF.shape
    num_heads = width // head_dim
    out_NAK = torch.empty((num_rows, num_heads, head_dim), dtype=dtype, device=parts_SNF.device)
    heads, num_warps = FEW if num_rows <= FEW_ROWS else MANY
    _rope[(num_rows, -(-num_heads // heads))](
        out_NAK, parts_SNF, parts_SNF if bias is None else bias, cos, sin, num_rows,
        ROTATED=num_rotated, ALL=num_heads, HEAD_DIM=head_dim, PADDED=padded(head_dim // 2), HEADS=heads,
        SPLITS=splits, BIAS=bias is not None, INTERLEAVED=interleaved, num_warps=num_warps,
        **launch_options(parts_SNF.device),
    )  # fmt: skip
    return out_NAK
