"""Prefill: pieces of prompts, packed into one batch of rows, through prelude, loop and coda.

Where every row runs all loop steps at once, `dense.py` does it. Here a row may leave the loop early: in a ragged
prefill because the gate says so, after a preemption because the depth of its first run is known. Rows that left are not
computed any further; later queries read their planes as in decode. And prompts may ride along with decode.
"""

# N rows, D width

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looped.decode import DecodePolicy
from looped.gates import Entry, Gate, Params
from looped.infer.backends import Piece, PrefillBatch
from looped.infer.dense import DensePrompts
from looped.infer.stages import Sampled, Stages
from looped.infer.transfer import upload
from looped.model.attention import Attend, dense_causal


class PromptPiece(NamedTuple):
    """Tokens of one sequence from position `start` on. `depths` are known for rows that ran before; `sample` asks for
    the token behind the last row."""

    slot: int
    start: int
    token_ids: Sequence[int]
    prompt_len: int
    depths: Sequence[int] | None
    sample: bool


class Prefilled(NamedTuple):
    """`depths` of the rows, packed; `sampled` are the first tokens of the prompts that are complete."""

    sampled: Sampled | None
    depths: NDArray[np.int64]


class PromptBatch:
    """Rows of a prefill on their way through the loop."""

    def __init__(self, pieces: Sequence[PromptPiece], stages: Stages, gate: Gate | None) -> None:
        device = stages.model.device
        self.pieces, self.gate, self.step = pieces, gate, 0
        lens = [len(piece.token_ids) for piece in pieces]
        self.stops = np.cumsum(lens)
        self.slots = np.repeat([piece.slot for piece in pieces], lens)
        self.positions = np.concatenate([np.arange(p.start, p.start + n) for p, n in zip(pieces, lens, strict=True)])
        known = [np.full(n, -1) if p.depths is None else p.depths for p, n in zip(pieces, lens, strict=True)]
        depths = np.concatenate(known).astype(np.int64)
        self.decided = (depths < 0) & (gate is not None)
        """Rows whose depth is the gate's to say."""
        # With dense compute all rows run R loops, and their depth is where the state they leave with is taken.
        self.depths = np.where(depths < 0, stages.max_loops, depths)
        self.ragged = bool(self.decided.any() or (self.depths < stages.max_loops).any())
        self.opens = self.ragged and stages.policy.layout.aliases and not stages.dense
        """Pages are taken plane by plane, for the rows that are left."""
        self.left = np.arange(len(self.slots))
        self.slots_N = upload(self.slots, torch.long, device)
        self.positions_N = upload(self.positions, torch.long, device)
        self.left_N: Tensor | None = None
        """The rows still in the loop, None while all are."""
        self.h: Tensor
        self.injection: Tensor | None = None
        self.exit_h: Tensor | None = None
        self.gate_state: tuple[Tensor, ...] = ()
        self.ahead: Tensor
        self.params: Params

    def rows(self) -> PrefillBatch:
        """What the rows still in the loop are for the attention."""
        slots, positions = self.slots_N, self.positions_N
        if self.left_N is not None:
            slots, positions = slots[self.left_N], positions[self.left_N]
        return PrefillBatch.of(slots, positions, self._pieces())

    def _pieces(self) -> list[Piece]:
        pieces, cuts = [], np.searchsorted(self.left, self.stops)
        for prompt, start, stop in zip(self.pieces, [0, *cuts[:-1]], cuts, strict=True):
            if start < stop:
                at = self.positions[self.left[start:stop]]
                pieces.append(Piece(prompt.slot, int(start), int(stop), int(at[0]), int(at[-1]) + 1))
        return pieces

    def of(self, values: Tensor) -> Tensor:
        """The rows of a tensor that are still in the loop."""
        return values if self.left_N is None else values[self.left_N]


