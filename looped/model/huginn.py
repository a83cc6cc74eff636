"""The Huginn family (tomg-group-umd huginn-0125): config keys and weight names."""

from __future__ import annotations

import math
from typing import Any

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.model.mapping import Keys, Piece


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    keys = Keys(raw)
    keys.need("vocab_size", "n_embd", "n_heads", "intermediate_size", "mean_recurrence")
    keys.need("n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda")
    if keys.holds("bias"):
        raise LoopedError("Huginn checkpoints with linear biases are not supported")
    width, heads, loops = keys.count("n_embd"), keys.count("n_heads"), keys.repeats("mean_recurrence")
    end_turn = _special(keys, 65508)  # the official loops always stop on it as well
    return ModelConfig(
        family="huginn",
        vocab_size=keys.count("padded_vocab_size", keys.count("vocab_size")),
        hidden_size=width,
        intermediate_size=keys.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", width // heads),
        num_prelude_layers=keys.repeats("n_layers_in_prelude", least=0),
        num_core_layers=keys.repeats("n_layers_in_recurrent_block"),
        num_coda_layers=keys.repeats("n_layers_in_coda", least=0),
        max_loops=loops,
        trained_loops=loops,
        max_positions=keys.count("block_size", 4096),
        rope_theta=float(keys.number("rope_base", 50000.0)),
        norm_eps=keys.number("norm_eps", 1e-6),
        loop_norm=False,
        injection=True,
        norm_after_sum=True,
        rope_interleaved=True,
        tie_embeddings=keys.flag("tie_embeddings", True),
        qk_bias=keys.flag("qk_bias", True),
        embed_scale=keys.section("init_values").number("embed_scale", math.sqrt(width)),
        bos_id=keys.token("bos_token_id", _special(keys, 65504)),
        eos_ids=keys.tokens("eos_token_id", _special(keys, 65505)) + (() if end_turn is None else (end_turn,)),
        pad_id=keys.token("pad_token_id", _special(keys, 65509)),
        exit_threshold=keys.number("exit_threshold", 0.03),
        default_layout=keys.text("looped_layout", "shared"),
    )


def _special(keys: Keys, token_id: int) -> int | None:
    """Huginn's own special tokens exist only with its own vocabulary of 65,536."""
    return token_id if keys.count("vocab_size") == 65536 else None


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    layers = config.num_layers
    return {
        "architectures": ["RavenForCausalLM"],
        "bias": False,
        "block_size": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids),
        "exit_threshold": config.exit_threshold,
        "head_dim": config.head_dim,
        "init_values": {"embed_scale": config.embed_scale},
        "injection_type": "linear",
        "intermediate_size": config.intermediate_size,
        "looped_layout": config.default_layout,
        "mean_recurrence": config.trained_loops,
        "model_type": "huginn_raven",
        "n_embd": config.hidden_size,
        "n_heads": config.num_heads,
        "n_layers": layers,
        "n_layers_in_coda": config.num_coda_layers,
        "n_layers_in_prelude": config.num_prelude_layers,
        "n_layers_in_recurrent_block": config.num_core_layers,
        "norm_eps": config.norm_eps,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_id,
        "padded_vocab_size": config.vocab_size,
        "qk_bias": config.qk_bias,
        "rope_base": config.rope_theta,
        "tie_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }


def weight_map(config: ModelConfig) -> list[Piece]:
    """Where each official tensor lies in the parameters of `LoopedLM`."""
    pieces = [Piece("transformer.wte.weight", "embed.weight"), Piece("transformer.adapter.weight", "adapter.weight")]
    stages = (
        ("prelude", "prelude_blocks", config.num_prelude_layers),
        ("core_block", "core_blocks", config.num_core_layers),
        ("coda", "coda_blocks", config.num_coda_layers),
    )
    for official, ours, count in stages:
        for i in range(count):
            src, dst = f"transformer.{official}.{i}", f"{ours}.{i}"
            pieces += [Piece(f"{src}.norm_{n}.weight", f"{dst}.norm_{n}.weight") for n in (1, 2, 3, 4)]
            pieces += [
                Piece(f"{src}.attn.Wqkv.weight", f"{dst}.attention.qkv.weight"),
                Piece(f"{src}.attn.proj.weight", f"{dst}.attention.out.weight"),
                Piece(f"{src}.mlp.fc.weight", f"{dst}.mlp.gate_up.weight"),
                Piece(f"{src}.mlp.proj.weight", f"{dst}.mlp.down.weight"),
            ]
            if config.qk_bias:
                pieces.append(Piece(f"{src}.attn.qk_bias", f"{dst}.attention.qk_bias"))
    return [*pieces, Piece("transformer.ln_f.weight", "norm.weight"), Piece("lm_head.weight", "head.weight")]


def check_tensor_names(names: set[str]) -> None:
    """Refuse retrofitted-recurrence checkpoints: they state Huginn's model_type but hold other blocks."""
    core = {name for name in names if ".core_block." in name}
    if any("q_norm" in name for name in core):
        raise LoopedError("this is a retrofitted-recurrence OLMo-2 checkpoint, which is not supported (only Huginn is)")
    if core and not any(".norm_3." in name for name in core):
        raise LoopedError("this is a retrofitted-recurrence Llama checkpoint, which is not supported (only Huginn is)")
