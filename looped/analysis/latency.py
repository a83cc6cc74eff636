"""What `looped bench step` finds: times of stages against their floors, as values; and times looked up from them."""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looped.analysis.fits import DepthFit, StepFit
from looped.errors import LoopedError

STAGES = ("core", "prelude", "coda", "decode", "prefill")
FORMAT = "looped-step-latency-1"


@dataclass(frozen=True)
class Point:
    """One stage at one batch, context and depth. `seconds` is the median, `spread` the range of the repeats divided by
    it; `ratio` is seconds over `floor`; `tb_s` and `tflop_s` are what the stage reached.

    `batch` of a prefill is its number of tokens, its context 0.
    """

    stage: str
    batch: int
    context: int
    depth: int
    seconds: float
    spread: float
    floor: float
    ratio: float
    tb_s: float
    tflop_s: float


@dataclass(frozen=True)
class DepthLine:
    """The fit over depths at one batch and context."""

    batch: int
    context: int
    fit: DepthFit


@dataclass(frozen=True)
class Kernel:
    """One kernel in a whole decode step of full depth: how often it ran a token, and for how long in all."""

    batch: int
    context: int
    name: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class StepResult:
    """All of it. `bytes_s` and `flops_s` are the ceilings, measured in the same run; `left_out` are combinations that
    did not fit into memory or context. `fused`: core steps ran coda and prelude for their exits as well."""

    format: str
    points: tuple[Point, ...]
    bytes_s: float
    flops_s: float
    depth_fits: tuple[DepthLine, ...]
    step_fit: StepFit | None
    left_out: tuple[str, ...]
    fused: bool
    settings: dict[str, str | int | float | None]
    kernels: tuple[Kernel, ...] = ()

    def of(self, stage: str) -> list[Point]:
        """The points of a stage at its greatest depth."""
        mine = [point for point in self.points if point.stage == stage]
        deepest = max((point.depth for point in mine), default=0)
        return [point for point in mine if point.depth == deepest]


class Latencies:
    """Seconds of a stage by rows and context, between and beyond the measured ones by straight lines."""

    def __init__(self, seconds: dict[str, dict[int, dict[int, float]]]) -> None:
        """`seconds[stage][context][batch]`."""
        self._seconds = {
            stage: {context: sorted(of.items()) for context, of in sorted(by_context.items())}
            for stage, by_context in seconds.items()
        }

    def __call__(self, stage: str, rows: int, context: float) -> float:
        """Seconds of `stage` on `rows` rows (tokens for a prefill) with `context` keys each."""
        lines = [(at, _line(of, rows)) for at, of in self._seconds[stage].items()]
        return _line(lines, max(context, lines[0][0]))


def read(path: Path) -> Latencies:
    """Latencies from the file that `looped bench step --out` writes. Raises `LoopedError` for anything else."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoopedError(f"the latencies in {path} cannot be read ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LoopedError(f"{path} holds no latencies; make it with `looped bench step --out {path.name}`")
    if content["fused"]:
        raise LoopedError(f"{path} was measured with --exits device; a schedule needs the stages apart (--exits sync)")
    deepest: dict[str, int] = {}
    for point in content["points"]:
        deepest[point["stage"]] = max(deepest.get(point["stage"], 0), point["depth"])
    seconds: dict[str, dict[int, dict[int, float]]] = {}
    for point in content["points"]:
        if point["depth"] == deepest[point["stage"]]:
            seconds.setdefault(point["stage"], {}).setdefault(point["context"], {})[point["batch"]] = point["seconds"]
    missing = [stage for stage in ("core", "prelude", "coda", "prefill") if stage not in seconds]
    if missing:
        raise LoopedError(f"{path} holds no times of {' and '.join(missing)}, which a schedule needs")
    return Latencies(seconds)


def _line(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at x of the line through the neighbours of x; through the last two beyond the end, and the first
    value before the start."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    at = min(max(bisect.bisect_left([p for p, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
