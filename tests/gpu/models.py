"""Random micro models with the head dims that GPU kernels are made for."""

import functools
import random
from typing import NamedTuple

import torch

from looped.gates import ConvergenceGate, DelayGate, Gate, OuroGate
from looped.model import LoopedLM
from tests.models import huginn_config, ouro_config, random_lookahead, random_model, random_pre_loop

SHAPES = {"hidden_size": 128, "intermediate_size": 192, "max_positions": 256}


# Random weights as large as those of the other micro models make a chaotic loop, which amplifies half precision's
# rounding beyond any useful margin: blocks are damped, and the token's own embedding counts for more.
DAMPING = {"ouro": 0.75, "huginn": 0.5}
EMBEDDING = {"ouro": 4.0, "huginn": 2.0}


@functools.cache
def gpu_model(family: str, dtype: torch.dtype, head_dim: int = 64) -> LoopedLM:
    """A fully looped Ouro with two query heads a KV head, or a Huginn `2-2-1` with plain heads and R = 5."""
    if family == "ouro":
        config = ouro_config(**SHAPES, head_dim=head_dim)
    else:
        config = huginn_config(**SHAPES, num_heads=2, num_kv_heads=2, head_dim=head_dim)
    model = random_model(config)
    for name, param in model.named_parameters():
        if name.startswith("embed"):
            param.data *= EMBEDDING[family]
        elif ("blocks" in name and "norm" not in name) or name.startswith("adapter"):
            param.data *= DAMPING[family]
    return model.to("cuda", dtype)


class GateCase(NamedTuple):
    """A gate and a threshold at which its exits spread over depths."""

    gate: Gate | None
    threshold: float | None


@functools.cache
def gate_case(family: str, dtype: torch.dtype, head_dim: int, name: str) -> GateCase:
    model, ouro = gpu_model(family, dtype, head_dim), family == "ouro"
    cases = {
        "none": lambda: GateCase(None, None),
        "ouro": lambda: GateCase(OuroGate(), 0.6),
        "convergence": lambda: GateCase(ConvergenceGate(), 0.85),
        "delay": lambda: GateCase(DelayGate(ConvergenceGate()), 0.8),
        "lookahead": lambda: GateCase(random_lookahead(model), 0.3 if ouro else 0.7),
        "pre-loop": lambda: GateCase(random_pre_loop(model), 0.5 if ouro else 0.7),
    }
    return cases[name]()


@functools.cache
def prompts(lens: tuple[int, ...], seed: int = 0) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(1, 61) for _ in range(length)) for length in lens)
