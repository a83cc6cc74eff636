"""The Ouro family (ByteDance Ouro-1.4B, -2.6B and their Thinking variants): config keys and weight names."""

from __future__ import annotations

from typing import Any

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.model.mapping import Keys, Piece


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    keys = Keys(raw)
    keys.need("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if raw.get("rope_scaling") is not None:
        raise LoopedError("Ouro checkpoints with rope_scaling are not supported")
    if keys.holds("use_sliding_window"):
        raise LoopedError("Ouro checkpoints with sliding-window attention are not supported")
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    loops = keys.repeats("total_ut_steps", 4)
    return ModelConfig(
        family="ouro",
        vocab_size=keys.count("vocab_size"),
        hidden_size=width,
        intermediate_size=keys.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", width // heads),
        num_prelude_layers=0,
        num_core_layers=keys.repeats("num_hidden_layers"),
        num_coda_layers=0,
        max_loops=loops,
        trained_loops=loops,
        max_positions=keys.count("max_position_embeddings", 32768),
        rope_theta=float(keys.number("rope_theta", 10000.0)),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        loop_norm=keys.flag("loop_norm", True),
        exit_gate=True,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        bos_id=keys.token("bos_token_id"),
        eos_ids=keys.tokens("eos_token_id"),
        pad_id=keys.token("pad_token_id"),
        exit_threshold=keys.number("early_exit_threshold", 1.0),
        default_layout=keys.text("looped_layout", "ragged"),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    layers = config.num_core_layers
    return {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_id,
        "early_exit_threshold": config.exit_threshold,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "loop_norm": config.loop_norm,
        "looped_layout": config.default_layout,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": layers,
        "model_type": "ouro",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_id,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": config.tie_embeddings,
        "total_ut_steps": config.trained_loops,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def weight_map(config: ModelConfig) -> list[Piece]:
    """Where each official tensor lies in the parameters of `LoopedLM`."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn = config.intermediate_size
    pieces = [Piece("model.embed_tokens.weight", "embed.weight")]
    for i in range(config.num_core_layers):
        src, dst = f"model.layers.{i}", f"core_blocks.{i}"
        pieces += [
            Piece(f"{src}.self_attn.q_proj.weight", f"{dst}.attention.qkv.weight", 0, q),
            Piece(f"{src}.self_attn.k_proj.weight", f"{dst}.attention.qkv.weight", q, q + kv),
            Piece(f"{src}.self_attn.v_proj.weight", f"{dst}.attention.qkv.weight", q + kv, q + 2 * kv),
            Piece(f"{src}.self_attn.o_proj.weight", f"{dst}.attention.out.weight"),
            Piece(f"{src}.mlp.gate_proj.weight", f"{dst}.mlp.gate_up.weight", 0, ffn),
            Piece(f"{src}.mlp.up_proj.weight", f"{dst}.mlp.gate_up.weight", ffn, 2 * ffn),
            Piece(f"{src}.mlp.down_proj.weight", f"{dst}.mlp.down.weight"),
            Piece(f"{src}.input_layernorm.weight", f"{dst}.norm_1.weight"),
            Piece(f"{src}.input_layernorm_2.weight", f"{dst}.norm_2.weight"),
            Piece(f"{src}.post_attention_layernorm.weight", f"{dst}.norm_3.weight"),
            Piece(f"{src}.post_attention_layernorm_2.weight", f"{dst}.norm_4.weight"),
        ]
    return [
        *pieces,
        Piece("model.norm.weight", "norm.weight"),
        Piece("model.early_exit_gate.weight", "exit_gate.weight"),
        Piece("model.early_exit_gate.bias", "exit_gate.bias"),
        Piece("lm_head.weight", "head.weight"),
    ]


def check_tensor_names(names: set[str]) -> None:
    """Nothing else calls itself `ouro` yet."""
