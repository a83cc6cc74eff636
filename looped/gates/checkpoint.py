"""Gate checkpoints: `gate.safetensors` (heads) and `gate.json` (what it is, for whom, trained how, how good).

A set of heads is `weight` [K, F] and `bias` [N], and where it has a hidden layer of M units `hidden.weight`,
`hidden.bias` and `hidden.out` (shapes in `looped.gates.trained.Hidden`). K is N, or 1 for heads of steps that share
their weights. F is what the `inputs` of the card add up to, D for a vector and 1 for a number. With R loops:

| kind | heads | N | inputs, in the order of features |
|---|---|---|---|
| `lookahead` | as they are | R - 2, at least 1 | state (z_r), change (z_r - z_{r-1}) |
| `foreseen-convergence` | as they are | R - 2, at least 1 | state, log-change |
| `stage2`, `same-step` | as they are | R - 1 | state |
| `pre-loop` | as they are | R - 1: hazards; R: depths, for a softmax | embedding, state, entropy, surprisal, depth |
| `hybrid` | `pre-loop.*` | 1: lambda_1 | as `pre-loop` |
| | `lookahead.*` | R - 2, at least 1 | as `lookahead` |

`convergence` and `delayed-convergence` have no heads; their card holds thresholds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from looped.errors import LoopedError
from looped.files import whole
from looped.gates.card import GateCard, read_card, write_card
from looped.gates.criteria import ConvergenceGate
from looped.gates.foreseen import ForeseenConvergenceGate
from looped.gates.hazard import LookaheadGate, PreLoopGate, SameStepGate, Stage2Gate
from looped.gates.hybrid import HybridGate
from looped.gates.policies import DelayGate
from looped.gates.protocol import Gate, stored_layout
from looped.gates.trained import Hidden, StepHeads, TrainedGate

_PLAIN: dict[str, type[TrainedGate]] = {
    gate.kind: gate for gate in (LookaheadGate, PreLoopGate, Stage2Gate, SameStepGate, ForeseenConvergenceGate)
}
TRAINED = (LookaheadGate.kind, PreLoopGate.kind, HybridGate.kind, *[*_PLAIN][2:])
"""Kinds of gates with weights."""
CALIBRATED = (ConvergenceGate.kind, f"delayed-{ConvergenceGate.kind}")
"""Kinds without weights whose checkpoints hold thresholds."""
_HIDDEN = ("hidden.weight", "hidden.bias", "hidden.out")


def save_gate(gate: Gate, card: GateCard, folder: str | Path) -> None:
    """Write a gate checkpoint; each file appears whole or not at all."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[str, TrainedGate]] = []
    if isinstance(gate, HybridGate):
        parts += [(f"{part.kind}.", part) for part in (gate.pre_loop, gate.lookahead)]
    elif isinstance(gate, TrainedGate):
        parts.append(("", gate))
    tensors = {prefix + name: x for prefix, part in parts for name, x in _heads(part).items()}
    with whole(out / "gate.safetensors") as partial:
        save_file({name: x.float().cpu().contiguous() for name, x in tensors.items()}, partial)
    write_card(card, out)


def inputs_of(gate: Gate) -> tuple[str, ...]:
    """What a gate looks at, as its card says it: of both parts of a hybrid gate."""
    if isinstance(gate, HybridGate):
        return (*gate.pre_loop.inputs, *(f"lookahead.{name}" for name in gate.lookahead.inputs))
    return gate.inputs if isinstance(gate, TrainedGate) else ()


def _heads(gate: TrainedGate) -> dict[str, Tensor]:
    tensors = {"weight": gate.weight_NF, "bias": gate.bias_N}
    return tensors if gate.hidden is None else tensors | dict(zip(_HIDDEN, gate.hidden, strict=True))


