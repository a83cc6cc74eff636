"""Running the engine on micro models beside the reference decoder."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

from looped import generate
from looped.gates import ConvergenceGate, DelayGate, FixedGate, Gate, HybridGate, OuroGate
from looped.infer import Completion, Engine, EngineOptions, Output, Request, SamplingParams
from looped.infer.late import LateScheduler
from looped.model import LoopedLM
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

# Lengths of prompts: one token, and around the edges of 16-token pages and 8-token chunks.
PROMPT_LENS = (1, 15, 16, 33, 8)


@functools.cache
def micro(family: str) -> LoopedLM:
    return micro_ouro() if family == "ouro" else micro_huginn()


@functools.cache
def prompts(lens: tuple[int, ...] = PROMPT_LENS, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(1, 61) for _ in range(length)) for length in lens)


class GateCase(NamedTuple):
    """A gate of a micro model and a threshold at which its exits spread over depths."""

    gate: Gate | None
    threshold: float | None


@functools.cache
def gate_case(family: str, name: str) -> GateCase:
    model = micro(family)
    cases = {
        "none": lambda: GateCase(None, None),
        "ouro": lambda: GateCase(OuroGate(), 0.6),
        "convergence": lambda: GateCase(ConvergenceGate(), 0.9),
        "fixed": lambda: GateCase(FixedGate(2), None),
        "delay": lambda: GateCase(DelayGate(ConvergenceGate()), 1.0),
        "lookahead": lambda: GateCase(random_lookahead(model), 0.5),
        "hybrid": lambda: GateCase(HybridGate(random_pre_loop(model), random_lookahead(model)), 0.5),
        "pre-loop": lambda: GateCase(random_pre_loop(model), 0.6),
    }
    return cases[name]()


@functools.cache
def reference(
    family: str,
    layout: str,
    gate: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    temperature: float = 0.0,
    chunk_size: int | None = None,
    compute: str = "sparse",
    depth: int | None = None,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """Token ids and depths of the reference decoder, EOS ignored."""
    case = gate_case(family, gate)
    result = generate(
        micro(family),
        prompt,
        layout=layout,
        gate=case.gate,
        threshold=case.threshold,
        depth=depth,
        compute=compute,
        max_new_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        chunk_size=chunk_size,
        seed=seed,
    )
    return result.token_ids, result.depths


def drain(engine: Engine, collected: dict[str, list[Output]] | None = None) -> dict[str, list[Output]]:
    """Step until nothing is left, checking the books after every stage; outputs by request key."""
    collected = {} if collected is None else collected
    while engine.has_work:
        advance(engine, collected)
    assert_empty(engine)
    return collected


def advance(engine: Engine, collected: dict[str, list[Output]]) -> None:
    """One step. Something must happen: a stage is launched, a launch is read, or an output comes out."""
    before, unread = _launches(engine), len(engine._inflight)
    outputs = engine.step()
    assert outputs or _launches(engine) == before + 1 or len(engine._inflight) < unread
    for output in outputs:
        collected.setdefault(output.key, []).append(output)
    check_books(engine)


def _launches(engine: Engine) -> int:
    return sum(stage.batches for stage in engine.stats.stages.values())


def check_books(engine: Engine) -> None:
    """No slot in two queues, at most W active, no page owned twice, promises that can be kept."""
    scheduler = engine.scheduler
    prefilling = [job.slot for job in scheduler.prefilling]
    queued = prefilling + scheduler.prelude + scheduler.core + scheduler.coda
    if isinstance(scheduler, LateScheduler):
        queued = prefilling + sorted(scheduler.decode)
    assert len(set(queued)) == len(queued) and set(queued) <= set(scheduler.active)
    # Only a last token that is still on its way keeps a slot out of every queue.
    assert engine._inflight or set(queued) == set(scheduler.active)
    assert len(scheduler.active) + scheduler.num_free_slots == scheduler.limits.max_num_seqs
    engine.kv.check()


def assert_empty(engine: Engine) -> None:
    """Every slot and page is free again and nothing is promised."""
    assert engine.scheduler.num_free_slots == engine.scheduler.limits.max_num_seqs
    assert not engine.scheduler.active and not engine._sequences and not engine._by_slot
    for pool in engine.kv.pools:
        assert pool.pages.pages.in_use == 0 and pool.pages.pages.reserved == 0


def make_engine(
    family: str, mode: str = "refill", layout: str | None = None, gate: str = "none", **options: Any
) -> Engine:
    """An engine on a micro model; freed pages are filled with NaN."""
    case = gate_case(family, gate)
    values: dict[str, Any] = {"max_num_seqs": 4, "poison": True} | options
    model = values.pop("model", None) or micro(family)
    return Engine(model, EngineOptions(mode=mode, kv=layout, gate=case.gate, threshold=case.threshold, **values))


def run(engine: Engine, work: tuple[tuple[int, ...], ...], params: SamplingParams) -> list[Completion]:
    """Complete all prompts, in order."""
    for number, prompt in enumerate(work):
        engine.add(Request(str(number), prompt, params, ordinal=number))
    outputs = drain(engine)
    return [completion(outputs[str(number)], prompt) for number, prompt in enumerate(work)]


def completion(outputs: list[Output], prompt: tuple[int, ...]) -> Completion:
    tokens = [output for output in outputs if output.token is not None]
    return Completion(
        text="".join(output.text for output in outputs),
        token_ids=[output.token for output in tokens if output.token is not None],
        depths=[output.depth for output in tokens],
        finish_reason=outputs[-1].finish_reason or "",
        prompt_token_ids=list(prompt),
    )
