"""What commands share: the gate that is meant, the device that is there, a line on stderr. Imports nothing heavy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from looped.errors import LoopedError

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


def check_device(device: str | None) -> str | None:
    """The device, refused where torch does not know it or does not find it."""
    if device is None or device == "cpu":
        return device
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise LoopedError(f"unknown device {device!r}; give cpu, cuda or cuda:N")
    import torch

    if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise LoopedError(f"there is no device {device!r} here ({torch.cuda.device_count()} GPUs found); use cpu")
    return device


def say(text: str) -> None:
    """One line to the terminal."""
    print(f"looped: {text}", file=sys.stderr, flush=True)
