"""Gate checkpoints: `gate.safetensors` (heads) and `gate.json` (what it is, for whom, trained how, how good)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from looped import checks
from looped.errors import LoopedError
from looped.files import read_object, whole, write_text
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

    def __post_init__(self) -> None:
        for name in ("kind", "teacher", "teacher_revision", "layout", "prefill"):
            if not isinstance(getattr(self, name), str):
                raise LoopedError(f"{name} must be a text, got {getattr(self, name)!r}")
        sizes = {name: getattr(self, name) for name in ("hidden_size", "max_loops", "min_depth")}
        checks.given(**sizes, threshold=self.threshold)
        checks.whole_numbers(**sizes)
        checks.numbers(threshold=self.threshold)
        if not all(1 <= size < 1 << 31 for size in sizes.values()):
            raise LoopedError(f"hidden_size, max_loops and min_depth must be at least 1, got {sizes}")


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
    if not path.exists():
        raise LoopedError(f"{folder} holds no gate.json, so it is not a gate checkpoint")
    raw = read_object(path)
    try:
        return GateCard(**raw)
    except (LoopedError, TypeError) as error:
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
    if not _fits(card, weight, bias, hidden):
        raise LoopedError(f"{where / 'gate.safetensors'} is damaged: its tensors do not fit what gate.json says of it")
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


def _fits(card: GateCard, weight_NF: Tensor, bias_N: Tensor, hidden: Hidden | None) -> bool:
    """Whether the heads have the shapes of their kind, and finite values."""
    if card.kind == PreLoopGate.kind:
        heads, features = max(card.max_loops - 1, 1), 2 * card.hidden_size + 3
    else:
        heads, features = max(card.max_loops - 2, 1), card.hidden_size
    fits = weight_NF.shape == (heads, features) and bias_N.shape == (heads,)
    if hidden is not None and hidden.weight_KMF.ndim == 3:
        layers, width, _ = hidden.weight_KMF.shape
        fits &= layers == (1 if card.kind == PreLoopGate.kind else heads)
        fits &= hidden.weight_KMF.shape[2] == features and hidden.bias_KM.shape == (layers, width)
        fits &= hidden.out_NM.shape == (heads, width)
    elif hidden is not None:
        fits = False
    return fits and all(bool(x.isfinite().all()) for x in (weight_NF, bias_N, *(hidden or ())))
