"""Root-mean-square norms of rows: alone, and of a residual sum together with the norm that follows it."""

# N rows, D width, S splits of a product
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.model.kernels.launch import after_previous, launch_options, padded


@triton.jit
def _normed(x, weight, D: tl.constexpr, EPS: tl.constexpr, KIND: tl.constexpr):
    """The norm of one row of float32 numbers, rounded to KIND before and after it is scaled; as float32."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
    return ((x * scale).to(KIND).to(tl.float32) * weight).to(KIND).to(tl.float32)


@triton.jit
def _norm(out, x, weight, x_row, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (N,)."""
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = dims < D
    scale = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    after_previous(OVERLAP)
    wide = tl.load(x + row * x_row + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + dims, _normed(wide, scale, D, EPS, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_norm(
    total, normed, parts, weight, num_rows,
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    KIND: tl.constexpr = total.dtype.element_ty
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = dims < D
    scale = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    after_previous(OVERLAP)
    whole = tl.load(parts + row * D + dims, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        whole += tl.load(parts + (split * num_rows + row) * D + dims, mask=inside, other=0.0)
    whole = whole.to(KIND).to(tl.float32)
    tl.store(total + row * D + dims, whole, mask=inside)
    tl.store(normed + row * D + dims, _normed(whole, scale, D, EPS, KIND), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _merge(
    total, normed, x, parts, weight, next_weight, x_row, num_rows,
    D: tl.constexpr, SPLITS: tl.constexpr, AFTER_SUM: tl.constexpr, NEXT: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, NEXT_EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    KIND: tl.constexpr = total.dtype.element_ty
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = dims < D
    scale = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    if NEXT:
        next_scale = tl.load(next_weight + dims, mask=inside, other=0.0).to(tl.float32)
    after_previous(OVERLAP)
    before = tl.load(x + row * x_row + dims, mask=inside, other=0.0).to(tl.float32)
    branch = tl.load(parts + row * D + dims, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        branch += tl.load(parts + (split * num_rows + row) * D + dims, mask=inside, other=0.0)
    branch = branch.to(KIND).to(tl.float32)
    if AFTER_SUM:
        after = _normed((before + branch).to(KIND).to(tl.float32), scale, D, EPS, KIND)
    else:
        after = (before + _normed(branch, scale, D, EPS, KIND)).to(KIND).to(tl.float32)
    tl.store(total + row * D + dims, after, mask=inside)
    if NEXT:
        tl.store(normed + row * D + dims, _normed(after, next_scale, D, NEXT_EPS, KIND), mask=inside)


def norm_rows(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The norm of each row."""
    num_rows, width = x_ND.shape
    out_ND = torch.empty((num_rows, width), dtype=x_ND.dtype, device=x_ND.device)
    block = padded(width)
    _norm[(num_rows,)](
        out_ND, x_ND, weight_D, x_ND.stride(0), D=width, BLOCK=block, EPS=eps,
        num_warps=_warps(block), **launch_options(x_ND.device),
    )  # fmt: skip
    return out_ND


def sum_norm_rows(parts_SND: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sum of a product's parts, and its norm."""
    splits, num_rows, width = parts_SND.shape
    total_ND = torch.empty((num_rows, width), dtype=dtype, device=parts_SND.device)
    normed_ND = torch.empty_like(total_ND)
    block = padded(width)
    _sum_norm[(num_rows,)](
        total_ND, normed_ND, parts_SND, weight_D, num_rows,
        D=width, SPLITS=splits, BLOCK=block, EPS=eps, num_warps=_warps(block), **launch_options(parts_SND.device),
    )  # fmt: skip
    return total_ND, normed_ND


def merge_rows(
    x_ND: Tensor,
    parts_SND: Tensor,
    weight_D: Tensor,
    eps: float,
    after_sum: bool,
    next_weight_D: Tensor | None,
    next_eps: float,
) -> tuple[Tensor, Tensor | None]:
    """A branch, the sum of its parts, joins the residual stream: x + norm(branch), or norm(x + branch) with
    `after_sum`. Returns that and, given the next norm's weight, its norm."""
    num_rows, width = x_ND.shape
    total_ND = torch.empty((num_rows, width), dtype=x_ND.dtype, device=x_ND.device)
    normed_ND = None if next_weight_D is None else torch.empty_like(total_ND)
    block = padded(width)
    _merge[(num_rows,)](
        total_ND, total_ND if normed_ND is None else normed_ND, x_ND, parts_SND, weight_D,
        weight_D if next_weight_D is None else next_weight_D, x_ND.stride(0), num_rows,
        D=width, SPLITS=parts_SND.shape[0], AFTER_SUM=after_sum, NEXT=next_weight_D is not None, BLOCK=block,
        EPS=eps, NEXT_EPS=next_eps, num_warps=_warps(block), **launch_options(x_ND.device),
    )  # fmt: skip
    return total_ND, normed_ND


def _warps(block: int) -> int:
    """Eight numbers a thread: one row is one program, and a batch of few rows leaves it the whole multiprocessor."""
    return min(max(block // 256, 1), 16)
