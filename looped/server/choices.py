"""What commands share: the gate that is meant, a line on stderr. Imports nothing heavy."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from looped.errors import LoopedError, shown

if TYPE_CHECKING:
    from looped.decode import PrefillSchedule
    from looped.gates import Gate
    from looped.model import LoopedLM

COSINE_DOC = "the threshold falls by a cosine over the prompt, from 1 to --prefill-threshold"
PROTECTED_DOC = "first tokens of a prompt that a ragged prefill runs at full depth"
NATIVE, NO_GATE = "native", "none"
GATE_DOC = "exit gate: native (the model's own), none (full depth), a name, or a folder of train-gate"


def pick_gate(gate: str | Path | Gate, model: LoopedLM) -> str | Path | Gate | None:
    """The gate to build an engine with: "native" is the model's own, "none" is full depth."""
    from looped.gates import native_gate

    if gate == NATIVE:
        return native_gate(model)
    return None if gate == NO_GATE else gate


def check_prefill(prefill: str, threshold: float | None, cosine: bool, protected: int) -> None:
    """Refuse a schedule of a ragged prefill (`prefill_schedule`) that nothing would follow."""
    if protected < 0:
        raise LoopedError(f"--prefill-protected must be at least 0, got {shown(protected)}")
    if (cosine or protected) and (prefill != "ragged" or threshold is None):
        raise LoopedError("--prefill-cosine and --prefill-protected need --prefill ragged and a --prefill-threshold")


def prefill_schedule(threshold: float | None, cosine: bool, protected: int) -> float | PrefillSchedule | None:
    """The thresholds of a ragged prefill as an engine takes them."""
    if threshold is None or not (cosine or protected):
        return threshold
    from looped.decode import PrefillSchedule

    return PrefillSchedule(threshold, cosine, protected)


def say(text: str) -> None:
    """One line to the terminal, or to nobody: a full disk or a reader that left must not stop a server."""
    with suppress(OSError):
        print(f"looped: {text}", file=sys.stderr, flush=True)
