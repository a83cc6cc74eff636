"""Exit gates: the protocol, policies, trained heads and their checkpoints."""

from looped.gates.criteria import ConvergenceGate, DelayGate, FixedGate, ReplayGate
from looped.gates.hazard import LookaheadGate, OuroGate, PreLoopGate
from looped.gates.hybrid import HybridGate
from looped.gates.protocol import Carry, Entry, Gate, Params
from looped.gates.registry import get_gate, load_gate, native_gate

__all__ = [
    "Carry",
    "ConvergenceGate",
    "DelayGate",
    "Entry",
    "FixedGate",
    "Gate",
    "HybridGate",
    "LookaheadGate",
    "OuroGate",
    "Params",
    "PreLoopGate",
    "ReplayGate",
    "get_gate",
    "load_gate",
    "native_gate",
]
