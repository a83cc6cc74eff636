"""Thresholds for what was asked for: a mean depth, or a bound on what early exits lose, on held-out positions."""

# N positions, R loop steps

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.calibration import exit_depths, mean_depth, threshold_for
from looped.gates.dial import Curve
from looped.gates.risk import bounded_threshold
from looped.train.gates.observed import Held

_STEPS = 200
# Nats beyond full depth that count as all that can be lost of one token.
_MOST_NATS = 1.0


@dataclass(frozen=True)
class Wanted:
    """Mean depths, and bounds on the mean of what exits lose, each shown with this confidence.

    `tokens`: the share of exits that put another token first than the last loop does. `ce`: nats beyond full depth, of
    a token at least 0 and at most 1. The mean is over documents, which are independent of each other, or over tokens,
    which makes a much tighter bound and is honest only where the tokens of a document are as good as independent.
    """

    mean_depths: tuple[float, ...] = ()
    bounds: tuple[float, ...] = ()
    confidence: float = 0.95
    lost: Literal["tokens", "ce"] = "tokens"
    unit: Literal["document", "token"] = "document"

    def check(self, max_loops: int | None = None) -> None:
        """Refuse numbers out of their range."""
        most = math.inf if max_loops is None else max_loops
        for depth in self.mean_depths:
            if not 1 <= depth <= most:
                raise LoopedError(f"--mean-depths must be between 1 and the model's loops, got {depth:g}")
        for bound in self.bounds:
            if not 0 < bound < 1:
                raise LoopedError(f"--max-lost must be between 0 and 1, got {bound:g}")
        if not 0 < self.confidence < 1:
            raise LoopedError(f"--confidence must be between 0 and 1, got {self.confidence:g}")


def calibrate(gate: Curve, held: Held, wanted: Wanted) -> list[dict[str, Any]]:
    """A threshold, with its held-out mean depth and loss, for everything that is wanted.

    Contexts of the held-out positions left at the teacher's exits, not at those of each threshold.
    """
    found = [_for_depth(gate, held, depth) for depth in wanted.mean_depths]
    return found + [_for_bound(gate, held, wanted, bound) for bound in wanted.bounds]


def _for_depth(gate: Curve, held: Held, depth: float) -> dict[str, Any]:
    threshold = _printable(threshold_for(gate, depth))
    lost = float(_lost(gate, held, threshold, "tokens").mean())
    return {
        "for": "mean-depth",
        "wanted": depth,
        "threshold": threshold,
        "mean_depth": mean_depth(gate, threshold),
        "lost_tokens": lost,
        "positions": held.num,
    }


def _for_bound(gate: Curve, held: Held, wanted: Wanted, bound: float) -> dict[str, Any]:
    def losses(threshold: float) -> tuple[float, int]:
        lost = _lost(gate, held, threshold, wanted.lost)
        if wanted.unit == "token":
            return float(lost.mean()), held.num
        each = _by_document(lost, held.document)
        return float(each.mean()), len(each)

    shown = bounded_threshold(_careful_first(gate), losses, bound, wanted.confidence)
    threshold = never(gate) if shown is None else shown.threshold
    lost, units = losses(threshold)
    return {
        "for": f"lost-{wanted.lost}",
        "wanted": bound,
        "confidence": wanted.confidence,
        "unit": wanted.unit,
        "units": units,
        "shown": shown is not None,
        "threshold": threshold,
        "lost": lost,
        "p_value": None if shown is None else shown.p_value,
        "mean_depth": mean_depth(gate, threshold),
    }


def _lost(gate: Curve, held: Held, threshold: float, what: str) -> Tensor:
    """What every position [N] loses by leaving early, in 0..1."""
    at = exit_depths(gate, threshold)[:, None] - 1
    if what == "tokens":
        return (~held.right.gather(1, at)[:, 0]).double()
    beyond: Tensor = held.losses.gather(1, at)[:, 0] - held.losses[:, -1]
    lost: Tensor = (beyond.double() / _MOST_NATS).clamp(0, 1)
    return lost


def _by_document(lost: Tensor, document: Tensor) -> Tensor:
    """Means over the positions of each document."""
    _, place, counts = torch.unique(document, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=lost.dtype, device=lost.device).index_add_(0, place, lost)
    means: Tensor = sums / counts
    return means


def never(gate: Curve) -> float:
    """The threshold at which nothing leaves early."""
    return 0.0 if gate.below else 1.0


def _careful_first(gate: Curve) -> list[float]:
    """Thresholds from the one at which nothing leaves early on, dense where gates are sure of themselves.

    They are the same whatever the data: tests in a fixed order are valid for nothing else.
    """
    steps = [step / _STEPS for step in range(_STEPS + 1)]
    if gate.below:
        return [0.0, *(_printable(10 ** (-8 + 9 * step)) for step in steps)]
    return [1.0, *(1 / (1 + math.exp(21 * step - 14)) for step in steps)]


def _printable(threshold: float) -> float:
    """Six digits, so that what is stored is what was measured."""
    return float(f"{threshold:.6g}")
