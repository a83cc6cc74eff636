"""Products of a few rows with a weight matrix on any GPU, limited by how fast the weights can be read.

A program takes BN rows of the weight and one of SPLITS parts of the inner dimension. Its sum runs over blocks of BK
in rising order in float32; the parts of a split product are left as they are, in float32, and whoever reads them
adds them in rising order. So a result depends on the launch's sizes, which depend on the shapes alone, and never on
which program was faster or what the other rows are.
"""

# N rows, D inner width, F outer width, S splits
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.model.kernels.launch import after_previous, ask_for, launch_options, overlaps, padded

# Weights of one request to the L2 cache, in numbers.
ASK = 256


class Tile(NamedTuple):
    """Sizes of a launch."""

    outer: int
    """Rows of the weight a program takes (of both halves each, where they are gated)."""
    inner: int
    """Numbers of a weight's row a step takes."""
    splits: int
    num_stages: int
    num_warps: int
    swap: bool
    """Weights are the left operand: what Hopper's matrix units want for them (64 rows or more)."""
    ask: int
    """Numbers of each weight row's part that are asked for before the previous kernel ends; a multiple of ASK."""


@triton.jit
def _ask(w, first, start, F: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, ASK: tl.constexpr):
    rows = tl.minimum(first + tl.arange(0, BN), F - 1).to(tl.int64)
    at = start + tl.arange(0, AHEAD // ASK) * ASK
    ask_for(w + rows[:, None] * D + at[None, :], ASK * 2)


@triton.jit
def _product(
    x, w, x_row, num_rows, first, start,
    F: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x[:, start : start + PART] @ w[first : first + BN, the same].T: [BM, BN], or its transpose for SWAP."""
    rows, outer, inner = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK)
    x_at = x + rows[:, None] * x_row + start + inner[None, :]
    w_at = w + outer.to(tl.int64)[:, None] * D + start + inner[None, :]
    x_in, w_in = rows < num_rows, outer < F
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for block in tl.range(0, PART, BK, num_stages=STAGES):
        if EVEN:
            x_mask, w_mask = x_in[:, None], w_in[:, None]
        else:
            inside = start + block + inner < D
            x_mask, w_mask = x_in[:, None] & inside[None, :], w_in[:, None] & inside[None, :]
        if F % BN == 0 and EVEN:
            w_tile = tl.load(w_at + block, eviction_policy="evict_first")
        else:
            w_tile = tl.load(w_at + block, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x_at + block, mask=x_mask, other=0.0)
        if SWAP:
            acc = tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    out, x, w, x_row, num_rows,
    F: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    AHEAD: tl.constexpr, ASK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of F, S); out [S, N, F]."""
    first, split = tl.program_id(0) * BN, tl.program_id(1)
    start = split * PART
    if AHEAD > 0:
        _ask(w, first, start, F, D, BN, AHEAD, ASK)
    after_previous(OVERLAP)
    acc = _product(x, w, x_row, num_rows, first, start, F, D, PART, BM, BN, BK, STAGES, SWAP, EVEN)
    rows, outer = tl.arange(0, BM), first + tl.arange(0, BN)
    to = out + split * num_rows * F
    if SWAP:
        mask = (outer < F)[:, None] & (rows < num_rows)[None, :]
        tl.store(to + outer[:, None] + rows[None, :] * F, acc.to(out.dtype.element_ty), mask=mask)
    else:
        mask = (rows < num_rows)[:, None] & (outer < F)[None, :]
        tl.store(to + rows[:, None] * F + outer[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated(
    out, x, w, x_row, num_rows,
    F: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, ASK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of F,); w [2 F, D], out [N, F]. Rounds where one operation after the other would."""
    first = tl.program_id(0) * BN
    if AHEAD > 0:
        _ask(w, first, 0, F, D, BN, AHEAD, ASK)
        _ask(w + F * D, first, 0, F, D, BN, AHEAD, ASK)
    after_previous(OVERLAP)
    rows, outer, inner = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK)
    x_at = x + rows[:, None] * x_row + inner[None, :]
    g_at = w + outer.to(tl.int64)[:, None] * D + inner[None, :]
    u_at = g_at + F * D
    x_in, w_in = rows < num_rows, outer < F
    gate = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    up = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.float32)
    for block in tl.range(0, D, BK, num_stages=STAGES):
        if D % BK == 0:
            x_mask, w_mask = x_in[:, None], w_in[:, None]
        else:
            inside = block + inner < D
            x_mask, w_mask = x_in[:, None] & inside[None, :], w_in[:, None] & inside[None, :]
        if F % BN == 0 and D % BK == 0:
            g_tile = tl.load(g_at + block, eviction_policy="evict_first")
            u_tile = tl.load(u_at + block, eviction_policy="evict_first")
        else:
            g_tile = tl.load(g_at + block, mask=w_mask, other=0.0, eviction_policy="evict_first")
            u_tile = tl.load(u_at + block, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x_tile = tl.load(x_at + block, mask=x_mask, other=0.0)
        if SWAP:
            gate = tl.dot(g_tile, tl.trans(x_tile), gate, input_precision="ieee")
            up = tl.dot(u_tile, tl.trans(x_tile), up, input_precision="ieee")
        else:
            gate = tl.dot(x_tile, tl.trans(g_tile), gate, input_precision="ieee")
            up = tl.dot(x_tile, tl.trans(u_tile), up, input_precision="ieee")
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    mixed = (gate * up.to(kind).to(tl.float32)).to(kind)
    if SWAP:
        mask = w_in[:, None] & x_in[None, :]
        tl.store(out + outer[:, None] + rows[None, :] * F, mixed, mask=mask)
    else:
        mask = x_in[:, None] & w_in[None, :]
        tl.store(out + rows[:, None] * F + outer[None, :], mixed, mask=mask)


def linear_parts(x_ND: Tensor, w_FD: Tensor, tile: Tile | None = None) -> Tensor:
    """x @ w.T of a tile's rows, at most 64, as parts [S, N, F] to be added: float32, or x's dtype where S is 1."""
    num_rows, inner = x_ND.shape
    outer = w_FD.shape[0]
    tile = tile or linear_tile(num_rows, outer, inner)
    dtype = x_ND.dtype if tile.splits == 1 else torch.float32
    out_SNF = torch.empty((tile.splits, num_rows, outer), dtype=dtype, device=x_ND.device)
    part = -(-inner // (tile.inner * tile.splits)) * tile.inner
    even = inner == part * tile.splits
    _linear[(-(-outer // tile.outer), tile.splits)](
        out_SNF, x_ND, w_FD, x_ND.stride(0), num_rows,
        F=outer, D=inner, PART=part, EVEN=even, **_sizes(tile, num_rows, x_ND, part if even else 0),
    )  # fmt: skip
    return out_SNF


def gated_linear(x_ND: Tensor, w_2FD: Tensor, tile: Tile | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) of a tile's rows, at most 64: [N, F]; w is gate over up."""
    num_rows, inner = x_ND.shape
    outer = w_2FD.shape[0] // 2
    tile = tile or gated_tile(num_rows, outer, inner)
    out_NF = torch.empty((num_rows, outer), dtype=x_ND.dtype, device=x_ND.device)
    _gated[(-(-outer // tile.outer),)](
        out_NF, x_ND, w_2FD, x_ND.stride(0), num_rows, F=outer, D=inner, **_sizes(tile, num_rows, x_ND, inner)
    )
    return out_NF


def _sizes(tile: Tile, num_rows: int, x: Tensor, part: int) -> dict[str, object]:
    ahead = min(tile.ask, part) // ASK
    ahead = padded(ahead + 1) // 2 * ASK if ahead and overlaps(x.device) else 0  # a power of two of requests
    return {
        "BM": padded(num_rows, least=16), "BN": tile.outer, "BK": tile.inner, "STAGES": tile.num_stages,
        "SWAP": tile.swap, "AHEAD": ahead, "ASK": ASK, "num_warps": tile.num_warps, **launch_options(x.device),
    }  # fmt: skip


def linear_tile(num_rows: int, outer: int, inner: int) -> Tile:
    """Sizes for a plain product, as measured on an H200."""
    if num_rows > 16:
        return Tile(64, 128, 1 if outer >= 4096 else 4, 4, 4, True, 256)
    if outer >= 4096:
        return Tile(64, 128, 4, 5, 4, True, 256)
    return Tile(64, 256, 4, 3, 4, True, 256) if inner <= 2048 else Tile(64, 64, 8, 8, 4, True, 256)


def gated_tile(num_rows: int, outer: int, inner: int) -> Tile:
    """Sizes for a gated one: a program reads twice `outer` rows."""
    return Tile(64, 64, 1, 4, 4, True, 0) if num_rows > 16 else Tile(64, 128, 1, 4, 4, False, 0)
