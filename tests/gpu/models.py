"""Random micro models with the head dims that GPU kernels are made for."""

import functools
import random
from typing import NamedTuple

import torch

from looped.gates import ConvergenceGate, DelayGate, Gate, OuroGate
from looped.model import LoopedLM
from tests.models import huginn_config, ouro_config, random_lookahead, random_model, random_pre_loop

SHAPES = {"hidden_size": 128, "intermediate_size": 192, "max_positions": 256}


@functools.cache
def gpu_model(family: str, dtype: torch.dtype, head_dim: int = 64) -> LoopedLM:
    """A fully looped Ouro with two query heads a KV head, or a Huginn `2-2-1` with plain heads and R = 5."""
    if family == "ouro":
        config = ouro_config(**SHAPES, head_dim=head_dim)
    else:
        config = huginn_config(**SHAPES, num_heads=2, num_kv_heads=2, head_dim=head_dim)
    return random_model(config, dtype=dtype).to("cuda")


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
        "convergence": lambda: GateCase(ConvergenceGate(), 0.9 if ouro else 1.1),
        "delay": lambda: GateCase(DelayGate(ConvergenceGate()), 0.9 if ouro else 1.2),
        "lookahead": lambda: GateCase(random_lookahead(model), 0.5 if ouro else 0.85),
        "pre-loop": lambda: GateCase(random_pre_loop(model), 0.5),
    }
    return cases[name]()


@functools.cache
def prompts(lens: tuple[int, ...], seed: int = 0) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(1, 61) for _ in range(length)) for length in lens)
