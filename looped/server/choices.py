"""What commands share: the gate that is meant, a line on stderr. Imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looped.gates import Gate
    from looped.model import LoopedLM

NATIVE, NO_GATE = "native", "none"
GATE_DOC = "exit gate: native (the model's own), none (full depth), a name, or a folder of train-gate"


def pick_gate(gate: str | Path | Gate, model: LoopedLM) -> str | Path | Gate | None:
    """The gate to build an engine with: "native" is the model's own, "none" is full depth."""
    from looped.gates import native_gate

    if gate == NATIVE:
        return native_gate(model)
    return None if gate == NO_GATE else gate


def say(text: str) -> None:
    """One line to the terminal."""
    print(f"looped: {text}", file=sys.stderr, flush=True)
