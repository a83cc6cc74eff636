"""Products of a few rows with a weight matrix on Hopper: weights are on their way before the rows exist.

Every program starts with copies of its first STAGES blocks of weights into shared memory, and only then waits for the
kernel that makes the rows. With launches that overlap, memory is read all through the ends and starts of kernels.

Sums run as in `matmul`: over blocks of BK in rising order in float32, parts of a split product apart.
"""

# N rows, D inner width, F outer width, S splits
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looped.model.kernels.launch import overlaps, padded


class Stream(NamedTuple):
    """Sizes of a launch."""

    outer: int
    """Rows of the weight a program takes, of both halves each where they are gated: a multiple of 64, or 32 gated."""
    inner: int
    """Numbers of a weight's row a step takes."""
    splits: int
    num_stages: int
    num_warps: int = 4


@gluon.jit
def half(w_smem, stage, which: gl.constexpr, TILES: gl.constexpr, PAIR: gl.constexpr):
    """Where a stage's block of the weight goes: the gate's half, or the one above it."""
    if PAIR:
        return w_smem.index(stage).slice(which * 32, 32, dim=0)
    else:
        return w_smem.index(stage * TILES + which)


@gluon.jit
def copy_rows(x, more_x, at, bar, to, EDGE: gl.constexpr, more):
    """Columns `at` of x, or from EDGE on of `more_x`: steps that cross the end of x find zeros there."""
    if EDGE:
        tma.async_copy_global_to_shared(x, [0, at], bar, to, pred=more & (at < EDGE))
        tma.async_copy_global_to_shared(more_x, [0, at - EDGE], bar, to, pred=more & (at >= EDGE))
    else:
        tma.async_copy_global_to_shared(x, [0, at], bar, to, pred=more)


