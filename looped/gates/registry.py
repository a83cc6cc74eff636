"""From a name to a gate: built-in kinds, gates that ship with an embedded model, checkpoint folders."""

from __future__ import annotations

import os
import re
from pathlib import Path

from looped.errors import LoopedError, unknown
from looped.gates.card import read_card
from looped.gates.checkpoint import TRAINED, read_gate
from looped.gates.criteria import CRITERIA, ConvergenceGate
from looped.gates.hazard import OuroGate
from looped.gates.policies import DelayGate, FixedGate
from looped.gates.protocol import Gate
from looped.model import LoopedLM
from looped.model.loading import ASSETS

_KINDS: dict[str, type[Gate]] = {OuroGate.kind: OuroGate, **{kind.kind: kind for kind in CRITERIA}}
GATE_NAMES = ("native", *_KINDS, *TRAINED, "fixed-N", *(f"delayed-{kind}" for kind in _KINDS))


def load_gate(name_or_dir: str | Path) -> Gate:
    """A gate by name or from a checkpoint folder, not yet bound to a model.

    `lookahead`, `pre-loop` and `hybrid` are the gates that ship with tiny-ouro, not those of other models. Raises
    `LoopedError` for an unknown name and for a damaged checkpoint.
    """
    name = str(name_or_dir)
    if name in TRAINED:
        folders = [path.parent for path in sorted(ASSETS.glob(f"*/gates/{name}/gate.json"), reverse=True)]
        if not folders:
            raise LoopedError(f"no {name} gate ships; make one with `looped train-gate` and give its folder")
        return read_gate(folders[0])
    return _built_in(name) or _from_folder(name)


def get_gate(gate: str | Path | Gate, model: LoopedLM) -> Gate:
    """A gate, name or folder bound to a model. `native` is the model's own; a shipped one is found by its teacher."""
    if isinstance(gate, Gate):
        return gate.bind(model)
    if str(gate) == "native":
        return native_gate(model)
    if str(gate) in TRAINED:
        return read_gate(_shipped(str(gate), model)).bind(model)
    return load_gate(gate).bind(model)


def native_gate(model: LoopedLM) -> Gate:
    """The gate a model comes with: its own exit gate, else the convergence criterion."""
    return (OuroGate() if model.exit_gate is not None else ConvergenceGate()).bind(model)


def _built_in(name: str) -> Gate | None:
    if name.startswith("delayed-"):
        inner = _built_in(name.removeprefix("delayed-"))
        return DelayGate(inner) if inner else None
    fixed = re.fullmatch(r"fixed-(\d{1,30})", name)
    if fixed:
        return FixedGate(int(fixed[1]))
    return _KINDS[name]() if name in _KINDS else None


def _from_folder(name: str) -> Gate:
    if os.path.isdir(name):  # False for names that no file can have, where pathlib raises
        return read_gate(name)
    raise unknown("gate", name, GATE_NAMES)


def _shipped(name: str, model: LoopedLM) -> Path:
    folders = [path.parent for path in sorted(ASSETS.glob(f"*/gates/{name}/gate.json"))]
    for folder in folders:
        if read_card(folder).teacher_revision == model.revision:
            return folder
    raise LoopedError(
        f"no {name} gate ships for the weights of {model.name}; make one with `looped train-gate` and give its folder"
    )
