"""Everything the engine keeps of a sequence on the device, as rows indexed by slot. Slot 0 is padding.

A stage gathers the rows of its slots, runs, and scatters the results back; sequences never move. Padding rows write to
slot 0, whose values stay those of an idle slot.
"""

# S slots, N rows of a batch, D width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import Carry, Entry, Gate, Params
from looped.infer.rowops import CODA, CORE, IDLE, PRELUDE
from looped.infer.scheduler import Stage
from looped.infer.transfer import upload
from looped.model import LoopedLM

PHASE_OF = {Stage.PRELUDE: PRELUDE, Stage.CORE: CORE, Stage.CODA: CODA}


class SlotInit(NamedTuple):
    """What a slot starts with."""

    slot: int
    seed: int
    threshold: float
    min_depth: int
    max_depth: int
    max_len: int
    ordinal: int


class Resume(NamedTuple):
    """Where a sequence goes on whose K/V were computed again: its newest token and what the gate remembers."""

    slot: int
    token: int
    position: int
    token_index: int
    carry: tuple[Tensor, ...]


class DeviceState:
    """Rows by slot. `step` counts the loop steps the current token has run; `index` is the number of the token that
    its pass will produce; `phase` is the queue the token stands in, `since` the launch that put it there."""

    def __init__(self, model: LoopedLM, gate: Gate | None, num_slots: int, dense: bool) -> None:
        self.device, self.gate = model.device, gate
        self.num_slots = num_slots
        width, dtype = model.config.hidden_size, model.dtype

        def rows(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=kind, device=self.device)

        long, wide = torch.long, torch.promote_types(dtype, torch.float32)
        self.token, self.position, self.step = rows(long), rows(long), rows(long)
        self.seed, self.request, self.index = rows(long), rows(long), rows(long)
        self.phase, self.since, self.max_len = rows(long), rows(long), rows(long)
        self.threshold = rows(torch.float64)
        self.min_depth, self.max_depth = rows(long), rows(long)
        self.h = rows(dtype, width)
        self.injection = rows(dtype, width) if model.config.injection else None
        self.ahead = rows(torch.bool)
        self.carry = Carry(rows(dtype, width), rows(wide), rows(wide), rows(wide))
        # With dense compute a token loops on after its exit: where it left, and how deep.
        self.exited = rows(torch.bool) if dense else None
        self.exit_h = rows(dtype, width) if dense else None
        self.depth = rows(long) if dense else None
        self.gate_state = self._gate_rows(model)

    def _gate_rows(self, model: LoopedLM) -> tuple[Tensor, ...]:
        """The gate's state takes its shapes from what it makes of one idle row."""
        if self.gate is None:
            return ()
        at = torch.zeros(1, dtype=torch.long, device=self.device)
        h = self.h[at]
        entry = Entry(model.readout(h), self.injection_of(at), self.carry_rows(at), self.request[at], self.index[at])
        state, _ = self.gate.start(entry, self.params(at))
        return tuple(value.new_zeros((self.num_slots, *value.shape[1:])) for value in state)

    def admit(self, inits: Sequence[SlotInit]) -> None:
        """Write the parameters of new sequences into their slots, which are idle until their prompts are done."""
        at = upload([init.slot for init in inits], torch.long, self.device)
        whole = upload(
            [(i.seed, i.min_depth, i.max_depth, i.max_len, i.ordinal) for i in inits], torch.long, self.device
        )
        columns = (self.seed, self.min_depth, self.max_depth, self.max_len, self.request)
        for column, values in zip(columns, whole.unbind(1), strict=True):
            column[at] = values
        self.threshold[at] = upload([init.threshold for init in inits], torch.float64, self.device)
        self.index.index_fill_(0, at, 0)
        self.phase.index_fill_(0, at, IDLE)

    def resume(self, rows: Sequence[Resume]) -> None:
        """Let sequences whose K/V were computed again go on with their newest token."""
        at = upload([row.slot for row in rows], torch.long, self.device)
        whole = upload([(row.token, row.position, row.token_index) for row in rows], torch.long, self.device)
        for column, values in zip((self.token, self.position, self.index), whole.unbind(1), strict=True):
            column[at] = values
        for column, parts in zip(self.carry, zip(*(row.carry for row in rows), strict=True), strict=True):
            column[at] = torch.stack(parts).to(self.device, non_blocking=True)
        self.phase.index_fill_(0, at, PRELUDE)

    def idle(self, slots: Sequence[int]) -> None:
        """Take slots out of every queue: their sequences were ended by the host."""
        self.phase.index_fill_(0, upload(slots, torch.long, self.device), IDLE)

    def injection_of(self, at_N: Tensor) -> Tensor | None:
        return None if self.injection is None else self.injection[at_N]

    def params(self, at_N: Tensor) -> Params:
        return Params(self.threshold[at_N], self.min_depth[at_N], self.max_depth[at_N])

    def gate_rows(self, at_N: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows[at_N] for rows in self.gate_state)

    def put_gate_rows(self, at_N: Tensor, values: tuple[Tensor, ...]) -> None:
        for rows, value in zip(self.gate_state, values, strict=True):
            rows[at_N] = value

    def carry_rows(self, at_N: Tensor) -> Carry:
        return Carry(*(rows[at_N] for rows in self.carry))

    def put_carry(self, at_N: Tensor, carry: Carry) -> None:
        for rows, value in zip(self.carry, carry, strict=True):
            rows[at_N] = value.to(rows.dtype)

    # Preemption. These wait for the device.

    def _moving(self) -> Iterator[Tensor]:
        """Rows that a sequence takes along; its parameters are written again by `admit`."""
        yield from (self.token, self.position, self.step, self.index, self.phase, self.since, self.h, self.ahead)
        yield from self.carry
        yield from self.gate_state
        yield from (rows for rows in (self.injection, self.exited, self.exit_h, self.depth) if rows is not None)

    def save(self, slot: int) -> tuple[Tensor, ...]:
        """What a sequence needs to go on in another slot, on the host."""
        return tuple(rows[slot].clone().cpu() for rows in self._moving())

    def load(self, slot: int, saved: tuple[Tensor, ...]) -> None:
        for rows, value in zip(self._moving(), saved, strict=True):
            rows[slot] = value

    def save_carry(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(rows[slot].clone().cpu() for rows in self.carry)
