"""The model that a bench measures: a checkpoint, or random weights of a public shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from looped.analysis.shapes import random_model, shape, with_context
from looped.config import ModelConfig
from looped.errors import LoopedError

if TYPE_CHECKING:
    from looped.model import LoopedLM

DEFAULT_MODEL = "tiny-ouro"


def choose_model(
    model: str | None,
    random: str | None,
    device: str | None,
    dtype: str | None,
    max_loops: int | None = None,
    max_len: int | None = None,
    longest: int | None = None,
) -> LoopedLM:
    """The checkpoint `model`, or a random model of the shape `random`. Its context is `max_len`, else no longer than
    `longest`. `dtype` None is bfloat16 on a GPU, else float32. Raises `LoopedError` for what cannot be."""
    from looped.model import load
    from looped.model.loading import parse_device

    if model is not None and random is not None:
        raise LoopedError("--model names a checkpoint, --random makes a model of a shape: give one of the two")
    if dtype is None:
        dtype = "bfloat16" if parse_device(device).type == "cuda" else "float32"
    if random is not None:
        return random_model(_fitted(shape(random, max_loops), max_len, longest), random, device, dtype)
    loaded = load(model or DEFAULT_MODEL, device=device, dtype=dtype, max_loops=max_loops)
    loaded.config = _fitted(loaded.config, max_len, longest)
    return loaded


def _fitted(config: ModelConfig, max_len: int | None, longest: int | None) -> ModelConfig:
    if max_len is not None and max_len > config.max_positions:
        raise LoopedError(f"--max-len {max_len} is above the model's context of {config.max_positions}")
    if max_len is None and longest is not None:
        max_len = min(longest, config.max_positions)
    return with_context(config, max_len)
