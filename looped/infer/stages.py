"""The four stages over packed rows: gather the slots of a batch, run the model, scatter back.

Every scheduler runs these and nothing else. Positions and loop steps of a batch are known to the host as well, since
the engine waits for the exits of every core step.
"""

# N rows, D width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looped.decode import DecodePolicy
from looped.gates import Entry
from looped.infer.backends import Backend, DecodeBatch, PrefillBatch
from looped.infer.pages import KVMemory, Pool
from looped.infer.scheduler import Chunk
from looped.infer.state import DeviceState
from looped.model import LoopedLM
from looped.model.attention import Attend, dense_causal
from looped.sampling import sample


class Row(NamedTuple):
    """One sequence in a decode batch, as the host knows it: `step` is the number of loop steps run so far."""

    slot: int
    position: int
    step: int


class Sampled(NamedTuple):
    """New tokens of a batch, in its order. `ok` is False where the logits were not finite."""

    tokens: list[int]
    depths: list[int]
    ok: list[bool]


class Stages:
    """The model run stage by stage on the engine's state and KV pools."""

    def __init__(
        self, model: LoopedLM, policy: DecodePolicy, state: DeviceState, kv: KVMemory, backend: Backend
    ) -> None:
        self.model, self.state, self.kv, self.backend = model, state, kv, backend
        self.layout, self.max_loops, self.dense = policy.layout, policy.max_depth, policy.dense_compute
        self.gate = state.gate
        planes = [self.layout.write_plane(step) for step in range(1, self.max_loops + 1)]
        self._planes = torch.tensor([0, *planes], device=model.device)

    # Prompts.

    def prefill(self, chunks: tuple[Chunk, ...], token_ids: Sequence[int]) -> Sampled:
        """Run pieces of prompts at full depth; returns the first tokens of the prompts that are complete now."""
        state, model = self.state, self.model
        for chunk in chunks:
            self.kv.cover_prompt(chunk.slot, chunk.start, chunk.start + chunk.length)
        self.kv.flush()
        batch = self._packed(chunks)
        outer = self._prefill_attend(self.kv.outer, batch, 0)
        noise = model.init_state(state.seed[batch.slots], batch.positions)
        tokens = torch.tensor(token_ids, device=model.device)
        h, injection = model.prelude(tokens, batch.positions, outer, noise)
        for step in range(1, self.max_loops + 1):
            plane = self.layout.write_plane(step)
            h = model.core(h, injection, batch.positions, step, self._prefill_attend(self.kv.core, batch, plane))
        ends = np.cumsum([chunk.length for chunk in chunks]) - 1
        last = state.index_of([int(end) for end, chunk in zip(ends, chunks, strict=True) if chunk.last])
        if not len(last) and self.kv.outer is None:
            return Sampled([], [], [])
        logits = model.coda(h, batch.positions, outer, rows=last)
        if not len(last):
            return Sampled([], [], [])
        at = batch.slots[last]
        state.index[at] = 0
        depths = torch.full_like(at, self.max_loops)
        return self._sample(at, h[last], logits, batch.positions[last], depths)

    def _packed(self, chunks: tuple[Chunk, ...]) -> PrefillBatch:
        slots = np.concatenate([np.full(chunk.length, chunk.slot) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.length) for chunk in chunks])
        device = self.model.device
        return PrefillBatch(torch.from_numpy(slots).to(device), torch.from_numpy(positions).to(device), chunks)

    def _prefill_attend(self, pool: Pool | None, batch: PrefillBatch, plane: int) -> Attend:
        return dense_causal if pool is None else self.backend.prefill(pool, batch, plane)

    # One token of each sequence.

    def prelude(self, rows: Sequence[Row]) -> None:
        """Take the last tokens into the loop: embedding, the layers before the core, the gate's state."""
        state, model = self.state, self.model
        rows = sorted(rows, key=_position)
        for row in rows:
            self.kv.cover_token(row.slot, row.position)
        self.kv.flush()
        at = state.index_of([row.slot for row in rows])
        positions = state.position[at]
        noise = model.init_state(state.seed[at], positions)
        h, injection = model.prelude(state.token[at], positions, self._outer_attend(at, rows), noise)
        state.h[at] = h
        state.step[at] = 0
        if state.injection is not None and injection is not None:
            state.injection[at] = injection
        if state.exited is not None:
            state.exited[at] = False
        if self.gate is not None:
            carry = state.carry_rows(at) if self.gate.uses_carry else None
            entry = Entry(model.readout(h), injection, carry, state.request[at], state.index[at])
            gate_rows, ahead = self.gate.start(entry, state.params(at))
            state.put_gate_rows(at, gate_rows)
            state.ahead[at] = ahead

    def core(self, rows: Sequence[Row]) -> list[int]:
        """One loop step of every row, whatever step it is at; returns the slots that leave the loop."""
        state = self.state
        rows = sorted(rows, key=_position)
        slots, positions, steps = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        self.kv.open_planes(slots, positions, steps + 1)
        self.kv.flush()
        at = state.index_of([row.slot for row in rows])
        step = state.step[at] + 1
        batch = DecodeBatch(at, self._planes[step], state.position[at], [row.position + 1 for row in rows])
        injection = None if state.injection is None else state.injection[at]
        h = self.model.core(state.h[at], injection, batch.positions, step, self.backend.decode(self.kv.core, batch))
        state.h[at] = h
        state.step[at] = step
        leaving = self._decide(at, h, step, steps + 1)
        if leaving.any():
            depths = np.full(int(leaving.sum()), self.max_loops) if self.dense else steps[leaving] + 1
            self.kv.close(slots[leaving], positions[leaving], depths)
        return [int(slot) for slot in slots[leaving]]

    def _decide(self, at: Tensor, h: Tensor, step: Tensor, host_steps: np.ndarray) -> np.ndarray:
        """Which rows leave the loop now: bool [N] on the host."""
        state = self.state
        params = state.params(at)
        exits = step >= params.max_depth
        if self.gate is not None:
            gate_rows, decision = self.gate.step(state.gate_rows(at), self.model.readout(h), step, params)
            state.put_gate_rows(at, gate_rows)
            exits = exits | (decision if self.gate.latency == 0 else state.ahead[at])
            state.ahead[at] = decision
        if not self.dense:
            return exits.cpu().numpy()
        self._mark_exits(at, exits)
        return host_steps >= self.max_loops

    def _mark_exits(self, at: Tensor, exits: Tensor) -> None:
        """Dense compute: remember where each token left; it loops on to write all its planes."""
        state = self.state
        assert state.exited is not None and state.exit_h is not None and state.depth is not None
        first = at[exits & ~state.exited[at]]
        state.exit_h[first] = state.h[first]
        state.depth[first] = state.step[first]
        state.exited[first] = True

    def coda(self, rows: Sequence[Row]) -> Sampled:
        """The layers after the core, the head, and the next token of every row; results in the order of `rows`."""
        state = self.state
        order = sorted(range(len(rows)), key=lambda i: rows[i].position)
        rows = [rows[i] for i in order]
        at = state.index_of([row.slot for row in rows])
        h = (state.h if state.exit_h is None else state.exit_h)[at]
        depths = (state.step if state.depth is None else state.depth)[at]
        positions = state.position[at]
        logits = self.model.coda(h, positions, self._outer_attend(at, rows))
        sampled = self._sample(at, h, logits, positions, depths)
        back = sorted(range(len(order)), key=order.__getitem__)
        return Sampled(
            [sampled.tokens[i] for i in back], [sampled.depths[i] for i in back], [sampled.ok[i] for i in back]
        )

    def _outer_attend(self, at: Tensor, rows: Sequence[Row]) -> Attend:
        if self.kv.outer is None:
            return dense_causal
        lens = [row.position + 1 for row in rows]
        batch = DecodeBatch(at, torch.zeros_like(at), self.state.position[at], lens)
        return self.backend.decode(self.kv.outer, batch)

    def _sample(self, at: Tensor, h: Tensor, logits: Tensor, positions: Tensor, depths: Tensor) -> Sampled:
        """Choose the tokens behind `positions` and leave everything their own passes need."""
        state = self.state
        tokens = sample(logits, state.temperature[at], state.seed[at], positions + 1)
        state.token[at] = tokens
        state.position[at] = positions + 1
        state.index[at] += 1
        if self.gate is not None and self.gate.uses_carry:
            state.put_carry(at, self.gate.finish(self.model.readout(h), logits, tokens, depths))
        # The largest logit is NaN or infinite if any of the row's logits is NaN or +inf.
        ok = logits.amax(-1).isfinite()
        return Sampled(tokens.tolist(), depths.tolist(), ok.tolist())


def _position(row: Row) -> int:
    return row.position
