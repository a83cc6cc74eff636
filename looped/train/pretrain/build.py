"""A new model ready for training: initial weights, compiled blocks, optimiser groups, cost of a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from looped.config import ModelConfig
from looped.model import LoopedLM
from looped.model.layers import Block
from looped.train.pretrain.recipe import Init, Optim


def new_model(config: ModelConfig, init: Init, seed: int) -> LoopedLM:
    """A model with trainable random weights: a pure function of the configuration, scales and seed."""
    generator = torch.Generator().manual_seed(seed)
    model = LoopedLM(config)
    width = config.hidden_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "exit_gate.weight":
                parameter.zero_()
            elif name == "exit_gate.bias":
                parameter.fill_(init.gate_bias)
            elif parameter.ndim >= 2 and not name.endswith("qk_bias"):
                parameter.normal_(0.0, _std(name, config, init, width), generator=generator)
        if not config.norm_after_sum:
            for block in model.core_blocks:
                assert isinstance(block, Block)
                block.norm_2.weight.fill_(init.branch_gain)
                block.norm_4.weight.fill_(init.branch_gain)
    return model.requires_grad_(True).train()


def _std(name: str, config: ModelConfig, init: Init, width: int) -> float:
    """Huginn's embedding is scaled up after the look-up, and its output layers down with their number."""
    base = math.sqrt(2 / (5 * width))
    if not config.injection:
        return {"embed.weight": init.embed_std, "head.weight": init.head_std}.get(name, init.linear_std)
    depth = config.num_prelude_layers + config.max_loops * config.num_core_layers + config.num_coda_layers
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return math.sqrt(1 / (5 * width * depth))
    return base


def compile_blocks(model: LoopedLM, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each transformer block and the final norm in place: one graph, reused by every layer and loop step.

    The loop itself stays in Python, so any number of steps runs the same code.
    """
    # A stage has a graph for its last block (which no norm follows, without loop_norm) and one for the others; ragged
    # steps break theirs at the attention. All blocks share one code object, whose graphs are counted together.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    for stage in (model.prelude_blocks, model.core_blocks, model.coda_blocks):
        for block in stage:
            assert isinstance(block, Block)
            block.between = torch.compile(block.between, backend=backend)  # type: ignore[method-assign]
            block.norm_1.compile(
                backend=backend
            )  # the first block's is called alone, the others' with the block before
    model.norm.compile(backend=backend)


def optimiser(model: nn.Module, optim: Optim, fused: bool) -> torch.optim.AdamW:
    """AdamW over two groups: matrices decay, norms, biases and the exit gate do not."""
    decay: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or "exit_gate" in name or name.endswith("qk_bias")
        (free if plain else decay).append(parameter)
    groups = [
        {"params": decay, "weight_decay": optim.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def flops_per_token(config: ModelConfig, window: int, loops: float, heads: float) -> float:
    """Training FLOPs of one token: six per parameter and use, plus causal attention; the head runs `heads` times."""
    boundary = (config.num_prelude_layers + config.num_coda_layers) * config.layer_params
    matmuls = boundary + loops * config.core_params + heads * config.vocab_size * config.hidden_size
    layers = config.num_prelude_layers + config.num_coda_layers + loops * config.num_core_layers
    return 6.0 * (matmuls + layers * config.num_heads * config.head_dim * window)
