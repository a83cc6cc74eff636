"""Models of public shapes with random weights: speed needs no training, so nothing is downloaded to measure it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from looped.config import ModelConfig
from looped.errors import LoopedError, unknown

if TYPE_CHECKING:
    from looped.model import LoopedLM

_SEED = 0
_OURO = ModelConfig(
    family="ouro",
    vocab_size=49_152,
    hidden_size=2048,
    intermediate_size=5632,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_prelude_layers=0,
    num_core_layers=24,
    num_coda_layers=0,
    max_loops=4,
    trained_loops=4,
    max_positions=65_536,
    rope_theta=1_000_000.0,
    exit_gate=True,
)
_HUGINN = ModelConfig(
    family="huginn",
    vocab_size=65_536,
    hidden_size=5280,
    intermediate_size=17_920,
    num_heads=55,
    num_kv_heads=55,
    head_dim=96,
    num_prelude_layers=2,
    num_core_layers=4,
    num_coda_layers=2,
    max_loops=16,
    trained_loops=32,
    max_positions=16_384,
    rope_theta=50_000.0,
    loop_norm=False,
    injection=True,
    norm_after_sum=True,
    rope_interleaved=True,
    qk_bias=True,
    tie_embeddings=True,
    embed_scale=72.66,
    exit_threshold=0.03,
    default_layout="shared",
)
# Small enough for a CPU: the shapes of the two families, for trying commands out.
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
}
SHAPES = {
    "ouro-1.4b": _OURO,
    "ouro-2.6b": replace(_OURO, num_core_layers=48),
    "huginn-3.5b": _HUGINN,
    "micro-ouro": replace(_OURO, **_TINY, head_dim=64, num_core_layers=2, max_positions=4096),
    "micro-huginn": replace(
        _HUGINN, **_TINY, head_dim=64, num_prelude_layers=1, num_core_layers=2, num_coda_layers=1, max_positions=4096
    ),
}
WEIGHT_STD = 0.02


def shape(name: str, max_loops: int | None = None, max_len: int | None = None) -> ModelConfig:
    """The configuration of a public shape, run with R = `max_loops` and a context of `max_len` tokens."""
    if name not in SHAPES:
        raise unknown("shape", name, SHAPES)
    return with_context(SHAPES[name].with_loops(max_loops), max_len)


def with_context(config: ModelConfig, max_len: int | None) -> ModelConfig:
    """The same model with a context of `max_len` tokens, which sizes page tables and attention's work split."""
    if max_len is None:
        return config
    if max_len < 2:
        raise LoopedError(f"--max-len must be at least 2, got {max_len}")
    return replace(config, max_positions=max_len)


def random_model(config: ModelConfig, name: str, device: str | None, dtype: str) -> LoopedLM:
    """A model of `config` with normal weights, made on the device. Raises `LoopedError` where it does not fit."""
    import torch

    from looped.model import LoopedLM
    from looped.model.loading import parse_device, parse_dtype

    target = parse_device(device)
    with torch.device("meta"):
        model = LoopedLM(config)
    try:
        model = model.to(dtype=parse_dtype(dtype)).to_empty(device=target)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise LoopedError(f"the weights of {name} do not fit into the memory of {target}") from error
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    generator = torch.Generator(device=target).manual_seed(_SEED)
    for key, weight in model.named_parameters():
        if "norm" in key:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, WEIGHT_STD, generator=generator)
    model.name = f"random {name}"
    # Of weights that are nobody's, the name and the seed say as much as a hash would, and at once.
    model._revision = f"random-{_SEED}"
    return model
