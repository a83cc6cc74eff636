"""A whole batch as one pass: where cutting a sequence into passes changes nothing and the gate needs nothing of the
token before.

Position j offers step r its K/V of step min(r, e_j). Under `depth` that is the step's own K/V, so attention is dense;
else a token that has left offers what it wrote last, and one plane holds what all offer.
"""

# B rows, T places, N = B T, D width, G key/value heads, K head dimension

from __future__ import annotations

import torch
from torch import Tensor

from looped.model import LoopedLM
from looped.train.gates import varlen
from looped.train.gates.leaving import Decisions, ExitPolicy, Walk
from looped.train.gates.sequences import Batch, Bounds


def run(model: LoopedLM, batch: Batch, policy: ExitPolicy) -> Walk:
    """The walk of a batch of whole sequences. What stands at places of padding means nothing."""
    shape, steps = batch.tokens.shape, model.config.max_loops
    bounds, positions = batch.bounds, batch.positions.flatten()
    gated = batch.decode | batch.prompt if policy.ragged_prefill else batch.decode
    offers = _Offers(model, bounds, dense=policy.layout.needs_dense)
    state = model.init_state(torch.zeros_like(positions), positions)
    h, injection = model.prelude(batch.tokens.flatten(), positions, offers.attend, state)
    start = model.readout(h)
    decide = Decisions(model, policy, start, injection, gated, None)
    depths = torch.full(shape, steps, device=h.device)
    states = []
    for step in range(1, steps + 1):
        # who leaves after step s has depth s from then on, so those still there are known without a mask of their own
        offers.begin(step, (depths >= step).flatten())
        h = model.core(h, injection, positions, step, offers.attend)
        states.append(h.view(*shape, -1))
        if step < steps:
            leaving = decide(step, model.readout(h)) & (depths == steps)
            depths = torch.where(leaving, step, depths)
    first = start if injection is None else injection
    return Walk(first.view(*shape, -1), states, depths)


class _Offers:
    """The K/V that tokens offer those behind them, layer by layer, and attention to them."""

    def __init__(self, model: LoopedLM, bounds: Bounds, dense: bool) -> None:
        self.core, self.bounds, self.dense = model.config.core_layers, bounds, dense
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.step, self.active_N11 = 0, torch.empty(0)

    def begin(self, step: int, active_N: Tensor) -> None:
        """Go on to a step, at which the tokens of `active_N` have not left yet."""
        self.step, self.active_N11 = step, active_N[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, H, K] and [N, G, K] to [N, H, K]."""
        if self.dense or layer not in self.core:
            return varlen.causal(q, k, v, self.bounds)
        if self.step == 1:  # nobody has left
            self.kept[layer] = (k.contiguous(), v.contiguous())
            return varlen.causal(q, k, v, self.bounds)
        kept_k, kept_v = self.kept[layer]
        for kept, new in ((kept_k, k), (kept_v, v)):
            torch.where(self.active_N11, new, kept, out=kept)
        return varlen.causal_own(q, kept_k, kept_v, k, v, self.bounds)
