"""silu(gate) * up of rows that a library's product left side by side."""

# N rows, F intermediate width
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.model.kernels.launch import after_previous, launch_options, padded


@triton.jit
def _silu_mul(out, x, F: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (N, blocks of F)."""
    KIND: tl.constexpr = out.dtype.element_ty
    row, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < F
    after_previous(OVERLAP)
    gate = tl.load(x + row * 2 * F + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + dims, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(KIND).to(tl.float32)
    tl.store(out + row * F + dims, gate * up, mask=inside)


def silu_mul_rows(x_N2F: Tensor) -> Tensor:
    """[N, 2 F], contiguous, to [N, F]."""
    num_rows, width = x_N2F.shape[0], x_N2F.shape[1] // 2
    out_NF = torch.empty((num_rows, width), dtype=x_N2F.dtype, device=x_N2F.device)
    block = min(padded(width), 1024)
    _silu_mul[(num_rows, -(-width // block))](
        out_NF, x_N2F, F=width, BLOCK=block, num_warps=4, **launch_options(x_N2F.device)
    )
    return out_NF
