"""What the demo finds, as values: the report is drawn from them, and `results.json` holds them. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped.progress import plain

if TYPE_CHECKING:
    from looped.analysis.offline_results import OfflineResult

NATIVE, FIXED = "native", "fixed depth"


@dataclass(frozen=True)
class Distilled:
    """One trained gate against its teacher on `positions` held-out tokens.

    The teacher at `teacher_threshold` has mean depth `teacher_mean_depth`, its exits below `min_depth` moved up to it;
    the gate's `threshold` is the one whose `mean_depth` is nearest. `agreement` is the share of tokens with the same
    exit, `constant_agreement` that of the commonest depth, `kappa` the agreement beyond chance.
    """

    gate: str
    parameters: int
    min_depth: int
    threshold: float
    mean_depth: float
    teacher_threshold: float
    teacher_mean_depth: float
    agreement: float
    constant_agreement: float
    kappa: float
    positions: int


@dataclass(frozen=True)
class ScoreRow:
    """Accuracy under one layout and depth policy. `gate` is FIXED for a truncated depth, then `threshold` is None.

    `accuracy` and `stderr` are shares; `histogram[r - 1]` decode tokens left after r loops. `dense`: all loops run, the
    gate only picks the output.
    """

    layout: str
    gate: str
    threshold: float | None
    max_depth: int
    accuracy: float
    stderr: float
    mean_depth: float
    histogram: tuple[int, ...]
    n: int
    unfinished: int
    dense: bool
    tok_s: float

    @property
    def share(self) -> str:
        """`82.1 ± 2.4 %`; `48 of 48` where all are right or none, since the standard error of these says nothing."""
        if self.accuracy in (0.0, 1.0):
            return f"{round(self.accuracy * self.n)} of {self.n}"
        return f"{100 * self.accuracy:.1f} ± {100 * self.stderr:.1f} %"


@dataclass(frozen=True)
class LayoutRow:
    """What a KV layout costs: planes a core layer keeps, bytes of a full-depth token."""

    layout: str
    planes: int
    bytes_per_token: int


@dataclass(frozen=True)
class Scores:
    """The grid of scores on one task."""

    task: str
    n: int
    default_layout: str
    max_loops: int
    rows: tuple[ScoreRow, ...]
    layouts: tuple[LayoutRow, ...]
    max_new_tokens: int
    left_out: int = 0
    """Settings that were not reached in time."""

    def of(self, layout: str, gate: str | None = None) -> list[ScoreRow]:
        """The rows of a layout (and gate), by rising mean depth."""
        rows = [row for row in self.rows if row.layout == layout and gate in (None, row.gate)]
        return sorted(rows, key=lambda row: row.mean_depth)

    def native(self, threshold: float) -> ScoreRow | None:
        """The native gate under the default layout, at the threshold nearest to `threshold`."""
        rows = self.of(self.default_layout, NATIVE)
        return min(rows, key=lambda row: abs((row.threshold or 0.0) - threshold), default=None)

    @property
    def fixed(self) -> list[ScoreRow]:
        """The fixed depths under the default layout, by rising depth."""
        return self.of(self.default_layout, FIXED)

    @property
    def layout_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.layout for row in self.rows))

    @property
    def gate_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.gate for row in self.rows))

    @property
    def full_depth(self) -> ScoreRow | None:
        """The default layout without exits."""
        return next((row for row in self.fixed if row.max_depth == self.max_loops), None)


@dataclass(frozen=True)
class Piece:
    """One generated token: its text and how many loops produced it."""

    text: str
    depth: int


@dataclass(frozen=True)
class Answered:
    """A chat request that the server answered."""

    question: str
    pieces: tuple[Piece, ...]
    finish_reason: str
    expected: str
    seconds: float
    settings: str

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def mean_depth(self) -> float:
        """Over the tokens after the first; NaN without any."""
        depths = [piece.depth for piece in self.pieces[1:]]
        return sum(depths) / len(depths) if depths else math.nan


@dataclass(frozen=True)
class DemoResults:
    """Everything the demo found, and what it takes to find it again."""

    model: str
    parameters: int
    max_loops: int
    revision: str
    gates: tuple[Distilled, ...]
    scores: Scores
    """Word problems, under every gate and layout."""
    drills: Scores
    """Arithmetic answered without written steps, under the model's own layout."""
    bench: OfflineResult
    answers: tuple[Answered, ...]
    seconds: dict[str, float]
    settings: dict[str, str]
    commands: tuple[tuple[str, str], ...]
    """(what it does, the command) pairs that repeat the steps."""


def to_json(results: DemoResults) -> str:
    """The results as a JSON object; numbers that JSON lacks become null."""
    return json.dumps(plain(results), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
