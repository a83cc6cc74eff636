"""What every token of known sequences sees at every loop step, when the tokens before it left as a gate decides.

The states of distillation targets. Tokens offer others the K/V they left under a KV layout; a token's states past its
own exit are those it would meet if it alone ran on: it still reads what the others left, it reads its own K/V of the
present step, and nobody sees that. Up to its exit this is what the reference decoder computes, and one stream carries
both: every token runs all R steps, only the K/V it commits stop at its exit.

Where cutting a sequence into passes changes nothing (`depth`, `last-exited`, `ragged`) and the gate needs nothing of
the token before, a whole batch of sequences is one pass, packed or not, see `one_pass`. Else the prompt is one pass and
each later token another, with a cache of all planes.
"""

# B sequences, N tokens of a pass, T positions, D width, H heads, G key/value heads, K head dimension

from __future__ import annotations

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates import Carry
from looped.model import LoopedLM
from looped.model.attention import Attend, dense_causal
from looped.train.gates import one_pass
from looped.train.gates.leaving import Decisions, ExitPolicy, Walk
from looped.train.gates.sequences import Batch, Packed, Sequences

_QUERY_BLOCK = 256


@torch.no_grad()
def walk(model: LoopedLM, batch: Batch, policy: ExitPolicy) -> Walk:
    """Run the sequences of a batch under a policy. States where a sequence has ended mean nothing.

    Raises LoopedError for packed sequences under a policy that takes them token by token.
    """
    if policy.one_pass:
        return one_pass.run(model, batch, policy)
    if isinstance(batch, Packed):
        raise LoopedError(
            f"sequences are packed, but layout {policy.layout.name} with the {policy.gate.name} gate takes them token "
            "by token; give one sequence a row"
        )
    runner = _Runner(model, batch, policy)
    length, positions = batch.tokens.shape[1], batch.positions
    longest = int(batch.prompt_lens.max())
    prompt = runner.run(positions[:, :longest], gated=torch.full_like(batch.decode[:, :longest], policy.ragged_prefill))
    out = _Collected(prompt, length)
    out.put(prompt, positions[:, :longest])
    runner.remember(prompt, batch.prompt_lens - 1)
    passes = batch.lengths - 1 - batch.prompt_lens
    for index in range(int(passes.max())):
        runner.narrow(int((passes > index).nonzero()[-1]) + 1)
        at = torch.minimum(runner.batch.prompt_lens + index, runner.batch.lengths - 1)[:, None]
        step = runner.run(at, gated=torch.ones_like(at, dtype=torch.bool))
        out.put(step, at)
        runner.remember(step, torch.zeros_like(at[:, 0]), at[:, 0])
    return out.walk


