"""How tokens leave the loop in a walk over known sequences, and what a walk gives."""

# B sequences, N tokens of a pass, T positions, D width

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import Carry, Entry, Gate, Params
from looped.kv import KVLayout
from looped.model import LoopedLM


class ExitPolicy(NamedTuple):
    """How tokens leave: the KV layout, whether prompt tokens leave too, a bound gate, its threshold and floor.

    Threshold and floor are one a row [B], or one a place [B, T] where a whole sequence is one pass.
    """

    layout: KVLayout
    ragged_prefill: bool
    gate: Gate
    threshold: Tensor
    min_depth: Tensor

    @property
    def one_pass(self) -> bool:
        """A whole sequence can be run as one pass."""
        return not self.layout.cut_sensitive and not self.gate.uses_carry


class Walk(NamedTuple):
    """The start of the loop [B, T, D] as gates see it, states h_1..h_R [B, T, D], and exit depths [B, T] long."""

    start: Tensor
    states: list[Tensor]
    depths: Tensor

    def at(self, depths: Tensor) -> Tensor:
        """The states [B, T, D] after `depths` [B, T] loop steps."""
        out = self.states[0].clone()
        for step, h in enumerate(self.states[1:], 2):
            torch.where((depths == step)[..., None], h, out, out=out)
        return out


class Decisions:
    """A gate driven over the tokens of one pass [B, N]: `decide(step, z)` says who leaves after `step`.

    Tokens that are not `gated` [B, N] run all steps.
    """

    def __init__(
        self,
        model: LoopedLM,
        policy: ExitPolicy,
        start: Tensor,
        injection: Tensor | None,
        gated: Tensor,
        carry: Carry | None,
    ) -> None:
        last = model.config.max_loops
        threshold, min_depth = (x if x.ndim == 2 else x[:, None] for x in (policy.threshold, policy.min_depth))
        floor = torch.where(gated, min_depth, last).flatten()
        self.params = Params(threshold.double().expand(gated.shape).flatten(), floor, torch.full_like(floor, last))
        entry = Entry(
            start.view(-1, start.shape[-1]),
            None if injection is None else injection.view(-1, start.shape[-1]),
            carry,
            torch.zeros_like(floor),
            torch.ones_like(floor),
        )
        self.gate, self.shape = policy.gate, gated.shape
        self.state, self.ahead = self.gate.start(entry, self.params)

    def __call__(self, step: int, z: Tensor) -> Tensor:
        leaving = self.ahead
        steps = torch.full_like(self.params.min_depth, step)
        self.state, self.ahead = self.gate.step(self.state, z.view(-1, z.shape[-1]), steps, self.params)
        return (self.ahead if self.gate.latency == 0 else leaving).view(self.shape)
