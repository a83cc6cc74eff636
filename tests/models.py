"""Random micro models, small enough to run every grid in float64 within seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from looped.config import ModelConfig
from looped.gates import LookaheadGate, PreLoopGate
from looped.model import LoopedLM


def ouro_config(**changes: Any) -> ModelConfig:
    """A fully looped micro Ouro with grouped KV heads and head_dim != hidden / heads."""
    values: dict[str, Any] = {
        "family": "ouro",
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "num_prelude_layers": 0,
        "num_core_layers": 2,
        "num_coda_layers": 0,
        "max_loops": 4,
        "trained_loops": 4,
        "max_positions": 96,
        "rope_theta": 10000.0,
        "exit_gate": True,
        "eos_ids": (0,),
        "bos_id": 0,
    }
    return ModelConfig(**(values | changes))


def huginn_config(**changes: Any) -> ModelConfig:
    """A micro Huginn `2-2-1` with qk bias, tied head and R = 5."""
    values: dict[str, Any] = {
        "family": "huginn",
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 8,
        "num_prelude_layers": 2,
        "num_core_layers": 2,
        "num_coda_layers": 1,
        "max_loops": 5,
        "trained_loops": 5,
        "max_positions": 96,
        "rope_theta": 50000.0,
        "loop_norm": False,
        "injection": True,
        "norm_after_sum": True,
        "rope_interleaved": True,
        "qk_bias": True,
        "tie_embeddings": True,
        "embed_scale": 5.0,
        "exit_threshold": 0.5,
        "default_layout": "shared",
        "eos_ids": (0,),
    }
    return ModelConfig(**(values | changes))


def random_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> LoopedLM:
    """A model with weights large enough that loop steps matter, and an exit gate that uses every depth."""
    model = LoopedLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if "norm" in name:
            param.data.copy_(1 + 0.2 * noise)
        else:
            param.data.copy_(noise * (0.5 if param.dim() < 2 or "exit_gate" in name else 1.5 * param.shape[-1] ** -0.5))
    model.name = f"random-{config.family}"
    return model.to(dtype)


def micro_ouro(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> LoopedLM:
    return random_model(ouro_config(**changes), seed, dtype)


def micro_huginn(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> LoopedLM:
    return random_model(huginn_config(**changes), seed, dtype)


def random_lookahead(model: LoopedLM, seed: int = 1) -> LookaheadGate:
    """A lookahead gate with random heads, made for `model`."""
    generator = torch.Generator().manual_seed(seed)
    width, loops = model.config.hidden_size, model.config.max_loops
    return LookaheadGate(
        torch.randn(max(loops - 2, 1), width, generator=generator) * 0.4,
        torch.zeros(max(loops - 2, 1)),
        hidden_size=width,
        max_loops=loops,
        teacher=model.name,
        revision=model.revision,
    )


def random_pre_loop(model: LoopedLM, seed: int = 2) -> PreLoopGate:
    """A pre-loop gate with random heads, made for `model`."""
    generator = torch.Generator().manual_seed(seed)
    width, loops = model.config.hidden_size, model.config.max_loops
    return PreLoopGate(
        torch.randn(loops - 1, 2 * width + 3, generator=generator) * 0.2,
        torch.full((loops - 1,), -0.5),
        hidden_size=width,
        max_loops=loops,
        teacher=model.name,
        revision=model.revision,
    )


def fixture_folder(shared: Path, name: str, out: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint folder made of a golden fixture, and the fixture's outputs."""
    golden: dict[str, Any] = json.loads((shared / "fixtures" / f"{name}.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(golden["config"]))
    link = out / "model.safetensors"
    if not link.exists():
        link.symlink_to(shared / "fixtures" / f"{name}.safetensors")
    return out, golden
