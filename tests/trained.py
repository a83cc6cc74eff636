"""Random gates with weights, of every kind and form, for micro models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from looped.gates import ForeseenConvergenceGate, HybridGate, LookaheadGate, PreLoopGate, SameStepGate, Stage2Gate
from looped.gates.trained import Hidden, StepHeads, TrainedGate
from looped.model import LoopedLM

UNITS = 3


def random_gate(
    model: LoopedLM,
    kind: type[TrainedGate],
    inputs: tuple[str, ...] | None = None,
    *,
    shared: bool = False,
    hidden: bool = False,
    softmax: bool = False,
    spread: float = 0.3,
    bias: float = 0.0,
    seed: int = 3,
) -> Any:
    """A gate of a kind with random heads, made for `model`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread

    config = model.config
    inputs = kind.default_inputs if inputs is None else inputs
    heads = kind.num_heads(config.max_loops) + softmax
    features = kind.num_features(inputs, config.hidden_size)
    steps = issubclass(kind, StepHeads)
    sets = 1 if shared else heads
    layers, biases = (sets, heads) if steps else (1, 1)
    layer = Hidden(noise(layers, UNITS, features), noise(biases, UNITS), noise(sets, UNITS)) if hidden else None
    return kind(
        noise(sets, features),
        noise(heads) + bias,
        layer,
        hidden_size=config.hidden_size,
        max_loops=config.max_loops,
        teacher=model.name,
        revision=model.revision,
        inputs=inputs,
    )


def _hybrid(model: LoopedLM) -> HybridGate:
    early = random_gate(model, PreLoopGate, ("embedding", "depth"), bias=-0.5)
    return HybridGate(early, random_gate(model, LookaheadGate, ("state", "change"), shared=True))


ALL: dict[str, tuple[Callable[[LoopedLM], Any], float]] = {
    "lookahead-shared": (lambda model: random_gate(model, LookaheadGate, shared=True, spread=0.5), 0.5),
    "lookahead-change": (lambda model: random_gate(model, LookaheadGate, ("state", "change")), 0.5),
    "lookahead-shared-mlp": (
        lambda model: random_gate(model, LookaheadGate, ("state", "change"), shared=True, hidden=True),
        0.5,
    ),
    "pre-loop-embedding": (lambda model: random_gate(model, PreLoopGate, ("embedding",), bias=-0.5), 0.5),
    "pre-loop-depth-mlp": (lambda model: random_gate(model, PreLoopGate, ("embedding", "depth"), hidden=True), 0.6),
    "pre-loop-softmax": (lambda model: random_gate(model, PreLoopGate, softmax=True), 0.6),
    "hybrid-change": (_hybrid, 0.6),
    "stage2": (lambda model: random_gate(model, Stage2Gate, shared=True, spread=0.5), 0.6),
    "same-step": (lambda model: random_gate(model, SameStepGate, hidden=True), 0.6),
    "foreseen-convergence": (lambda model: random_gate(model, ForeseenConvergenceGate, spread=0.4, bias=-0.3), 0.9),
}
"""A way to make each, and a threshold at which its exits spread over depths."""
