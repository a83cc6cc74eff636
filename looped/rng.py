"""Counter-based random numbers: a pure function of (seed, position, stream, index).

Sampling and Huginn's initial state draw from here, in the reference decoder and in the engine alike, so batch
composition, preemption and scheduling never change a seeded request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLING = 1
INITIAL_STATE = 2

_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9 as int64
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB as int64
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as int64


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place: every output bit depends on every input bit. Products wrap."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


def uniform(seeds: Tensor, positions: Tensor, stream: int, n: int) -> Tensor:
    """Uniform numbers in (0, 1): seeds [...] and positions [...] (int64) to [..., n] float64, on their device.

    24 random bits and a half: in float32 the largest would round to 1.
    """
    # Rows are as wide as a vocabulary: what is made of them is changed in place.
    key = _mix_(seeds.long() + _GOLDEN)
    key = _mix_(_mix_(key ^ positions.long()) + stream)
    index = torch.arange(1, n + 1, device=seeds.device, dtype=torch.int64).mul_(_GOLDEN)
    bits = _shift(_mix_(key[..., None] + index), 40)
    return bits.double().add_(0.5).mul_(1.0 / (1 << 24))


def truncated_normal(seeds: Tensor, positions: Tensor, stream: int, n: int, std: float, dtype: torch.dtype) -> Tensor:
    """Normal numbers of scale `std` cut at three of them: [...] seeds and positions to [..., n].

    Computed in float64 so that every device and dtype rounds the same value.
    """
    u = uniform(seeds, positions, stream, n)
    low = 0.5 * (1 + math.erf(-3 / math.sqrt(2)))
    z: Tensor = torch.special.ndtri(low + u * (1 - 2 * low))
    return (z * std).to(dtype)
