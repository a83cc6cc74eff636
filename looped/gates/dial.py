"""What a gate compares with its threshold at every depth, for all tokens at once: from it, exits at any threshold."""

# N tokens, D width, R loop steps

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.criteria import ConvergenceGate
from looped.gates.foreseen import ForeseenConvergenceGate
from looped.gates.hazard import LookaheadGate, OuroGate, PreLoopGate, StepGate
from looped.gates.hybrid import HybridGate
from looped.gates.policies import DelayGate
from looped.gates.protocol import Entry, Gate
from looped.gates.trained import entry_features, relative_change


class Seen(NamedTuple):
    """Tokens at every loop step, each as if it alone ran on: how they enter the loop, and readouts z_1..z_R [N, D]."""

    entry: Entry
    readouts: list[Tensor]


class Curve(NamedTuple):
    """What a gate whose first depth is m compares with its threshold: [N, R - m], a column for m, m + 1, ..., R - 1.

    Cumulative exit probabilities, which rise with depth, and exit where they are at least the threshold; or with
    `below` measures of change, made to fall with depth, that exit where they are below it.
    """

    cumulative: Tensor
    min_depth: int
    below: bool = False

    @property
    def max_depth(self) -> int:
        """R."""
        return self.min_depth + self.cumulative.shape[-1]

    def from_depth(self, min_depth: int) -> Curve:
        """The same gate from a larger `min_depth` on: hazards are folded onto it."""
        return self._replace(cumulative=self.cumulative[..., min_depth - self.min_depth :], min_depth=min_depth)


def hazards_of(gate: Gate, seen: Seen) -> Tensor | None:
    """Hazards [N, R - f] of a gate from its first depth f on; None for gates without hazards."""
    readouts, loops = seen.readouts, len(seen.readouts)
    if isinstance(gate, OuroGate):
        return torch.stack([gate.hazard(z) for z in readouts[:-1]], -1)
    if isinstance(gate, PreLoopGate):
        return gate.hazards(entry_features(seen.entry, gate.inputs))[:, : loops - 1]
    if isinstance(gate, StepGate):
        return torch.stack([gate.hazard(z, _steps(z, r)) for r, z in enumerate(readouts[:-1], 1)], -1)
    if isinstance(gate, LookaheadGate):
        before = [seen.entry.z0, *readouts]
        later = [gate.hazard(z, _steps(z, r), before[r - 1]) for r, z in enumerate(readouts[: loops - 2], 1)]
        return torch.stack(later, -1)
    if isinstance(gate, HybridGate):
        first = gate.pre_loop.hazards(entry_features(seen.entry, gate.pre_loop.inputs))[:, :1]
        later_hazards = hazards_of(gate.lookahead, seen)
        assert later_hazards is not None
        return torch.cat((first, later_hazards), -1)
    return None


def first_depth(gate: Gate) -> int:
    """The first depth that the hazards of a gate are about."""
    return 2 if isinstance(gate, LookaheadGate) else 1


def curve_of(gate: Gate, seen: Seen, min_depth: int | None = None) -> Curve:
    """The curve of a gate from `min_depth` on, its own where none is given.

    Raises LoopedError for gates whose decisions are no matter of one threshold on one measure, such as fixed depths.
    """
    floor = gate.min_depth if min_depth is None else min_depth
    hazards = hazards_of(gate, seen)
    if hazards is not None:
        whole = Curve(1 - torch.cumprod(1 - hazards.double(), -1), first_depth(gate))
        return whole.from_depth(floor)
    inner, late = (gate.inner, 1) if isinstance(gate, DelayGate) else (gate, 0)
    before = [seen.entry.z0, *seen.readouts]
    loops = len(seen.readouts)
    if isinstance(inner, ConvergenceGate):
        columns = {r + late: relative_change(before[r], before[r - 1]) for r in range(1, loops - late)}
    elif isinstance(inner, ForeseenConvergenceGate):
        columns = {
            r + 1: inner.expected(before[r], before[r - 1], _steps(before[r], r)).exp() for r in range(1, loops - 1)
        }
    else:
        raise LoopedError(f"the {gate.name} gate has no dial that can be calibrated")
    values = torch.stack([columns[depth].double() for depth in range(floor, loops)], -1)
    return Curve(values.cummin(-1).values, floor, below=True)


def _steps(z: Tensor, step: int) -> Tensor:
    return torch.full(z.shape[:1], step, dtype=torch.long, device=z.device)
