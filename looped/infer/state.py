"""Everything the engine keeps of a sequence on the device, as rows indexed by slot. Slot 0 is padding.

A stage gathers the rows of its slots, runs, and scatters the results back; sequences never move.
"""

# S slots, N rows of a batch, D width

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import Carry, Gate, Params
from looped.model import LoopedLM


class SlotInit(NamedTuple):
    """What a slot starts with."""

    slot: int
    seed: int
    temperature: float
    threshold: float
    min_depth: int
    max_depth: int
    ordinal: int


class DeviceState:
    """Rows by slot. `step` counts the loop steps the current token has run; `index` is the number of the token that
    its pass will produce."""

    def __init__(self, model: LoopedLM, gate: Gate | None, num_slots: int, dense: bool) -> None:
        self.device, self.gate = model.device, gate
        width, dtype = model.config.hidden_size, model.dtype

        def rows(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((num_slots, *shape), dtype=kind, device=self.device)

        long, wide = torch.long, torch.promote_types(dtype, torch.float32)
        self.token, self.position, self.step = rows(long), rows(long), rows(long)
        self.seed, self.request, self.index = rows(long), rows(long), rows(long)
        self.temperature = rows(torch.float32)
        self.threshold = rows(torch.float64)
        self.min_depth, self.max_depth = rows(long), rows(long)
        self.h = rows(dtype, width)
        self.injection = rows(dtype, width) if model.config.injection else None
        self.ahead = rows(torch.bool)
        self.gate_state: tuple[Tensor, ...] = ()
        self.carry = Carry(rows(dtype, width), rows(wide), rows(wide), rows(wide))
        # With dense compute a token loops on after its exit: where it left, and how deep.
        self.exited = rows(torch.bool) if dense else None
        self.exit_h = rows(dtype, width) if dense else None
        self.depth = rows(long) if dense else None

    def index_of(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.device)

    def admit(self, inits: list[SlotInit]) -> None:
        """Write the parameters of new sequences into their slots."""
        at = self.index_of([init.slot for init in inits])
        columns = {
            "seed": [init.seed for init in inits],
            "temperature": [init.temperature for init in inits],
            "threshold": [init.threshold for init in inits],
            "min_depth": [init.min_depth for init in inits],
            "max_depth": [init.max_depth for init in inits],
            "request": [init.ordinal for init in inits],
        }
        for name, values in columns.items():
            column: Tensor = getattr(self, name)
            column[at] = torch.tensor(values, dtype=column.dtype, device=self.device)

    def params(self, at_N: Tensor) -> Params:
        return Params(self.threshold[at_N], self.min_depth[at_N], self.max_depth[at_N])

    def gate_rows(self, at_N: Tensor) -> tuple[Tensor, ...]:
        return tuple(rows[at_N] for rows in self.gate_state)

    def put_gate_rows(self, at_N: Tensor, values: tuple[Tensor, ...]) -> None:
        """Scatter a gate's state; the rows take their shapes from the first one seen."""
        if not self.gate_state:
            slots = self.token.shape[0]
            self.gate_state = tuple(value.new_zeros((slots, *value.shape[1:])) for value in values)
        for rows, value in zip(self.gate_state, values, strict=True):
            rows[at_N] = value

    def carry_rows(self, at_N: Tensor) -> Carry:
        return Carry(*(rows[at_N] for rows in self.carry))

    def put_carry(self, at_N: Tensor, carry: Carry) -> None:
        for rows, value in zip(self.carry, carry, strict=True):
            rows[at_N] = value.to(rows.dtype)
