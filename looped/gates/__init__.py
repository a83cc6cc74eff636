"""Exit gates: the protocol, policies, trained heads and their checkpoints."""

from looped.gates.criteria import (
    ArgmaxStabilityGate,
    ConvergenceGate,
    CosineGate,
    Criterion,
    EntropyDiffGate,
    KLGate,
    MinPKLGate,
)
from looped.gates.foreseen import ForeseenConvergenceGate
from looped.gates.hazard import LookaheadGate, OuroGate, PreLoopGate, SameStepGate, Stage2Gate
from looped.gates.hybrid import HybridGate
from looped.gates.policies import DelayGate, FixedGate, ReplayGate
from looped.gates.protocol import Carry, Entry, Gate, Params
from looped.gates.registry import get_gate, load_gate, native_gate

__all__ = [
    "ArgmaxStabilityGate",
    "Carry",
    "ConvergenceGate",
    "CosineGate",
    "Criterion",
    "DelayGate",
    "EntropyDiffGate",
    "Entry",
    "FixedGate",
    "ForeseenConvergenceGate",
    "Gate",
    "HybridGate",
    "KLGate",
    "LookaheadGate",
    "MinPKLGate",
    "OuroGate",
    "Params",
    "PreLoopGate",
    "ReplayGate",
    "SameStepGate",
    "Stage2Gate",
    "get_gate",
    "load_gate",
    "native_gate",
]