def read_gate(folder: str | Path) -> Gate:
    """The gate of a checkpoint folder, to be bound to its teacher."""
    where = Path(folder)
    card = read_card(where)
    if card.kind not in (*TRAINED, *CALIBRATED):
        raise LoopedError(f"{where} holds a gate of kind {card.kind!r}; known: {', '.join((*TRAINED, *CALIBRATED))}")
    gate = _criterion(card) if card.kind in CALIBRATED else _with_heads(card, where / "gate.safetensors")
    gate.threshold, gate.min_depth = card.threshold, card.min_depth
    gate.layout, gate.prefill = stored_layout(card.layout), card.prefill
    return gate


def _criterion(card: GateCard) -> Gate:
    inner, delayed = ConvergenceGate(), card.kind != ConvergenceGate.kind
    inner.threshold, inner.min_depth = card.threshold, max(card.min_depth - delayed, 1)
    inner.layout, inner.prefill = stored_layout(card.layout), card.prefill
    return DelayGate(inner) if delayed else inner


def _with_heads(card: GateCard, path: Path) -> Gate:
    try:
        tensors = load_file(path)
        if card.kind != HybridGate.kind:
            return _read_heads(tensors, _PLAIN[card.kind], "", card, path, card.inputs)
        early = tuple(name for name in card.inputs if not name.startswith("lookahead."))
        late = tuple(name.removeprefix("lookahead.") for name in card.inputs if name.startswith("lookahead."))
        pre_loop = _read_heads(tensors, PreLoopGate, "pre-loop.", card, path, early, heads=1)
        return HybridGate(pre_loop, _read_heads(tensors, LookaheadGate, "lookahead.", card, path, late))
    except (SafetensorError, OSError, KeyError) as error:
        raise LoopedError(f"{path} is missing or damaged ({error})") from error


G = TypeVar("G", bound=TrainedGate)


def _read_heads(
    tensors: dict[str, Tensor],
    kind: type[G],
    prefix: str,
    card: GateCard,
    path: Path,
    inputs: tuple[str, ...],
    heads: int | None = None,
) -> G:
    """The gate of the tensors that begin with `prefix`, of `heads` heads where that is not the number of its kind."""
    inputs = inputs or kind.default_inputs
    if [*inputs] != [name for name in kind.known_inputs if name in inputs]:
        known = ", ".join(kind.known_inputs)
        raise LoopedError(
            f"{path.parent} looks at {', '.join(inputs)}; a {kind.kind} gate may look at {known}, in order"
        )
    weight, bias = tensors[prefix + "weight"], tensors[prefix + "bias"]
    names = [prefix + name for name in _HIDDEN]
    hidden = Hidden(*(tensors[name] for name in names)) if names[0] in tensors else None
    if heads is None:
        heads = kind.num_heads(card.max_loops)
        if kind is PreLoopGate and bias.shape == (card.max_loops,):
            heads = card.max_loops
    features = kind.num_features(inputs, card.hidden_size)
    if not _fits(weight, bias, hidden, heads, features, steps=issubclass(kind, StepHeads)):
        raise LoopedError(f"{path} is damaged: its tensors do not fit what gate.json says of it")
    return kind(
        weight,
        bias,
        hidden,
        hidden_size=card.hidden_size,
        max_loops=card.max_loops,
        teacher=card.teacher,
        revision=card.teacher_revision,
        inputs=inputs,
    )


def _fits(weight: Tensor, bias: Tensor, hidden: Hidden | None, heads: int, features: int, steps: bool) -> bool:
    """Whether heads have the shapes that they should, and finite values."""
    sets = weight.shape[0] if weight.ndim == 2 else 0
    fits = weight.shape == (sets, features) and bias.shape == (heads,) and sets in ((heads, 1) if steps else (heads,))
    if hidden is not None and hidden.weight_KMF.ndim == 3:
        width = hidden.weight_KMF.shape[1]
        layers, biases, outs = (sets, heads, sets) if steps else (1, 1, heads)
        fits &= hidden.weight_KMF.shape == (layers, width, features) and hidden.bias_KM.shape == (biases, width)
        fits &= hidden.out_NM.shape == (outs, width)
    elif hidden is not None:
        fits = False
    return fits and all(bool(x.isfinite().all()) for x in (weight, bias, *(hidden or ())))
