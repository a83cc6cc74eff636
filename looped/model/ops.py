"""The operations of a layer: each in plain PyTorch, and fused into Triton kernels where those serve.

Plain is what defines the numbers: it trains, runs on any device in any dtype, and is what the reference decoder does
on a CPU. Kernels serve bfloat16 and float16 on NVIDIA GPUs that have Triton, where no gradient is wanted. They compute
in float32 and round wherever the plain operations round, so that the two differ by the order of sums alone.

Which kernel, and in which order it adds, depends on how many rows the batch has (1-16, 17-32, 33-64, more) and on the
weights' shapes, never on what is in the other rows. Products of few rows are the package's own, see
`kernels.products`; the rest are the library's.
"""

# [...] leading dimensions, N rows, D width, F intermediate width, H heads, G key/value heads, K head dim

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


class Norm(NamedTuple):
    """A root-mean-square norm: weight [D] and epsilon."""

    weight: Tensor
    eps: float


class Rotary(NamedTuple):
    """Cosines and sines [..., 1, K/2] of some positions, shared by every layer and loop step of one call."""

    cos: Tensor
    sin: Tensor


class Heads(NamedTuple):
    """How a projection's output divides: query and key/value heads, head dim, and how pairs are turned."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    interleaved: bool


class _Switch:
    """Whether kernels may run at all; see `plain`."""

    kernels = True


@contextmanager
def plain() -> Iterator[None]:
    """Every operation runs in PyTorch inside: for tests, and to compare."""
    before, _Switch.kernels = _Switch.kernels, False
    try:
        yield
    finally:
        _Switch.kernels = before


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """What inference on a device runs, as is said once at start."""
    if device.type != "cuda" or dtype not in HALVES or not _Switch.kernels:
        return "plain PyTorch"
    kernels = _kernels()
    if kernels is None:
        return "plain PyTorch (Triton is not installed)"
    overlap = "overlapped launches" if kernels.overlaps(device) else "launches one after another"
    return f"fused Triton kernels, {kernels.describe(device)}, {overlap}"


def fused(x: Tensor, *others: Tensor | None) -> ModuleType | None:
    """The kernels, if they serve these operands here and now: halves on a GPU, through which no gradient flows."""
    if not _served(x.device, x.dtype) or not x.numel() or torch.is_autocast_enabled(x.device.type):
        return None
    operands = (x, *(other for other in others if other is not None))
    if any(operand.dtype != x.dtype for operand in operands):
        return None
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return None
    return _kernels()


def _served(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in HALVES and _Switch.kernels and not torch.compiler.is_compiling()


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from looped.model.kernels import all as kernels
    except ImportError:
        return None
    return kernels


# Norms.


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Root-mean-square norm of [..., D] in at least float32, cast back, then scaled in the input's dtype."""
    kernels = fused(x, norm.weight)
    if kernels is not None:
        normed: Tensor = kernels.norm_rows(_rows(x), *norm).view(x.shape)
        return normed
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return wide.to(x.dtype) * norm.weight


def merge(
    x: Tensor, branch: Tensor, weight: Tensor, norm: Norm, after_sum: bool, following: Norm | None
) -> tuple[Tensor, Tensor]:
    """End a branch: project it and join it to the residual stream x [..., D].

    The sum is x + norm(branch @ weight.T), or norm of the sum of both with `after_sum`. Returns it and what the next
    operation reads: the norm `following` of it, itself where there is none.
    """
    kernels = fused(x, branch, weight, norm.weight, following and following.weight)
    if kernels is not None:
        rows = _rows(x)
        parts = _linear_parts(kernels, _rows(branch), weight)
        total, normed = kernels.merge_rows(rows, parts, *norm, after_sum, *(following or (None, 0.0)))
        total = total.view(x.shape)
        return total, total if normed is None else normed.view(x.shape)
    out = F.linear(branch, weight)
    total = rms_norm(x + out, norm) if after_sum else x + rms_norm(out, norm)
    return total, total if following is None else rms_norm(total, following)


def joined(x: Tensor, y: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None]:
    """Project x and y [..., D] side by side with `weight` [D, 2 D]: what comes out, and its norm where a kernel of few
    rows gives both."""
    kernels = fused(x, y, weight, norm.weight)
    if kernels is not None and kernels.serves(_rows(x), weight):
        parts = kernels.joined_parts(_rows(x), _rows(y), weight)
        out, normed = kernels.sum_norm_rows(parts, *norm, x.dtype)
        return out.view(x.shape), normed.view(x.shape)
    return F.linear(torch.cat((x, y), -1), weight), None


