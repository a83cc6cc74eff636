"""What the kernels share: where a token's K/V lies, the accumulator's type, and sizes of tiles."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# No postponed annotations in kernel files: Triton reads `tl.constexpr` off the parameters.

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pool_rows(entry, positions, inside, PAGE: tl.constexpr):
    """Pool rows (int64) of `positions` of the sequence whose row of the page table starts at `entry`.

    Positions that are not `inside` get a row of page 0; nothing may be loaded there.
    """
    pages = tl.load(entry + positions // PAGE, mask=inside, other=0).to(tl.int64)
    return pages * PAGE + positions % PAGE


@triton.jit
def pool_row(entry, position, PAGE: tl.constexpr):
    """The pool row (int64) of one position."""
    return tl.load(entry + position // PAGE).to(tl.int64) * PAGE + position % PAGE


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Scores, softmax and sums are float32; float64 stays what it is."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`, and at least `least`."""
    return max(int(triton.next_power_of_2(size)), least)


def rows_apart(x: Tensor) -> Tensor:
    """`x` [N, heads, K] as kernels take it: any stride between rows and heads, none inside a head."""
    return x if x.stride(-1) == 1 else x.contiguous()
