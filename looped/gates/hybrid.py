"""The hybrid gate: a pre-loop head decides about the first loop step, lookahead heads about the others."""

# B rows, D width, R loop steps

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import Tensor

from looped.errors import LoopedError
from looped.gates.hazard import LookaheadGate, PreLoopGate, crosses
from looped.gates.protocol import Entry, Gate, Params, State
from looped.gates.trained import entry_features

if TYPE_CHECKING:
    from looped.model import LoopedLM


class HybridGate(Gate):
    """lambda_1 is predicted before the loop, lambda_{r+1} from z_r; every exit is known one step ahead, e = 1 too.

    C(r) = 1 - prod_{j<=r} (1 - lambda_j) over all of them, nothing folded unless min_depth is raised. Of the pre-loop
    part the first head alone is kept. Raises `LoopedError` for parts of different teachers.
    """

    kind = "hybrid"
    latency = 1

    def __init__(self, pre_loop: PreLoopGate, lookahead: LookaheadGate) -> None:
        for name in ("teacher", "revision", "hidden_size", "max_loops"):
            if getattr(pre_loop, name) != getattr(lookahead, name):
                raise LoopedError(
                    f"a hybrid gate needs two parts of one teacher; their {name} are {getattr(pre_loop, name)!r} and "
                    f"{getattr(lookahead, name)!r}"
                )
        self.pre_loop, self.lookahead = pre_loop.first_only(), lookahead

    @property
    def uses_carry(self) -> bool:  # type: ignore[override]
        """Its pre-loop part looks at the token before."""
        return self.pre_loop.uses_carry

    @property
    def teacher(self) -> str:
        """Name of the model it was made for."""
        return self.lookahead.teacher

    @property
    def revision(self) -> str:
        """Hash of that model's weights."""
        return self.lookahead.revision

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.lookahead.hidden_size

    @property
    def max_loops(self) -> int:
        """The most loops a model may run with it."""
        return self.lookahead.max_loops

    def bind(self, model: LoopedLM) -> HybridGate:
        self.lookahead.check_model(model, self.kind)
        bound = copy.copy(self)
        bound.pre_loop, bound.lookahead = self.pre_loop.bind(model), self.lookahead.bind(model)
        return bound

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival = 1 - self.pre_loop.hazards(entry_features(entry, self.pre_loop.inputs))[:, 0]
        (_, *rest), _ = self.lookahead.start(entry, params)
        return (survival, *rest), crosses(survival, 1, params)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        return self.lookahead.step(state, z, step, params)