# Rotary positions.


def rotary(positions: Tensor, head_dim: int, theta: float, interleaved: bool, dtype: torch.dtype) -> Rotary:
    """Angles of `positions` [...] in at least float32; half-split rotary then rounds them to the activations' dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    out = wide if interleaved else dtype
    if _served(positions.device, dtype) and positions.numel():
        kernels = _kernels()
        if kernels is not None:
            shape = (*positions.shape, 1, head_dim // 2)
            cos, sin = kernels.angle_rows(
                positions.reshape(-1), _cached_frequencies(head_dim, theta, wide, positions.device), out
            )
            return Rotary(cos.view(shape), sin.view(shape))
    angle = positions[..., None, None].to(wide) * frequencies(head_dim, theta, wide, positions.device)
    return Rotary(angle.cos().to(out), angle.sin().to(out))


def frequencies(head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians a position turns each pair of a head by [K/2]."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim
    return 1.0 / theta**exponent


@functools.cache
def _cached_frequencies(head_dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return frequencies(head_dim, theta, dtype, device)


def rotate(x: Tensor, rope: Rotary, interleaved: bool) -> Tensor:
    """Rotate x [..., H, K] by its positions."""
    if interleaved:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        pairs = torch.stack((a * rope.cos - b * rope.sin, a * rope.sin + b * rope.cos), -1)
        return pairs.flatten(-2).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin), -1)


# Products.


def qkv(x: Tensor, weight: Tensor, bias: Tensor | None, rope: Rotary, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [..., H, K], rotated keys and values [..., G, K] of x [..., D].

    `bias` [2, 1, H, K] is added to queries and keys before they are turned.
    """
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    kernels = fused(x, weight, bias)
    if kernels is not None and rope.cos.shape[:-2] == x.shape[:-1]:
        parts = _linear_parts(kernels, _rows(x), weight)
        half = heads.head_dim // 2
        out = kernels.rope_rows(
            parts, bias, rope.cos.view(-1, half), rope.sin.view(-1, half), sum(sizes[:2]), heads.head_dim,
            heads.interleaved, x.dtype,
        )  # fmt: skip
        q, k, v = torch.split(out.view(*x.shape[:-1], -1, heads.head_dim), sizes, -2)
        return q, k, v
    q, k, v = torch.split(F.linear(x, weight).view(*x.shape[:-1], -1, heads.head_dim), sizes, -2)
    if bias is not None:
        q, k = q + bias[0], k + bias[1]
    return rotate(q, rope, heads.interleaved), rotate(k, rope, heads.interleaved), v


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of x [..., D] as [..., F]; gate and up are the halves of `weight` [2 F, D]."""
    kernels = fused(x, weight)
    if kernels is not None:
        rows = _rows(x)
        few = kernels.serves(rows, weight)
        out: Tensor = kernels.gated_linear(rows, weight) if few else kernels.silu_mul_rows(F.linear(rows, weight))
        return out.view(*x.shape[:-1], -1)
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


# The LM head.


def head(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [..., V] of x [..., D]."""
    kernels = fused(x, weight)
    if kernels is None:
        return F.linear(x, weight)
    logits: Tensor = kernels.head_logits(_rows(x), weight).view(*x.shape[:-1], -1)
    return logits


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [N, V] each row's largest, the first of equal ones, NaN before all: its id [N], and whether it is a
    finite number."""
    kernels = fused(logits)
    if kernels is not None:
        tokens, ok = kernels.largest_of(_rows(logits))
        return tokens, ok
    most, tokens = logits.max(-1)
    return tokens, most.isfinite()


def head_largest(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`largest` of `head`, of x [N, D]; kernels need not write the logits for it."""
    kernels = fused(x, weight)
    if kernels is None:
        return largest(F.linear(x, weight))
    tokens, ok = kernels.head_largest(_rows(x), weight)
    return tokens, ok


def _rows(x: Tensor) -> Tensor:
    """[N, D] with numbers of a row side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _linear_parts(kernels: ModuleType, x_ND: Tensor, weight: Tensor) -> Tensor:
    if kernels.serves(x_ND, weight):
        parts: Tensor = kernels.linear_parts(x_ND, weight)
        return parts
    return F.linear(x_ND, weight)[None]