class Prompts:
    """Prefill on the engine's stages."""

    def __init__(self, stages: Stages, policy: DecodePolicy, max_num_batched_tokens: int) -> None:
        self.stages, self.policy = stages, policy
        num_seqs, longest = stages.state.num_slots - 1, stages.kv.max_len
        self.dense = DensePrompts(stages, min(max_num_batched_tokens, num_seqs * longest))
        self.model, self.kv, self.backend, self.state = stages.model, stages.kv, stages.backend, stages.state

    def run(self, pieces: Sequence[PromptPiece], level: int) -> Prefilled:
        """All of it at once."""
        if self._dense(pieces):
            depths = np.full(sum(len(piece.token_ids) for piece in pieces), self.policy.max_depth, dtype=np.int64)
            return Prefilled(self.dense.run(pieces, level), depths)
        batch = self.start(pieces)
        for _ in range(self.policy.max_depth):
            self.loop(batch)
        return self.finish(batch, level)

    def _dense(self, pieces: Sequence[PromptPiece]) -> bool:
        """Whether every row runs all loop steps and leaves with the last one's state."""
        deepest = self.policy.max_depth
        return self.policy.prefill is None and all(p.depths is None or min(p.depths) == deepest for p in pieces)

    def start(self, pieces: Sequence[PromptPiece]) -> PromptBatch:
        """Pages and the prelude."""
        model, state = self.model, self.state
        batch = PromptBatch(pieces, self.stages, self.stages.gate if self.policy.prefill is not None else None)
        for piece in pieces:
            stop = piece.start + len(piece.token_ids)
            if batch.opens:
                self.kv.cover_outer(piece.slot, piece.start, stop)
            else:
                self.kv.cover_prompt(piece.slot, piece.start, stop)
        self.kv.flush()
        noise = model.init_state(state.seed[batch.slots_N], batch.positions_N)
        tokens = upload(np.concatenate([piece.token_ids for piece in pieces]), torch.long, model.device)
        batch.h, batch.injection = model.prelude(tokens, batch.positions_N, self._outer(batch), noise)
        if self.policy.dense_compute and batch.ragged:
            batch.exit_h = batch.h.clone()
        if batch.decided.any():
            self._start_gate(batch)
        return batch

    def _start_gate(self, batch: PromptBatch) -> None:
        schedule, gate = self.policy.prefill, batch.gate
        assert schedule is not None and gate is not None
        cuts = torch.split(batch.positions_N, [len(piece.token_ids) for piece in batch.pieces])
        thresholds = [schedule.thresholds(at, p.prompt_len) for at, p in zip(cuts, batch.pieces, strict=True)]
        protected = batch.positions_N < schedule.protected
        deepest = torch.full_like(batch.positions_N, self.policy.max_depth)
        floor = torch.where(protected, deepest, self.state.min_depth[batch.slots_N])
        batch.params = Params(torch.cat(thresholds), floor, deepest)
        none = torch.zeros_like(batch.positions_N)
        entry = Entry(self.model.readout(batch.h), batch.injection, None, none, none)
        batch.gate_state, batch.ahead = gate.start(entry, batch.params)

    def loop(self, batch: PromptBatch) -> None:
        """One loop step of the rows that are left."""
        if not len(batch.left):
            batch.step += 1
            return
        attend = self.attend(batch)
        h, injection, positions = self.inputs(batch)
        self.took(batch, self.model.core(h, injection, positions, batch.step, attend))

    def attend(self, batch: PromptBatch) -> Attend:
        """The next step's attention: pages of the plane it writes exist from now on."""
        batch.step += 1
        plane = self.policy.layout.write_plane(batch.step)
        rows = batch.rows()
        if batch.opens:
            for piece in rows.pieces:
                self.kv.open_prompt(piece.slot, plane, batch.positions[batch.left[piece.start : piece.stop]])
            self.kv.flush()
        return self.backend.prefill(self.kv.core, rows, plane)

    def inputs(self, batch: PromptBatch) -> tuple[Tensor, Tensor | None, Tensor]:
        injection = None if batch.injection is None else batch.of(batch.injection)
        return batch.of(batch.h), injection, batch.of(batch.positions_N)

    def took(self, batch: PromptBatch, h: Tensor) -> None:
        """Take the step's states; rows that leave are closed and no longer among those left."""
        batch.h = h if batch.left_N is None else batch.h.index_copy(0, batch.left_N, h)
        if not batch.ragged:
            return
        leaving = batch.depths[batch.left] == batch.step
        if batch.decided.any():
            leaving |= self._decide(batch, h) & batch.decided[batch.left]
        out = batch.left[leaving]
        if not len(out):
            return
        batch.depths[out] = batch.step
        if batch.exit_h is not None:
            at = upload(out, torch.long, self.model.device)
            batch.exit_h[at] = h[at]
            batch.decided[out] = False
            return
        batch.left = batch.left[~leaving]
        self._close(batch, out)
        batch.left_N = upload(batch.left, torch.long, self.model.device)

    def _decide(self, batch: PromptBatch, h: Tensor) -> NDArray[np.bool_]:
        """Who of the rows left leaves by the gate's word. Waits for the device: the next step's rows depend on it."""
        assert batch.gate is not None
        state = tuple(batch.of(rows) for rows in batch.gate_state)
        params = Params(*(batch.of(values) for values in batch.params))
        step = torch.full_like(params.max_depth, batch.step)
        # Models with coda layers do not come here for logits, so nothing attends.
        logits = batch.gate.needs_logits
        seen = self.model.coda(h, batch.of(batch.positions_N), dense_causal) if logits else self.model.readout(h)
        state, decision = batch.gate.step(state, seen, step, params)
        leaving: NDArray[np.bool_] = (decision if batch.gate.latency == 0 else batch.of(batch.ahead)).cpu().numpy()
        if batch.left_N is None:
            batch.gate_state, batch.ahead = state, decision
        else:
            olds, at = batch.gate_state, batch.left_N
            batch.gate_state = tuple(old.index_copy(0, at, new) for old, new in zip(olds, state, strict=True))
            batch.ahead = batch.ahead.index_copy(0, at, decision)
        return leaving

    def _close(self, batch: PromptBatch, out: NDArray[np.int64]) -> None:
        """The planes that rows leaving now never wrote."""
        if self.policy.layout.aliases:
            for slot in dict.fromkeys(batch.slots[out].tolist()):
                mine = out[batch.slots[out] == slot]
                self.kv.close_prompt(slot, batch.positions[mine].astype(np.int32), batch.step)
            return
        at = upload(out, torch.long, self.model.device)
        depths = torch.full_like(at, batch.step)
        self.kv.close(batch.slots_N[at], batch.positions_N[at], depths, torch.ones_like(at, dtype=torch.bool))

    def finish(self, batch: PromptBatch, level: int) -> Prefilled:
        """The coda, for whose layers every row runs, and the first token behind each complete prompt."""
        self.kv.flush()
        last = [int(stop) - 1 for stop, piece in zip(batch.stops, batch.pieces, strict=True) if piece.sample]
        if not last and self.kv.outer is None:
            return Prefilled(None, batch.depths)
        h = batch.h if batch.exit_h is None else batch.exit_h
        rows = upload(last, torch.long, self.model.device)
        batch.left_N, batch.left = None, np.arange(len(batch.slots))
        end = self.model.coda_state(h, batch.positions_N, self._outer(batch), rows=rows)
        if not last:
            return Prefilled(None, batch.depths)
        depths = upload(batch.depths[last], torch.long, self.model.device)
        sampled = self.stages.next_tokens(batch.slots_N[rows], h[rows], end, batch.positions_N[rows], depths, level)
        return Prefilled(sampled, batch.depths)

    def _outer(self, batch: PromptBatch) -> Attend:
        if self.kv.outer is None:
            return dense_causal
        return self.backend.prefill(self.kv.outer, batch.rows(), 0)


class Riders:
    """A prefill whose rows run in the core steps of decode batches, one loop step in each."""

    def __init__(self, prompts: Prompts, batch: PromptBatch) -> None:
        self.prompts, self.batch = prompts, batch

    def share(
        self, h_BD: Tensor, injection_BD: Tensor | None, positions_B: Tensor, step_B: Tensor, attend: Attend
    ) -> Tensor:
        """One core step of B decode rows and the prompt's N rows; returns the states of the former, [B, D]."""
        rows = len(positions_B)
        prompt = self.prompts.attend(self.batch)
        h, injection, positions = self.prompts.inputs(self.batch)
        step = torch.cat((step_B, torch.full_like(positions, self.batch.step)))

        def both(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            decoded = attend(layer, q_NHK[:rows], k_NGK[:rows], v_NGK[:rows])
            return torch.cat((decoded, prompt(layer, q_NHK[rows:], k_NGK[rows:], v_NGK[rows:])))

        if injection is not None and injection_BD is not None:
            injection = torch.cat((injection_BD, injection))
        out = self.prompts.model.core(torch.cat((h_BD, h)), injection, torch.cat((positions_B, positions)), step, both)
        self.prompts.took(self.batch, out[rows:])
        return out[:rows]
