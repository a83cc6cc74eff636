"""What gates with weights have in common: heads, the teacher they belong to, what they look at."""

# B rows, D width, R loop steps, N heads, K sets of weights, F features, M hidden units

from __future__ import annotations

import copy
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.protocol import Carry, Entry, Gate, wide
from looped.model import LoopedLM


class Hidden(NamedTuple):
    """A hidden layer beside linear heads: out . gelu(weight x + bias).

    Heads on loop steps have a layer each, weight [N, M, F], bias [N, M], out [N, M], or share one: weight [1, M, F] and
    out [1, M], while bias [N, M] tells the steps apart. Heads on one input share weight [1, M, F] and bias [1, M] and
    have out [N, M].
    """

    weight_KMF: Tensor
    bias_KM: Tensor
    out_NM: Tensor


class TrainedGate(Gate):
    """A gate with linear heads [N, F] and bias [N], bound to the model they were trained on.

    `inputs` names what it looks at. `hidden` is added to the linear heads' logits where there is one.
    """

    known_inputs: ClassVar[tuple[str, ...]] = ("state",)
    """All that gates of this kind may look at, in the order of features."""
    default_inputs: ClassVar[tuple[str, ...]] = ("state",)

    def __init__(
        self,
        weight_NF: Tensor,
        bias_N: Tensor,
        hidden: Hidden | None = None,
        *,
        hidden_size: int,
        max_loops: int,
        teacher: str,
        revision: str,
        inputs: tuple[str, ...] | None = None,
    ) -> None:
        self.weight_NF, self.bias_N, self.hidden = weight_NF, bias_N, hidden
        self.hidden_size, self.max_loops = hidden_size, max_loops
        self.teacher, self.revision = teacher, revision
        self.inputs = self.default_inputs if inputs is None else inputs

    @classmethod
    def num_features(cls, inputs: tuple[str, ...], hidden_size: int) -> int:
        """F of the inputs: a vector's width, one for a number."""
        return sum(hidden_size if name in VECTORS else 1 for name in inputs)

    @classmethod
    def num_heads(cls, max_loops: int) -> int:
        """N for a model of R loops."""
        raise NotImplementedError

    def check_model(self, model: LoopedLM, kind: str) -> None:
        """Raise `LoopedError`, about a gate of this `kind`, where `model` is not the teacher or runs more loops."""
        if model.config.hidden_size != self.hidden_size or model.revision != self.revision:
            raise LoopedError(
                f"this {kind} gate was made for {self.teacher} (width {self.hidden_size}, weights "
                f"{self.revision[:12]}) and cannot run on {model.name}; train one with `looped train-gate`"
            )
        if model.config.max_loops > self.max_loops:
            raise LoopedError(
                f"this {kind} gate was made for {self.max_loops} loops; {model.name} runs {model.config.max_loops}"
            )

    def bind(self, model: LoopedLM) -> Self:
        self.check_model(model, self.kind)
        bound = copy.copy(self)
        dtype = torch.promote_types(model.dtype, torch.float32)
        bound.weight_NF = self.weight_NF.to(model.device, dtype)
        bound.bias_N = self.bias_N.to(model.device, dtype)
        if self.hidden is not None:
            bound.hidden = Hidden(*(x.to(model.device, dtype) for x in self.hidden))
        return bound


VECTORS = ("embedding", "state", "change")
"""Inputs that are vectors of the model's width; the others are numbers."""


class StepHeads(TrainedGate):
    """Heads on what a loop step leaves: one a step, weight [N, F], or one for all steps, weight [1, F]."""

    def head_logits(self, x: Tensor, head: Tensor) -> Tensor:
        """Logits [B] of features [B, F] by the heads with numbers `head` [B]: rows may be at different steps."""
        head = head.clamp(0, self.bias_N.shape[0] - 1)
        shared = self.weight_NF.shape[0] == 1
        logits = (x * (self.weight_NF[0] if shared else self.weight_NF[head])).sum(-1) + self.bias_N[head]
        if self.hidden is None:
            return logits
        if shared:
            active_BM = F.gelu(x @ self.hidden.weight_KMF[0].T + self.hidden.bias_KM[head])
            return logits + (active_BM * self.hidden.out_NM[0]).sum(-1)
        active_BNM = F.gelu(torch.einsum("bf,nmf->bnm", x, self.hidden.weight_KMF) + self.hidden.bias_KM)
        return logits + (active_BNM * self.hidden.out_NM).sum(-1).gather(1, head[:, None])[:, 0]


def relative_change(z: Tensor, before: Tensor) -> Tensor:
    """||z - before|| / ||z|| of readouts [..., D], what the convergence criterion looks at: [...]."""
    now = wide(z)
    change: Tensor = (now - wide(before)).norm(dim=-1) / now.norm(dim=-1)
    return change


def entry_features(entry: Entry, inputs: tuple[str, ...]) -> Tensor:
    """`pre_loop_features` of rows about to enter the loop; a token's input is its injection where the model has one."""
    return pre_loop_features(entry.z0 if entry.injection is None else entry.injection, entry.carry, inputs)


def pre_loop_features(entry_input: Tensor, carry: Carry | None, inputs: tuple[str, ...]) -> Tensor:
    """What a gate sees before the loop: [B, F] of the token's input [B, D] and the carry of the token before it.

    Without a token before it, what would come from there is zero.
    """
    x = wide(entry_input)
    parts = []
    for name in inputs:
        if name == "embedding":
            parts.append(x)
        elif name == "state":
            parts.append(torch.zeros_like(x) if carry is None else wide(carry.z).to(x.dtype))
        else:
            value = x.new_zeros(x.shape[0]) if carry is None else getattr(carry, name).to(x.dtype)
            parts.append(value[:, None])
    return torch.cat(parts, -1)
