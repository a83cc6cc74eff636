"""`gate.json`: what a gate is, for whom it was made, how it was trained, how good it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from looped import checks
from looped.errors import LoopedError
from looped.files import read_object, write_text


@dataclass(frozen=True)
class GateCard:
    """The content of `gate.json`.

    `inputs` is what the gate looks at, empty for all that its kind did at first. `thresholds` pairs each threshold with
    its held-out mean depth and agreement; `calibration` holds thresholds for what was asked for: a mean depth, or a
    bound on what exits lose, with its confidence.
    """

    kind: str
    teacher: str
    teacher_revision: str
    hidden_size: int
    max_loops: int
    latency: int
    min_depth: int
    layout: str
    prefill: str
    threshold: float
    thresholds: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    loss: str = "kl"
    target: str = "teacher"
    calibration: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("kind", "teacher", "teacher_revision", "layout", "prefill", "loss", "target"):
            if not isinstance(getattr(self, name), str):
                raise LoopedError(f"{name} must be a text, got {getattr(self, name)!r}")
        sizes = {name: getattr(self, name) for name in ("hidden_size", "max_loops", "min_depth")}
        checks.given(**sizes, threshold=self.threshold)
        checks.whole_numbers(**sizes)
        checks.numbers(threshold=self.threshold)
        if not all(1 <= size < 1 << 31 for size in sizes.values()):
            raise LoopedError(f"hidden_size, max_loops and min_depth must be at least 1, got {sizes}")
        if not isinstance(self.inputs, list | tuple) or not all(isinstance(name, str) for name in self.inputs):
            raise LoopedError(f"inputs must be a list of names, got {self.inputs!r}")
        object.__setattr__(self, "inputs", tuple(self.inputs))


def write_card(card: GateCard, folder: Path) -> None:
    """Write `gate.json`, whole or not at all."""
    write_text(folder / "gate.json", json.dumps(asdict(card), indent=2) + "\n")


def read_card(folder: Path) -> GateCard:
    """`gate.json` of a folder. Raises `LoopedError` where there is none, or it is damaged."""
    path = folder / "gate.json"
    if not path.exists():
        raise LoopedError(f"{folder} holds no gate.json, so it is not a gate checkpoint")
    raw = read_object(path)
    try:
        return GateCard(**raw)
    except (LoopedError, TypeError) as error:
        raise LoopedError(f"{path} is not a readable gate description ({error})") from error
