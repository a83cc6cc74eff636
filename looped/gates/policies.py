"""Gates that measure nothing: a fixed depth, recorded depths, and the wrapper that delays another gate."""

# B rows, D width

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.protocol import Carry, Entry, Gate, Params, State

if TYPE_CHECKING:
    from looped.config import ModelConfig
    from looped.model import LoopedLM

# Above the loops of any model; what a depth must fit into is an int64.
_MOST_LOOPS = 1 << 31


class _KnownDepth(Gate):
    """A gate that knows the exit depth of a decode token beforehand. Takes no threshold."""

    latency = 1
    decode_only = True
    threshold = 0.0
    threshold_range = (-math.inf, math.inf)

    def depth(self, entry: Entry) -> Tensor:
        """Exit depths [B]."""
        raise NotImplementedError

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        depth = torch.maximum(self.depth(entry), params.min_depth)
        return (depth,), depth <= 1

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        return state, state[0] <= step + 1


class FixedGate(_KnownDepth):
    """Every decode token leaves after `n` loop steps; prompts run at full depth."""

    kind = "fixed"

    def __init__(self, n: int) -> None:
        if n < 1:
            raise LoopedError(f"the fixed gate needs a depth of at least 1, got {n}")
        if n > _MOST_LOOPS:
            raise LoopedError(f"no model has the {n} loops of the fixed gate")
        self.n = n

    @property
    def name(self) -> str:
        return f"fixed-{self.n}"

    def depth(self, entry: Entry) -> Tensor:
        return torch.full_like(entry.token_index, self.n)


class ReplayGate(_KnownDepth):
    """Replays recorded depths: `depths[i]` for token i of the request, or one such list for each request of a call.

    Entry 0 belongs to the prefill and is not used; tokens past the end run at full depth.
    """

    kind = "replay"

    def __init__(self, depths: Sequence[int] | Sequence[Sequence[int]]) -> None:
        rows = [[d] if isinstance(d, int) else [*d] for d in depths]
        self.shared = all(isinstance(d, int) for d in depths)
        lists = [[d for row in rows for d in row]] if self.shared else rows
        if not any(lists) or min(d for row in lists for d in row) < 1:
            raise LoopedError("the replay gate needs depths of at least 1")
        width = max(map(len, lists)) + 1
        never_early = torch.iinfo(torch.int64).max
        self.table = torch.full((len(lists), width), never_early, dtype=torch.int64)
        for row, values in enumerate(lists):
            self.table[row, : len(values)] = torch.tensor(values)

    def bind(self, model: LoopedLM) -> ReplayGate:
        bound = copy.copy(self)
        bound.table = self.table.to(model.device)
        return bound

    def check_request(self, ordinal: int) -> None:
        if not self.shared and ordinal >= self.table.shape[0]:
            raise LoopedError(f"the replay gate holds depths of {self.table.shape[0]} requests; more were given")

    def depth(self, entry: Entry) -> Tensor:
        # Clamped, because rows of slots without a sequence hold whatever the last one left.
        row = entry.request.clamp(0, self.table.shape[0] - 1)
        return self.table[row, entry.token_index.clamp(0, self.table.shape[1] - 1)]


class DelayGate(Gate):
    """A latency-0 gate whose decision takes effect one loop step later, so that it is known ahead (Huginn's way)."""

    kind = "delay"
    latency = 1

    def __init__(self, inner: Gate) -> None:
        if inner.latency != 0:
            raise LoopedError(f"the {inner.name} gate is known one step ahead already; delay=1 wraps latency-0 gates")
        self.inner = inner
        self.uses_carry, self.min_depth = inner.uses_carry, inner.min_depth + 1
        self.threshold, self.threshold_range = inner.threshold, inner.threshold_range
        self.needs_logits = inner.needs_logits
        self.layout, self.prefill = inner.layout, inner.prefill

    @property
    def name(self) -> str:
        return f"delayed-{self.inner.name}"

    def bind(self, model: LoopedLM) -> DelayGate:
        return DelayGate(self.inner.bind(model))

    def default_threshold(self, config: ModelConfig) -> float:
        return self.inner.default_threshold(config)

    def check_threshold(self, threshold: float) -> float:
        return self.inner.check_threshold(threshold)

    def check_request(self, ordinal: int) -> None:
        self.inner.check_request(ordinal)

    def as_block(self) -> DelayGate:
        return DelayGate(self.inner.as_block())

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return self.inner.start(entry, self._inner_params(params))

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        return self.inner.step(state, z, step, self._inner_params(params))

    def finish(self, z: Tensor, logits: Tensor, token: Tensor, depth: Tensor) -> Carry:
        return self.inner.finish(z, logits, token, depth)

    def _inner_params(self, params: Params) -> Params:
        """The floor is about the exit, one step after the inner gate's decision."""
        return params._replace(min_depth=params.min_depth - 1)
