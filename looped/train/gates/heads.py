"""Heads in training: linear on standardised inputs, with a hidden layer beside them where wanted."""

# n positions, N heads, K sets of weights, F features, M hidden units

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.gates.trained import Hidden

_SMALLEST_SPREAD = 1e-6
_DROPOUT = 0.1


class Finished(NamedTuple):
    """Heads as they act on inputs as they are: weight [K, F], bias [N], and the hidden layer."""

    weight: Tensor
    bias: Tensor
    hidden: Hidden | None


class Heads(nn.Module):
    """N heads in float32. With `steps` each has an input of its own, and they have K = N sets of weights or share one;
    else all see one input and K = N.

    Weights act on standardised inputs, with mean and scale taken from a first batch, so that one step size and one
    ridge suit every input; the finished gate has them folded in. A `single` bias is the same for all heads. `hidden`
    units start without effect; while `linear` is set they are left out.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, num_heads: int, num_features: int, hidden: int, *, steps: bool, shared: bool = False, single: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.steps = num_heads, steps
        self.sets = 1 if shared or single else num_heads
        self.layers = self.sets if steps else 1
        self.weight = nn.Parameter(torch.zeros(self.sets, num_features))
        self.bias = nn.Parameter(torch.zeros(1 if single else num_heads))
        self.register_buffer("mean", torch.zeros(self.layers, num_features))
        self.register_buffer("scale", torch.ones(self.layers, num_features))
        self.linear = hidden == 0
        self.hidden = nn.ParameterList()
        if hidden:
            generator = torch.Generator().manual_seed(0)
            start = torch.randn(self.layers, hidden, num_features, generator=generator) / num_features**0.5
            biases = (1 if single else num_heads) if steps else 1
            parts = (start, torch.zeros(biases, hidden), torch.zeros(self.sets, hidden))
            self.hidden.extend(nn.Parameter(part) for part in parts)

    def standardise(self, inputs: Sequence[Tensor]) -> None:
        """Take mean and scale from a first batch of inputs [n, F], one a head with `steps`, else one; what the heads
        say of inputs stays the same."""
        weight, bias, _ = self.finished()
        pooled = [torch.cat(list(inputs))] if self.layers == 1 else inputs
        mean = torch.stack([x.mean(0) for x in pooled])
        spread = torch.stack([x.std(0) for x in pooled])
        with torch.no_grad():
            self.mean.copy_(mean)
            self.scale.copy_(torch.where(spread > _SMALLEST_SPREAD, spread, torch.ones_like(spread)))
            self.weight.copy_(weight * self.scale)
            shift = (weight * self.mean).sum(-1)
            self.bias.copy_((bias + shift)[: len(self.bias)])

    def finished(self) -> Finished:
        """The heads as they act on inputs as they are."""
        weight = self.weight / self.scale
        bias = (self.bias - (weight * self.mean).sum(-1)).expand(self.num_heads)
        return Finished(weight, bias, self._layer() if self.hidden else None)

    def _layer(self) -> Hidden:
        weight, bias, out = self.hidden
        raw = weight / self.scale[:, None]
        shifted = bias - (raw * self.mean[:, None]).sum(-1)
        return Hidden(raw, shifted.expand(self.num_heads, -1) if self.steps else shifted, out)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Logits [n, N] of inputs [n, F], one a head with `steps`, else one."""
        weight, bias, layer = self.finished()
        if not self.steps:
            logits = inputs[0] @ weight.T + bias
            if self.linear or layer is None:
                return logits
            return logits + self._active(inputs[0] @ layer.weight_KMF[0].T + layer.bias_KM[0]) @ layer.out_NM.T
        columns = []
        for r, x in enumerate(inputs):
            k = r if self.sets > 1 else 0
            column = x @ weight[k] + bias[r]
            if not self.linear and layer is not None:
                column = column + self._active(x @ layer.weight_KMF[k].T + layer.bias_KM[r]) @ layer.out_NM[k]
            columns.append(column)
        return torch.stack(columns, -1)

    def _active(self, x: Tensor) -> Tensor:
        """The hidden units' non-linearity, with dropout while training."""
        return F.dropout(F.gelu(x), _DROPOUT, self.training)
