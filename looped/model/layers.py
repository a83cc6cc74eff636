"""The layers of a looped LM: RMSNorm, rotary positions, attention projections, gated MLP, sandwich block."""

# H heads, G key/value heads, K head dimension, D width; leading dimensions are free

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.config import ModelConfig
from looped.model.attention import Attend


class RMSNorm(nn.Module):
    """Root-mean-square norm in at least float32, cast back, then scaled in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = wide.to(x.dtype) * self.weight
        return scaled


class Rotary(NamedTuple):
    """Cosines and sines [..., 1, K/2] of some positions, shared by every layer and loop step of one call."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotary:
    """Angles of `positions` [...] in at least float32; half-split rotary then rounds them to the activations' dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=wide) / config.head_dim
    angle = positions[..., None, None].to(wide) * (1.0 / config.rope_theta**exponent)
    out = wide if config.rope_interleaved else dtype
    return Rotary(angle.cos().to(out), angle.sin().to(out))


def rotate(x: Tensor, rope: Rotary, interleaved: bool) -> Tensor:
    """Rotate x [..., H, K] by its positions."""
    if interleaved:
        a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        pairs = torch.stack((a * rope.cos - b * rope.sin, a * rope.sin + b * rope.cos), -1)
        return pairs.flatten(-2).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * rope.cos - b * rope.sin, b * rope.cos + a * rope.sin), -1)


class Attention(nn.Module):
    """Projections around `attend`, which the caller gives; this module never sees a cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim, self.interleaved = config.head_dim, config.rope_interleaved
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes) * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        bias = (2, 1, config.num_heads, config.head_dim)
        self.qk_bias = nn.Parameter(torch.zeros(bias)) if config.qk_bias else None

    def forward(self, x: Tensor, rope: Rotary, layer: int, attend: Attend) -> Tensor:
        qkv: Tensor = self.qkv(x)
        q, k, v = torch.split(qkv.view(*x.shape[:-1], -1, self.head_dim), list(self.sizes), -2)
        if self.qk_bias is not None:
            q, k = q + self.qk_bias[0], k + self.qk_bias[1]
        q, k = rotate(q, rope, self.interleaved), rotate(k, rope, self.interleaved)
        out: Tensor = self.out(attend(layer, q, k, v).flatten(-2))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """A transformer layer with four norms: post-norms on the branch (Ouro) or on the sum (Huginn)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_after_sum = config.norm_after_sum
        self.norm_1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_3 = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm_4 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rotary, layer: int, attend: Attend) -> Tensor:
        attended = self.attention(self.norm_1(x), rope, layer, attend)
        x = self.norm_2(x + attended) if self.norm_after_sum else x + self.norm_2(attended)
        mixed = self.mlp(self.norm_3(x))
        out: Tensor = self.norm_4(x + mixed) if self.norm_after_sum else x + self.norm_4(mixed)
        return out
