"""Which kernel multiplies a few rows with a weight matrix."""

# N rows, D inner width, F outer width, S splits

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.model.kernels import matmul
from looped.model.kernels.largest import largest_of

try:  # Gluon, the part of Triton in which `stream` is written, may move
    from looped.model.kernels import head, stream
except ImportError:
    head = stream = None  # type: ignore[assignment]

# Rows up to which these kernels are the faster ones.
MAX_ROWS = 64
# The same of the LM head, which only Hopper's kernels take; they serve up to 256.
MAX_HEAD_ROWS = 128
# Without Hopper's kernels, numbers of a weight up to which they are: larger ones the library reads faster.
MAX_WEIGHT = 25_000_000


def serves(x_ND: Tensor, w: Tensor) -> bool:
    """Whether to take these kernels rather than the library's."""
    if len(x_ND) > MAX_ROWS or not w.is_contiguous():
        return False
    return w.numel() <= MAX_WEIGHT or (stream is not None and stream.streams(x_ND, w))


def linear_parts(x_ND: Tensor, w_FD: Tensor) -> Tensor:
    """x @ w.T as parts [S, N, F] to be added: float32, or x's dtype where S is 1."""
    if stream is not None and stream.streams(x_ND, w_FD):
        return stream.stream_parts(x_ND, w_FD)
    return matmul.linear_parts(x_ND, w_FD)


def joined_parts(x_ND: Tensor, y_ND: Tensor, w_F2D: Tensor) -> Tensor:
    """`linear_parts` of x and y side by side."""
    if stream is not None and stream.streams(x_ND, w_F2D) and stream.streams(y_ND, w_F2D):
        return stream.stream_parts(x_ND, w_F2D, more_x_ND=y_ND)
    return matmul.linear_parts(torch.cat((x_ND, y_ND), -1), w_F2D)


def gated_linear(x_ND: Tensor, w_2FD: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T): [N, F]; w is gate over up."""
    if stream is not None and stream.streams(x_ND, w_2FD):
        return stream.stream_gated(x_ND, w_2FD)
    return matmul.gated_linear(x_ND, w_2FD)


def head_logits(x_ND: Tensor, w_VD: Tensor) -> Tensor:
    """The LM head: x @ w.T [N, V]."""
    return head.head_logits(x_ND, w_VD) if _heads(x_ND, w_VD) else F.linear(x_ND, w_VD)


def head_largest(x_ND: Tensor, w_VD: Tensor) -> tuple[Tensor, Tensor]:
    """The first largest logit of each row [N], and whether it is finite."""
    return head.head_largest(x_ND, w_VD) if _heads(x_ND, w_VD) else largest_of(F.linear(x_ND, w_VD))


def _heads(x_ND: Tensor, w_VD: Tensor) -> bool:
    few = len(x_ND) <= MAX_HEAD_ROWS and w_VD.is_contiguous()
    return few and stream is not None and stream.streams(x_ND, w_VD)


def describe(device: torch.device) -> str:
    """Which kernels multiply on this device."""
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    how = "matrix products for Hopper" if hopper and stream is not None else "plain matrix products"
    return f"{how} up to {MAX_ROWS} rows"
