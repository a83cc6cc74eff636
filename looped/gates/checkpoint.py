"""Gate checkpoints: `gate.safetensors` (heads) and `gate.json` (what it is, for whom, trained how, how good).

A set of heads is `weight` [N, F] and `bias` [N], and where it has a hidden layer of M units `hidden.weight` [K, M, F],
`hidden.bias` [K, M] and `hidden.out` [N, M]. With width D and R loops:

| kind | heads | N | F | K |
|---|---|---|---|---|
| `lookahead` | as they are | R - 2, at least 1 | D | N |
| `pre-loop` | as they are | R - 1 | 2 D + 3 | 1 |
| `hybrid` | `pre-loop.*` | 1: lambda_1 | 2 D + 3 | 1 |
| | `lookahead.*` | R - 2, at least 1 | D | N |
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from looped import checks
from looped.errors import LoopedError
from looped.files import read_object, whole, write_text
from looped.gates.hazard import Hidden, LookaheadGate, PreLoopGate, TrainedGate
from looped.gates.hybrid import HybridGate
from looped.gates.protocol import stored_layout

TRAINED = (LookaheadGate.kind, PreLoopGate.kind, HybridGate.kind)
"""Kinds of gates that have checkpoints."""
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


def save_gate(gate: TrainedGate | HybridGate, card: GateCard, folder: str | Path) -> None:
    """Write a gate checkpoint; each file appears whole or not at all."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[str, TrainedGate]] = []
    if isinstance(gate, HybridGate):
        parts += [(f"{part.kind}.", part) for part in (gate.pre_loop, gate.lookahead)]
    else:
        parts.append(("", gate))
    tensors = {prefix + name: x for prefix, part in parts for name, x in _heads(part).items()}
    with whole(out / "gate.safetensors") as partial:
        save_file({name: x.float().cpu().contiguous() for name, x in tensors.items()}, partial)
    write_text(out / "gate.json", json.dumps(dataclasses.asdict(card), indent=2) + "\n")


def _heads(gate: TrainedGate) -> dict[str, Tensor]:
    tensors = {"weight": gate.weight_NF, "bias": gate.bias_N}
    return tensors if gate.hidden is None else tensors | dict(zip(_HIDDEN, gate.hidden, strict=True))


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


def read_gate(folder: str | Path) -> TrainedGate | HybridGate:
    """The gate of a checkpoint folder, to be bound to its teacher."""
    where = Path(folder)
    card = read_card(where)
    if card.kind not in TRAINED:
        raise LoopedError(f"{where} holds a gate of kind {card.kind!r}; known: {', '.join(TRAINED)}")
    path = where / "gate.safetensors"
    gate: TrainedGate | HybridGate
    try:
        tensors = load_file(path)
        if card.kind == HybridGate.kind:
            pre_loop = _read_heads(tensors, PreLoopGate, f"{PreLoopGate.kind}.", card, path, heads=1)
            gate = HybridGate(pre_loop, _read_heads(tensors, LookaheadGate, f"{LookaheadGate.kind}.", card, path))
        elif card.kind == PreLoopGate.kind:
            gate = _read_heads(tensors, PreLoopGate, "", card, path)
        else:
            gate = _read_heads(tensors, LookaheadGate, "", card, path)
    except (SafetensorError, OSError, KeyError) as error:
        raise LoopedError(f"{path} is missing or damaged ({error})") from error
    gate.threshold, gate.min_depth = card.threshold, card.min_depth
    gate.layout, gate.prefill = stored_layout(card.layout), card.prefill
    return gate


G = TypeVar("G", LookaheadGate, PreLoopGate)


def _read_heads(
    tensors: dict[str, Tensor], kind: type[G], prefix: str, card: GateCard, path: Path, heads: int | None = None
) -> G:
    """The gate of the tensors that begin with `prefix`, of `heads` heads where that is not the number of its kind."""
    weight, bias = tensors[prefix + "weight"], tensors[prefix + "bias"]
    names = [prefix + name for name in _HIDDEN]
    hidden = Hidden(*(tensors[name] for name in names)) if names[0] in tensors else None
    one_layer = issubclass(kind, PreLoopGate)
    if heads is None:
        heads = max(card.max_loops - (1 if one_layer else 2), 1)
    features = 2 * card.hidden_size + 3 if one_layer else card.hidden_size
    if not _fits(weight, bias, hidden, heads, features, 1 if one_layer else heads):
        raise LoopedError(f"{path} is damaged: its tensors do not fit what gate.json says of it")
    return kind(
        weight,
        bias,
        hidden,
        hidden_size=card.hidden_size,
        max_loops=card.max_loops,
        teacher=card.teacher,
        revision=card.teacher_revision,
    )


def _fits(weight_NF: Tensor, bias_N: Tensor, hidden: Hidden | None, heads: int, features: int, layers: int) -> bool:
    """Whether heads have the shapes that they should, and finite values."""
    fits = weight_NF.shape == (heads, features) and bias_N.shape == (heads,)
    if hidden is not None and hidden.weight_KMF.ndim == 3:
        width = hidden.weight_KMF.shape[1]
        fits &= hidden.weight_KMF.shape == (layers, width, features) and hidden.bias_KM.shape == (layers, width)
        fits &= hidden.out_NM.shape == (heads, width)
    elif hidden is not None:
        fits = False
    return fits and all(bool(x.isfinite().all()) for x in (weight_NF, bias_N, *(hidden or ())))
