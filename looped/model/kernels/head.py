"""The LM head for few rows on Hopper: logits, or only where each row's largest is, so that logits are never written.

Products run as in `stream`: weights are asked for before the rows exist. A program takes several tiles of the
vocabulary one after another, and the copies of the next tile's weights are on their way while one ends. Sums run over
blocks of BK in rising order, whichever of the two is wanted and however many tiles a program takes: the logits behind
a greedy token are those that other ways of sampling see.
"""

# N rows, D inner width, V vocabulary, C programs
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from looped.model.kernels.largest import INFINITY, join_keys
from looped.model.kernels.launch import overlaps, padded


class Head(NamedTuple):
    """Sizes of a launch."""

    outer: int
    """Tokens of a tile: a multiple of 64."""
    inner: int
    """Numbers of a weight's row a step takes."""
    num_stages: int
    resident: int
    """Programs that a multiprocessor holds."""
    num_warps: int = 4
    lag: int = 0
    """Products that still run while the next one starts: 1 keeps the matrix units busy where they are the limit."""


@gluon.jit
def _head(
    out, w, x,
    V: gl.constexpr, STEPS: gl.constexpr, TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, LAG: gl.constexpr, KEYS: gl.constexpr, INF: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (C,). w [V, D]; out is logits [N, V], or with KEYS the programs' candidates [N, C], see `largest`."""
    NUM_BYTES: gl.constexpr = (BN + BM) * BK * 2
    TOTAL: gl.constexpr = TILES * STEPS
    NONE: gl.constexpr = -2147483648
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    first = gl.program_id(0) * (TILES * BN)
    num_rows = x.shape[0]
    w_smem = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    for early in gl.static_range(STAGES):
        slot = ready.index(early)
        at = [first + (early // STEPS) * BN, (early % STEPS) * BK]
        mbarrier.expect(slot, NUM_BYTES)
        tma.async_copy_global_to_shared(w, at, slot, w_smem.index(early))
    gdc_launch_dependents()
    gdc_wait()
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [0, (early % STEPS) * BK], ready.index(early), x_smem.index(early))
    best = gl.full([BN, BM], NONE, gl.int32, layout)
    outer = gl.arange(0, BN, gl.SliceLayout(1, layout))
    for tile in range(TILES):
        acc = gl.zeros([BN, BM], gl.float32, layout)
        for inner in range(STEPS):
            step = tile * STEPS + inner
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
            acc = warpgroup_mma(w_smem.index(stage), x_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=LAG, deps=(acc,))
            gl.thread_barrier()  # every warp has read the stage of LAG steps before
            later = step - LAG + STAGES
            more = (step >= LAG) & (later < TOTAL)
            stage = later % STAGES
            bar = ready.index(stage)
            mbarrier.expect(bar, NUM_BYTES, pred=more)
            at = [first + (later // STEPS) * BN, (later % STEPS) * BK]
            tma.async_copy_global_to_shared(w, at, bar, w_smem.index(stage), pred=more)
            tma.async_copy_global_to_shared(x, [0, (later % STEPS) * BK], bar, x_smem.index(stage), pred=more)
        if LAG:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        rounded = acc.to(w.dtype)
        if KEYS:
            bits = rounded.to(gl.int16, bitcast=True).to(gl.int32)
            magnitude = bits & 0x7FFF
            value = gl.where(bits < 0, -magnitude, magnitude)
            value = gl.where(magnitude > INF, 0x7FFF, value)
            local = tile * BN + outer
            key = value * 65536 + (65535 - local)[:, None]
            best = gl.maximum(best, gl.where((first + local < V)[:, None], key, NONE))
        else:
            end: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
            token = first + tile * BN + gl.arange(0, BN, gl.SliceLayout(1, end))
            row = gl.arange(0, BM, gl.SliceLayout(0, end))
            mask = (token < V)[:, None] & (row < num_rows)[None, :]
            gl.store(out + row.to(gl.int64)[None, :] * V + token[:, None], gl.convert_layout(rounded, end), mask=mask)
    if KEYS:
        most = gl.max(best, 0)
        row = gl.arange(0, BM, gl.SliceLayout(0, layout))
        token = first + 65535 - (most & 65535)
        key = (most >> 16).to(gl.int64) * 4294967296 + (2147483647 - token).to(gl.int64)
        gl.store(out + row * gl.num_programs(0) + gl.program_id(0), key, mask=row < num_rows)


def head_sizes(num_rows: int) -> Head:
    """Sizes for an H200: a tile's rows of x come out of the L2 cache, so more of them want wider tiles."""
    if num_rows <= 16:
        return Head(64, 128, 5, 2)
    if num_rows <= 64:
        return Head(64, 128, 4, 2) if num_rows <= 32 else Head(128, 128, 4, 1, 4, 1)
    return Head(128, 64, 6, 1, 8, 1) if num_rows <= 128 else Head(128, 64, 4, 1, 8, 1)


def head_logits(x_ND: Tensor, w_VD: Tensor, sizes: Head | None = None) -> Tensor:
    """x @ w.T [N, V]."""
    sizes = sizes or head_sizes(len(x_ND))
    tiles, programs = _shares(x_ND, w_VD, sizes)
    logits_NV = torch.empty((len(x_ND), len(w_VD)), dtype=x_ND.dtype, device=x_ND.device)
    _launch(logits_NV, x_ND, w_VD, sizes, tiles, programs, False)
    return logits_NV


def head_largest(x_ND: Tensor, w_VD: Tensor, sizes: Head | None = None) -> tuple[Tensor, Tensor]:
    """What `largest.largest_of` says of x @ w.T."""
    sizes = sizes or head_sizes(len(x_ND))
    tiles, programs = _shares(x_ND, w_VD, sizes)
    keys_NC = torch.empty((len(x_ND), programs), dtype=torch.long, device=x_ND.device)
    _launch(keys_NC, x_ND, w_VD, sizes, tiles, programs, True)
    return join_keys(keys_NC, x_ND.dtype)


def _shares(x_ND: Tensor, w_VD: Tensor, sizes: Head) -> tuple[int, int]:
    """Tiles of a program, so that all programs run at once and take about as many; and how many programs that makes."""
    tiles = -(-len(w_VD) // sizes.outer)
    multiprocessors = torch.cuda.get_device_properties(x_ND.device).multi_processor_count
    # Ids within a program take 16 bits.
    share = min(-(-tiles // (multiprocessors * sizes.resident)), 65536 // sizes.outer)
    return share, -(-tiles // share)


def _launch(out: Tensor, x_ND: Tensor, w_VD: Tensor, sizes: Head, tiles: int, programs: int, keys: bool) -> None:
    num_rows, inner = x_ND.shape
    kind = gl.bfloat16 if x_ND.dtype == torch.bfloat16 else gl.float16
    tall = padded(num_rows, least=16)
    steps = -(-inner // sizes.inner)
    w_block, x_block = [sizes.outer, sizes.inner], [tall, sizes.inner]
    _head[(programs,)](
        out,
        TensorDescriptor.from_tensor(w_VD, w_block, gl.NVMMASharedLayout.get_default_for(w_block, kind)),
        TensorDescriptor.from_tensor(x_ND, x_block, gl.NVMMASharedLayout.get_default_for(x_block, kind)),
        V=len(w_VD), STEPS=steps, TILES=tiles, BM=tall, BN=sizes.outer, BK=sizes.inner,
        STAGES=min(sizes.num_stages, steps * tiles), LAG=sizes.lag, KEYS=keys, INF=INFINITY[x_ND.dtype],
        num_warps=sizes.num_warps, launch_pdl=overlaps(x_ND.device),
    )  # fmt: skip