@gluon.jit
def _stream(
    out, w, x, more_x,
    F: gl.constexpr, PART: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, EDGE: gl.constexpr, WIDTH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (blocks of F, S). w [F, D], or gate over up [2 F, D] with GATED; out [S, N, F].

    With EDGE the rows are those of x and, behind them, of `more_x`, WIDTH each: w [F, 2 WIDTH]. Every step belongs to
    one of them; those of x end at EDGE, a multiple of BK, where the weights go on at WIDTH.
    """
    STEPS: gl.constexpr = PART // BK
    PAIR: gl.constexpr = GATED and BN == 32
    HALVES: gl.constexpr = 2 if GATED else 1
    TILES: gl.constexpr = 2 if GATED and not PAIR else 1
    TALL: gl.constexpr = 64 if PAIR else BN
    NUM_BYTES: gl.constexpr = (HALVES * BN + BM) * BK * 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    first = gl.program_id(0) * BN
    split = gl.program_id(1)
    start = split * PART
    num_rows = x.shape[0]
    w_smem = gl.allocate_shared_memory(w.dtype, [STAGES * TILES, TALL, BK], w.layout)
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    for early in gl.static_range(STAGES):
        slot = ready.index(early)
        mbarrier.expect(slot, NUM_BYTES)
        at = start + early * BK
        if EDGE:
            at = gl.where(at < EDGE, at, at + (WIDTH - EDGE))
        tma.async_copy_global_to_shared(w, [first, at], slot, half(w_smem, early, 0, TILES, PAIR))
        if GATED:
            to = half(w_smem, early, 1, TILES, PAIR)
            tma.async_copy_global_to_shared(w, [F + first, at], slot, to)
    gdc_launch_dependents()
    gdc_wait()
    for early in gl.static_range(STAGES):
        copy_rows(x, more_x, start + early * BK, ready.index(early), x_smem.index(early), EDGE, True)
    acc = gl.zeros([TALL, BM], gl.float32, layout)
    up = gl.zeros([TALL, BM], gl.float32, layout)
    for step in range(STEPS):
        stage = step % STAGES
        bar = ready.index(stage)
        mbarrier.wait(bar, (step // STAGES) & 1)
        rows = x_smem.index(stage).permute((1, 0))
        acc = warpgroup_mma(w_smem.index(stage * TILES), rows, acc, is_async=True)
        if TILES == 2:
            up = warpgroup_mma(w_smem.index(stage * TILES + 1), rows, up, is_async=True)
            acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        later = step + STAGES
        more = later < STEPS
        gl.thread_barrier()  # every warp has read the stage
        mbarrier.expect(bar, NUM_BYTES, pred=more)
        at = start + later * BK
        copy_rows(x, more_x, at, bar, x_smem.index(stage), EDGE, more)
        if EDGE:
            at = gl.where(at < EDGE, at, at + (WIDTH - EDGE))
        tma.async_copy_global_to_shared(w, [first, at], bar, half(w_smem, stage, 0, TILES, PAIR), pred=more)
        if GATED:
            tma.async_copy_global_to_shared(w, [F + first, at], bar, half(w_smem, stage, 1, TILES, PAIR), pred=more)
    kind: gl.constexpr = out.dtype.element_ty
    if PAIR:
        both: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [num_warps, 1, 1], [2, 1, 0])
        acc, up = gl.convert_layout(acc.reshape([2, BN, BM]).permute((1, 2, 0)), both).split()
    if GATED:
        acc = acc.to(kind).to(gl.float32)
        acc = (acc / (1.0 + gl.exp(-acc))).to(kind).to(gl.float32) * up.to(kind).to(gl.float32)
    end: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [num_warps, 1], [1, 0]) if PAIR else layout
    outer = first + gl.arange(0, BN, gl.SliceLayout(1, end))
    row = gl.arange(0, BM, gl.SliceLayout(0, end))
    at = split * num_rows * F + outer[:, None] + row[None, :] * F
    mask = (outer < F)[:, None] & (row < num_rows)[None, :]
    gl.store(out + at, gl.convert_layout(acc.to(kind), end), mask=mask)


def streams(x_ND: Tensor, w: Tensor) -> bool:
    """Whether the copy engine and the matrix units of this GPU take these operands."""
    major = torch.cuda.get_device_capability(x_ND.device)[0] if x_ND.is_cuda else 0
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 for t in (x_ND, w))
    return major == 9 and aligned


def linear_sizes(num_rows: int, outer: int, inner: int) -> Stream:
    """Sizes for a plain product, as measured in a whole core step on an H200.

    Few rows: parts are cheap, and many short programs hide each other's starts. More rows: their parts cost, so only
    a narrow weight is split. Stages leave room for programs of the next kernel beside these.
    """
    tiles, most = -(-outer // 64), max(inner // 256, 1)
    if num_rows <= 16:
        splits = min(4, most)
        return Stream(64, 128, splits, 7 if tiles * splits <= 132 else 3)
    few = 2 if num_rows <= 32 else 1
    splits = min(few if tiles >= 80 else 4, most)
    stages = 4 if (num_rows <= 32) == (tiles >= 80) else 6
    return Stream(64, 128, splits, stages)


def gated_sizes(num_rows: int) -> Stream:
    """Sizes for a gated one."""
    return Stream(64, 128, 1, 4) if num_rows > 32 else Stream(32, 64, 1, 10 if num_rows <= 16 else 8)


def stream_parts(x_ND: Tensor, w_FD: Tensor, sizes: Stream | None = None, more_x_ND: Tensor | None = None) -> Tensor:
    """x @ w.T as parts [S, N, F] to be added: float32, or x's dtype where S is 1. Given `more_x_ND`, x is both side by
    side, and w is as wide as that."""
    outer, inner = w_FD.shape
    sizes = sizes or linear_sizes(len(x_ND), outer, inner)
    dtype = x_ND.dtype if sizes.splits == 1 else torch.float32
    out_SNF = torch.empty((sizes.splits, len(x_ND), outer), dtype=dtype, device=x_ND.device)
    _launch(out_SNF, x_ND, w_FD, outer, sizes, False, more_x_ND)
    return out_SNF


def stream_gated(x_ND: Tensor, w_2FD: Tensor, sizes: Stream | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T): [N, F]; w is gate over up."""
    outer = w_2FD.shape[0] // 2
    sizes = sizes or gated_sizes(len(x_ND))
    out_NF = torch.empty((len(x_ND), outer), dtype=x_ND.dtype, device=x_ND.device)
    _launch(out_NF, x_ND, w_2FD, outer, sizes, True)
    return out_NF


def _launch(
    out: Tensor, x_ND: Tensor, w: Tensor, outer: int, sizes: Stream, is_gated: bool, more_x_ND: Tensor | None = None
) -> None:
    num_rows, inner = x_ND.shape
    edge = 0
    if more_x_ND is not None:
        edge = -(-inner // sizes.inner) * sizes.inner
        inner = 2 * edge
    kind = gl.bfloat16 if x_ND.dtype == torch.bfloat16 else gl.float16
    tall = padded(num_rows, least=16)
    part = -(-inner // (sizes.inner * sizes.splits)) * sizes.inner
    w_block, x_block = [sizes.outer, sizes.inner], [tall, sizes.inner]
    rows = TensorDescriptor.from_tensor(x_ND, x_block, gl.NVMMASharedLayout.get_default_for(x_block, kind))
    _stream[(-(-outer // sizes.outer), sizes.splits)](
        out,
        TensorDescriptor.from_tensor(w, w_block, gl.NVMMASharedLayout.get_default_for(w_block, kind)),
        rows,
        rows if more_x_ND is None else TensorDescriptor.from_tensor(more_x_ND, x_block, rows.layout),
        F=outer, PART=part, BM=tall, BN=sizes.outer, BK=sizes.inner,
        STAGES=min(sizes.num_stages, part // sizes.inner), GATED=is_gated, EDGE=edge, WIDTH=x_ND.shape[1],
        num_warps=sizes.num_warps,
        launch_pdl=overlaps(x_ND.device),
    )  # fmt: skip
