"""The stages over rows of slots: gather, run the model, scatter back.

Every scheduler and every way to hear of exits runs these and nothing else. A decode stage is a function of one tensor
of slots; what it needs beyond that lies in the rows of `DeviceState`. Nothing in it waits for the device, so it can be
captured in a CUDA graph. Prompts run in `dense.py` and `prompts.py`.
"""

# N rows, D width, V vocabulary

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from looped.decode import DecodePolicy
from looped.gates import Entry
from looped.infer.backends import Backend, DecodeBatch
from looped.infer.graphs import Graphs
from looped.infer.pages import KVMemory
from looped.infer.pool import Pool
from looped.infer.rowops import CODA, CORE, IDLE, row_ops
from looped.infer.sampler import Sampler
from looped.infer.state import DeviceState
from looped.infer.transfer import upload
from looped.model import LoopedLM
from looped.model.attention import Attend, dense_causal
from looped.sampling import Drawn
from looped.sampling_options import GREEDY

if TYPE_CHECKING:
    from looped.infer.prompts import Riders


class Sampled(NamedTuple):
    """New tokens of a batch, on the device. `rows_4N` are slots (0: padding), tokens, depths, and whether the logits
    were finite, in one tensor for one transfer; see `Drawn` for the rest."""

    rows_4N: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class Stages:
    """The decode stages on the engine's state and KV pools."""

    def __init__(
        self,
        model: LoopedLM,
        policy: DecodePolicy,
        state: DeviceState,
        kv: KVMemory,
        backend: Backend,
        sampler: Sampler,
        graphs: Graphs,
        pad: bool,
    ) -> None:
        self.model, self.policy, self.state = model, policy, state
        self.kv, self.backend, self.sampler, self.graphs = kv, backend, sampler, graphs
        self.gate, self.max_loops, self.dense = state.gate, policy.max_depth, policy.dense_compute
        self._pad = pad
        device = model.device
        self.ops = row_ops(device)
        planes = [policy.layout.write_plane(step) for step in range(1, self.max_loops + 1)]
        self._planes = torch.tensor([0, *planes], device=device)
        # The slots of a host-picked batch, where graphs look for them; and how many launches there were.
        self._slots = torch.zeros(state.num_slots, dtype=torch.long, device=device)
        self.tick = torch.zeros(1, dtype=torch.long, device=device)
        self._max_len = 0
        self._capturing = False

    # Launching.

    def bucket(self, rows: int) -> int:
        """Rows that a batch of `rows` is padded to."""
        buckets = self.graphs.buckets
        return buckets[bisect.bisect_left(buckets, rows)] if self._pad else rows

    def on(
        self, name: str, slots: Sequence[int], max_len: int, run: Callable[[Tensor], tuple[Tensor | None, ...]]
    ) -> tuple[Tensor | None, ...]:
        """Run a stage on slots that the host picked. `max_len` bounds the keys of any row."""
        rows = self.bucket(len(slots))
        at = self._slots[:rows]
        at.copy_(upload([*slots, *[0] * (rows - len(slots))], torch.long, self.model.device))
        return self.launch((name, rows), max_len, lambda: run(at))

    def among(
        self, name: str, phase: int, rows: int, max_len: int, run: Callable[[Tensor], tuple[Tensor | None, ...]]
    ) -> tuple[Tensor | None, ...]:
        """Run a stage on up to `rows` slots of a queue that the device picks; what waits beyond them stays."""
        rows = self.bucket(max(rows, 1))
        return self.launch((name, "device", rows), max_len, lambda: run(self.ops.select(self.state, phase, rows)))

    @property
    def pads(self) -> bool:
        """Whether batches are padded to the sizes of graphs."""
        return self._pad

    def launch(
        self,
        key: tuple[object, ...],
        max_len: int,
        run: Callable[[], tuple[Tensor | None, ...]],
        warm_up: Callable[[], tuple[Tensor | None, ...]] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Replay what was captured under `key`, or run it. `max_len` bounds the keys of any row; `warm_up` is what
        runs before a capture, where less than all of it is enough."""
        self.kv.flush()
        # A replayed graph must serve every length, and padded batches do the same work with graphs and without.
        self._max_len = self.kv.max_len if self._pad else max_len
        if self._capturing:
            return self.graphs.capture(key, run, warm_up)
        return self.graphs.run(key, run)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Launches are recorded as CUDA graphs instead. Every slot must be idle, and those given 0."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    # Stages, as functions of the slots of their rows.

    def prelude(self, at: Tensor) -> Tensor | None:
        """Take the last tokens of the rows that wait for it into the loop: embedding, the layers before the core, the
        gate's state. Returns who is known to leave after the first loop step: bool [N], or None where nobody can."""
        state, model = self.state, self.model
        at, positions, tokens = self.ops.fresh(state, at)
        noise = model.init_state(state.seed[at], positions) if model.config.injection else None
        h, injection = model.prelude(tokens, positions, self._outer_attend(at, positions), noise)
        self.ops.enter(state, self.tick, at, h)
        if state.injection is not None and injection is not None:
            state.injection[at] = injection
        if state.exited is not None:
            state.exited.index_fill_(0, at, False)
        if self.gate is None:
            return None
        carry = state.carry_rows(at) if self.gate.uses_carry else None
        entry = Entry(model.readout(h), injection, carry, state.request[at], state.index[at])
        gate_rows, ahead = self.gate.start(entry, state.params(at))
        state.put_gate_rows(at, gate_rows)
        state.ahead[at] = ahead
        return None if self.dense else ahead  # with dense compute a decision picks the output, nobody leaves by it

    def core(self, at: Tensor, riders: Riders | None = None) -> tuple[Tensor, Tensor | None]:
        """One loop step of every row, whatever step it is at. Returns who leaves the loop now, and who is known to
        leave after the next step (None without a gate): bool [N] each. `riders` are rows of prompts that share it."""
        state = self.state
        positions, step, planes, h = self.ops.begin(state, self._planes, at)
        self.kv.open(at, positions, step)
        injection = state.injection_of(at)
        attend = self.backend.decode(self.kv.core, DecodeBatch(at, planes, positions, self._max_len))
        if riders is None:
            h = self.model.core(h, injection, positions, step, attend)
        else:
            h = riders.share(h, injection, positions, step, attend)
        said = self._ask(at, h, positions, step)
        if self.dense:
            leaving, depths, ahead = self._loop_on(at, h, step, said), torch.full_like(step, self.max_loops), None
        else:
            late = self.gate is not None and self.gate.latency == 1
            leaving, depths, ahead = self.ops.leave(state, self.tick, at, step, h, said, late), step, said
        self.kv.close(at, positions, depths, leaving)
        return leaving, ahead

    def _ask(self, at: Tensor, h: Tensor, positions: Tensor, step: Tensor) -> Tensor | None:
        """What the gate says after a step: bool [N], or None without one."""
        if self.gate is None:
            return None
        state, model = self.state, self.model
        if self.gate.needs_logits:
            seen = model.coda(h, positions, self._outer_attend(at, positions))
        else:
            seen = model.readout(h)
        gate_rows, said = self.gate.step(state.gate_rows(at), seen, step, state.params(at))
        state.put_gate_rows(at, gate_rows)
        return said

    def _loop_on(self, at: Tensor, h: Tensor, step: Tensor, said: Tensor | None) -> Tensor:
        """Dense compute: remember where each token left; it loops on to write all its planes. Returns who is done."""
        state = self.state
        assert state.exited is not None and state.exit_h is not None and state.depth is not None
        exits = step >= state.max_depth[at]
        if said is not None and self.gate is not None:
            exits = exits | (said if self.gate.latency == 0 else state.ahead[at])
        first = torch.where(exits & ~state.exited[at], at, 0)
        # Rows that do not exit now write to slot 0 what belongs to others, which nobody reads.
        state.exit_h[first], state.depth[first] = h, step
        state.exited.index_fill_(0, first, True)
        leaving = self.ops.leave(state, self.tick, at, step, h, said, False)
        state.phase[at] = torch.where(at > 0, torch.where(step >= self.max_loops, CODA, CORE), IDLE)
        return (step >= self.max_loops) & leaving

    def coda(self, at: Tensor, level: int) -> Sampled:
        """The layers after the core, the head, and the next token of every row that waits for it."""
        at, positions, depths, h = self.ops.outcome(self.state, at)
        end = self.model.coda_state(h, positions, self._outer_attend(at, positions))
        return self.next_tokens(at, h, end, positions, depths, level)

    def fused(self, at: Tensor, level: int) -> Sampled:
        """A core step whose exits run the coda and the next token's prelude at once."""
        return self.land(self.exits(at), level)

    def exits(self, at: Tensor) -> Tensor:
        """A core step; its slots, of which those that left now wait for the coda [N]."""
        self.core(at)
        return at

    def land(self, at: Tensor, level: int) -> Sampled:
        """Coda and next prelude of the rows that left with a core step; the others run as padding."""
        sampled = self.coda(at, level)
        self.prelude(at)
        return sampled

    def next_tokens(self, at: Tensor, h: Tensor, end: Tensor, positions: Tensor, depths: Tensor, level: int) -> Sampled:
        """Choose the tokens behind `positions` and leave everything their own passes need. `h` are the states that
        left the loop, `end` what the coda made of them up to its head."""
        state, model, gate = self.state, self.model, self.gate
        remembers = gate is not None and gate.uses_carry
        if level == GREEDY and not remembers:
            return self._put(at, Drawn(*model.likeliest(end)), positions, depths)
        logits = model.logits_of(end)
        drawn: Drawn = self.sampler(logits, at, positions, state.index[at], level)
        if gate is not None and remembers:
            state.put_carry(at, gate.finish(model.readout(h), logits, drawn.tokens, depths))
        return self._put(at, drawn, positions, depths)

    def _put(self, at: Tensor, drawn: Drawn, positions: Tensor, depths: Tensor) -> Sampled:
        """Put new tokens into their rows, which go on to the prelude or end."""
        ends = self.sampler.end_ids, self.sampler.min_tokens
        rows = self.ops.land(self.state, self.tick, at, drawn.tokens, drawn.ok, positions, depths, *ends)
        return Sampled(rows, drawn.logprob, drawn.top_ids, drawn.top_logprobs)

    def _outer_attend(self, at: Tensor, positions: Tensor) -> Attend:
        pool: Pool | None = self.kv.outer
        if pool is None:
            return dense_causal
        return self.backend.decode(pool, DecodeBatch(at, torch.zeros_like(at), positions, self._max_len))
