"""The layers of a looped LM: norm, attention projections, gated MLP, sandwich block. `ops` computes with them."""

# H heads, G key/value heads, K head dimension, D width; leading dimensions are free

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from looped.config import ModelConfig
from looped.model import ops
from looped.model.attention import Attend
from looped.model.ops import Rotary


class RMSNorm(nn.Module):
    """Root-mean-square norm in at least float32, cast back, then scaled in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    @property
    def op(self) -> ops.Norm:
        return ops.Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.op)


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Rotary:
    """Angles of `positions` [...] for the attention layers of a model."""
    return ops.rotary(positions, config.head_dim, config.rope_theta, config.rope_interleaved, dtype)


class Attention(nn.Module):
    """Projections around `attend`, which the caller gives; this module never sees a cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = ops.Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.rope_interleaved)
        rows = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.hidden_size, rows * config.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        bias = (2, 1, config.num_heads, config.head_dim)
        self.qk_bias = nn.Parameter(torch.zeros(bias)) if config.qk_bias else None

    def forward(self, x: Tensor, rope: Rotary, layer: int, attend: Attend) -> Tensor:
        """What `out` projects: [..., D] to [..., H K]."""
        q, k, v = ops.qkv(x, self.qkv.weight, self.qk_bias, rope, self.heads)
        attended: Tensor = attend(layer, q, k, v).flatten(-2)
        return attended


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What `down` projects: [..., D] to [..., F]."""
        return ops.gated(x, self.gate_up.weight)


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
        return self.between(x, self.norm_1(x), rope, layer, attend, None)[0]

    def between(
        self, x: Tensor, normed: Tensor, rope: Rotary, layer: int, attend: Attend, following: RMSNorm | None
    ) -> tuple[Tensor, Tensor]:
        """From x and its `norm_1` to the block's output and, in the same kernel, the norm that comes after it."""
        after = self.norm_after_sum
        attended = self.attention(normed, rope, layer, attend)
        x, normed = ops.merge(x, attended, self.attention.out.weight, self.norm_2.op, after, self.norm_3.op)
        follow = None if following is None else following.op
        return ops.merge(x, self.mlp(normed), self.mlp.down.weight, self.norm_4.op, after, follow)


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    rope: Rotary,
    first_layer: int,
    attend: Attend,
    final: RMSNorm | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """Blocks one after another, each ending with the norm the next one begins with; `final` ends the last. `normed` is
    the first one's norm of x, where that is known already."""
    chain = [block for block in blocks if isinstance(block, Block)]
    if normed is None:
        normed = chain[0].norm_1(x)
    followers = [*(block.norm_1 for block in chain[1:]), final]
    for layer, (block, following) in enumerate(zip(chain, followers, strict=True), start=first_layer):
        x, normed = block.between(x, normed, rope, layer, attend, following)
    return normed
