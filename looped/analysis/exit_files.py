"""Recorded exits: for every decode token of a work list and every depth, the number a gate compares with its threshold.

An .npz file with the arrays

    offsets  int64 [N + 1]    rows offsets[i] to offsets[i + 1] belong to request i
    values   float32 [T, R]   column d - 1 decides about leaving after d loops; NaN where there is no decision
    meta     a text, JSON     format, model, revision, gate, rule, min_depth, max_loops, threshold, source

`rule` is "at-least" (cumulative exit probabilities: leave at the first depth d >= min_depth whose value reaches the
threshold, never at a threshold of 1), "count" (of loop steps: at the first one that reaches it) or "below" (distances:
at the first one below it). No torch.
"""

# N requests, T decode tokens of all of them, R loop steps

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from looped.analysis.depths import Exits
from looped.errors import LoopedError

FORMAT = "looped-exits-1"
RULES = ("at-least", "count", "below")


@dataclass(frozen=True)
class Meta:
    """What was recorded, and how its numbers are read."""

    format: str
    model: str
    revision: str
    gate: str
    rule: str
    min_depth: int
    max_loops: int
    threshold: float
    source: str


@dataclass(frozen=True)
class Recorded:
    """The content of a file; see the module."""

    offsets_N: NDArray[np.int64]
    values_TR: NDArray[np.float32]
    meta: Meta

    def exits(self, threshold: float) -> list[Exits]:
        """Exit depths of every request's decode tokens at a threshold."""
        depths = exit_depths(self.values_TR, self.meta.rule, self.meta.min_depth, threshold)
        return [
            tuple(depths[start:stop].tolist())
            for start, stop in zip(self.offsets_N[:-1], self.offsets_N[1:], strict=True)
        ]


def exit_depths(values_TR: NDArray[np.float32], rule: str, min_depth: int, threshold: float) -> NDArray[np.int64]:
    """Exit depths [T] by the rule of the file; R where no value lets a token go earlier."""
    last = values_TR.shape[1]
    q = np.float32(threshold)
    with np.errstate(invalid="ignore"):
        leaves = values_TR < q if rule == "below" else values_TR >= q
    if rule == "at-least" and threshold >= 1:
        leaves &= False
    leaves[:, : min_depth - 1] = False
    leaves[:, last - 1] = True
    first: NDArray[np.int64] = leaves.argmax(1).astype(np.int64) + 1
    return first


def write(path: Path, recorded: Recorded) -> None:
    """Write the file; its folder must exist."""
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            offsets=recorded.offsets_N,
            values=recorded.values_TR,
            meta=np.array(json.dumps(asdict(recorded.meta))),
        )


def read(path: Path) -> Recorded:
    """Read a file. Raises `LoopedError` for one that is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = Meta(**json.loads(str(file["meta"])))
            recorded = Recorded(file["offsets"].astype(np.int64), file["values"].astype(np.float32), meta)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise LoopedError(f"the recorded exits in {path} cannot be read ({error})") from error
    offsets, values = recorded.offsets_N, recorded.values_TR
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if meta.format != FORMAT or meta.rule not in RULES or values.ndim != 2 or not whole or offsets[-1] != len(values):
        raise LoopedError(f"the recorded exits in {path} are damaged; make them again with `looped record`")
    return recorded
