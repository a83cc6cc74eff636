"""Gate checkpoints: `gate.safetensors` (heads) and `gate.json` (what it is, for whom, trained how, how good)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from looped.errors import LoopedError
from looped.files import whole, write_text
from looped.gates.hazard import Hidden, LookaheadGate, PreLoopGate, TrainedGate
from looped.gates.protocol import stored_layout

TRAINED: dict[str, type[TrainedGate]] = {"lookahead": LookaheadGate, "pre-loop": PreLoopGate}
_HIDDEN = ("hidden.weight", "hidden.bias", "hidden.out")


@dataclass(frozen=True)
class GateCard:
    """The content of `gate.json`. `thresholds` pairs each threshold with its held-out mean depth and agreement."""

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
    thresholds: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def save_gate(gate: TrainedGate, card: GateCard, folder: str | Path) -> None:
    """Write a gate checkpoint; each file appears whole or not at all."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {"weight": gate.weight_NF, "bias": gate.bias_N}
    if gate.hidden is not None:
        tensors |= dict(zip(_HIDDEN, gate.hidden, strict=True))
    with whole(out / "gate.safetensors") as partial:
        save_file({name: x.float().cpu().contiguous() for name, x in tensors.items()}, partial)
    write_text(out / "gate.json", json.dumps(dataclasses.asdict(card), indent=2) + "\n")


def read_card(folder: Path) -> GateCard:
    """`gate.json` of a folder."""
    path = folder / "gate.json"
    try:
        return GateCard(**json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise LoopedError(f"{folder} holds no gate.json, so it is not a gate checkpoint") from error
    except (ValueError, TypeError) as error:
        raise LoopedError(f"{path} is not a readable gate description ({error})") from error


def read_gate(folder: str | Path) -> TrainedGate:
    """The gate of a checkpoint folder, to be bound to its teacher."""
    where = Path(folder)
    card = read_card(where)
    if card.kind not in TRAINED:
        raise LoopedError(f"{where} holds a gate of kind {card.kind!r}; known: {', '.join(TRAINED)}")
    try:
        tensors = load_file(where / "gate.safetensors")
        weight, bias = tensors["weight"], tensors["bias"]
        hidden = Hidden(*(tensors[name] for name in _HIDDEN)) if _HIDDEN[0] in tensors else None
    except (SafetensorError, OSError, KeyError) as error:
        raise LoopedError(f"{where / 'gate.safetensors'} is missing or damaged ({error})") from error
    gate = TRAINED[card.kind](
        weight,
        bias,
        hidden,
        hidden_size=card.hidden_size,
        max_loops=card.max_loops,
        teacher=card.teacher,
        revision=card.teacher_revision,
    )
    gate.threshold, gate.min_depth = card.threshold, card.min_depth
    gate.layout, gate.prefill = stored_layout(card.layout), card.prefill
    return gate
