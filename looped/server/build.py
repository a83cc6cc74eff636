"""From the options of the command to a loaded model and its engine. Torch is imported here, on the engine's thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from looped.server.chat import ChatTemplate
from looped.server.choices import NO_GATE, pick_gate
from looped.server.engine_thread import EngineInfo, Loaded

if TYPE_CHECKING:
    from looped.infer import Engine
    from looped.infer.options import EngineOptions


def load_engine(
    model: str, options: EngineOptions, device: str | None, dtype: str, max_loops: int | None = None
) -> Loaded:
    """The model by name and an engine over it. Raises `LoopedError` for anything the options get wrong."""
    from looped.infer import Engine
    from looped.model import load

    options.check()
    loaded = load(model, device=device, dtype=dtype, max_loops=max_loops)
    engine = Engine(loaded, replace(options, gate=pick_gate(options.gate or NO_GATE, loaded)))
    return Loaded(engine, engine_info(engine))


def engine_info(engine: Engine) -> EngineInfo:
    """The facts of an engine that requests are checked against."""
    model, policy, gate = engine.model, engine.policy, engine.gate
    context, tokenizer = model.config.max_positions, model.tokenizer
    longest = None if tokenizer is None else tokenizer.longest_token()
    return EngineInfo(
        model=model.name,
        mode=engine.options.mode,
        kv=policy.layout.name,
        gate=None if gate is None else gate.name,
        threshold=None if gate is None else policy.threshold,
        threshold_range=None if gate is None else gate.threshold_range,
        max_depth=policy.max_depth,
        context=context,
        # The last token generated never runs, so it needs no K/V.
        max_len=min(context, engine.kv.capacity_tokens + 1),
        vocab_size=model.config.vocab_size,
        eos_ids=model.config.eos_ids,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer, model.name),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        max_chars=None if longest is None else longest * context,
        engine=engine.describe(),
    )