class _Collected:
    """The walk of whole sequences, filled pass by pass."""

    def __init__(self, like: Walk, length: int) -> None:
        rows, _, width = like.start.shape
        start = like.start.new_zeros(rows, length, width)
        depths = like.depths.new_ones(rows, length)
        self.walk = Walk(start, [torch.zeros_like(start) for _ in like.states], depths)

    def put(self, part: Walk, positions: Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.walk.start[rows, positions] = part.start
        self.walk.depths[rows, positions] = part.depths
        for whole, h in zip(self.walk.states, part.states, strict=True):
            whole[rows, positions] = h


class _Runner:
    """Passes over one batch, with what they leave in the cache and as carry."""

    def __init__(self, model: LoopedLM, batch: Sequences, policy: ExitPolicy) -> None:
        self.model, self.batch, self.policy = model, batch, policy
        self.layout = policy.layout
        self.carry: Carry | None = None
        self.rows = torch.arange(batch.tokens.shape[0], device=batch.tokens.device)[:, None]
        config = model.config
        planes = self.layout.num_planes(config.max_loops)
        shape = (2, *batch.tokens.shape, config.num_kv_heads, config.head_dim)
        self.kv = [
            model.embed.weight.new_zeros((planes if layer in config.core_layers else 1, *shape))
            for layer in range(config.num_layers)
        ]

    def narrow(self, num_rows: int) -> None:
        """Go on with the first `num_rows` sequences: those behind them have ended."""
        self.batch = Sequences(*(x[:num_rows] for x in self.batch))
        self.policy = self.policy._replace(
            threshold=self.policy.threshold[:num_rows], min_depth=self.policy.min_depth[:num_rows]
        )
        self.kv = [x[:, :, :num_rows] for x in self.kv]
        self.rows = self.rows[:num_rows]
        if self.carry is not None:
            self.carry = Carry(*(x[:num_rows] for x in self.carry))

    def run(self, positions: Tensor, gated: Tensor) -> Walk:
        """One pass of the tokens at `positions` [B, N]; those not `gated` [B, N] run R steps."""
        model, steps = self.model, self.model.config.max_loops
        tokens = self.batch.tokens.gather(1, positions)
        everyone = torch.ones_like(gated)
        state = model.init_state(torch.zeros_like(positions), positions)
        h, injection = model.prelude(tokens, positions, self._attend(positions, None, everyone), state)
        start = model.readout(h)
        carry = self.carry if positions.shape[1] == 1 else None
        decide = Decisions(model, self.policy, start, injection, gated, carry)
        depths = torch.full_like(positions, steps)
        active, states = everyone, []
        for step in range(1, steps + 1):
            commits = everyone if self.policy.layout.needs_dense else active
            h = model.core(h, injection, positions, step, self._attend(positions, step, commits))
            states.append(h)
            leaving = decide(step, model.readout(h)) & active if step < steps else active
            depths = torch.where(leaving, step, depths)
            if not self.policy.layout.needs_dense:
                self._fill_missing(positions, leaving, step)
            active = active & ~leaving
        return Walk(start if injection is None else injection, states, depths)

    def remember(self, part: Walk, at: Tensor, positions: Tensor | None = None) -> None:
        """Leave the carry of column `at` [B] of a pass, whose position is `at` unless `positions` [B] says another."""
        if not self.policy.gate.uses_carry:
            return
        where = at if positions is None else positions
        following = torch.minimum(where + 1, self.batch.lengths - 1)
        h = part.at(part.depths)[self.rows[:, 0], at]
        logits = self.model.coda(h, where, dense_causal)
        token = self.batch.tokens[self.rows[:, 0], following]
        depth = part.depths[self.rows[:, 0], at]
        self.carry = self.policy.gate.finish(self.model.readout(h), logits, token, depth)

    def _attend(self, positions: Tensor, step: int | None, commits: Tensor) -> Attend:
        """Attention of a pass at `step` (None outside the core) that stores the K/V of the tokens in `commits`."""
        core, plane = self.model.config.core_layers, 0
        if step is not None:
            plane = self.layout.write_plane(step)
        whole = positions.shape[1] == self.batch.tokens.shape[1]
        plain = positions.shape[1] > 1 and bool(commits.all())  # a pass of many starts at position 0
        end = int(positions.max()) + 1

        def run(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept_k, kept_v = self.kv[layer][plane if layer in core else 0]
            for kept, new in ((kept_k, k), (kept_v, v)):
                if whole:
                    torch.where(commits[..., None, None], new, kept, out=kept)
                else:
                    kept[self.rows, positions] = torch.where(commits[..., None, None], new, kept[self.rows, positions])
            if plain:
                return dense_causal(layer, q, k, v)
            return attend_own(q, kept_k[:, :end], kept_v[:, :end], k, v, positions)

        return run

    def _fill_missing(self, positions: Tensor, leaving: Tensor, step: int) -> None:
        """Planes that tokens leaving after `step` never wrote."""
        for plane, source in self.layout.missing_planes(step, self.model.config.max_loops):
            for layer in self.model.config.core_layers:
                new = self.kv[layer][source][:, self.rows, positions]
                old = self.kv[layer][plane][:, self.rows, positions]
                self.kv[layer][plane][:, self.rows, positions] = torch.where(leaving[..., None, None], new, old)


def attend_own(q: Tensor, kept_k: Tensor, kept_v: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attention to what earlier positions kept and to the own key and value of now.

    q [B, N, H, K] at `positions` [B, N], kept_k and kept_v [B, T, G, K], k and v [B, N, G, K], to [B, N, H, K].
    """
    group = q.shape[2] // k.shape[2]
    heads_k, heads_v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (kept_k, kept_v))
    own_k, own_v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    parts = []
    for first in range(0, q.shape[1], _QUERY_BLOCK):
        block = slice(first, first + _QUERY_BLOCK)
        at = positions[:, block]
        end = int(at.max()) + 1
        parts.append(
            _attend_block(
                q[:, block].transpose(1, 2),
                heads_k[:, :, :end],
                heads_v[:, :, :end],
                own_k[:, :, block],
                own_v[:, :, block],
                at[:, None, :, None],
            )
        )
    return torch.cat(parts, 2).transpose(1, 2)


def _attend_block(q: Tensor, kept_k: Tensor, kept_v: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """`attend_own` of a block of queries [B, H, N, K], heads first, at positions [B, 1, N, 1]."""
    q = q * q.shape[-1] ** -0.5
    scores = q @ kept_k.transpose(-1, -2)
    own_column = at.expand(-1, q.shape[1], -1, -1)
    scores.scatter_(-1, own_column, (q * k).sum(-1, keepdim=True))
    scores.masked_fill_(torch.arange(scores.shape[-1], device=q.device) > at, float("-inf"))
    weights = scores.softmax(-1)
    own = weights.gather(-1, own_column)
    return weights.scatter_(-1, own_column, 0.0) @ kept_v + own * v
