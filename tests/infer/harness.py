"""Running the engine on micro models beside the reference decoder."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looped import generate
from looped.decode import Generation, PrefillSchedule
from looped.gates import (
    ArgmaxStabilityGate,
    Carry,
    ConvergenceGate,
    CosineGate,
    DelayGate,
    EntropyDiffGate,
    Entry,
    FixedGate,
    Gate,
    HybridGate,
    KLGate,
    MinPKLGate,
    OuroGate,
    Params,
    ReplayGate,
)
from looped.infer import Completion, Engine, EngineOptions, Output, Request, SamplingParams
from looped.infer.late import LateScheduler
from looped.model import LoopedLM
from looped.sampling_options import Sampling
from tests import trained
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

# Lengths of prompts: one token, and around the edges of 16-token pages and 8-token chunks.
PROMPT_LENS = (1, 15, 16, 33, 8)
# Depths of the replay gate, by the number of the request.
REPLAYED = ((4, 1, 3, 2, 4, 1, 2, 1), (4, 2, 2, 1, 1, 3, 4, 4), (4, 4, 1, 1, 1, 2, 3, 1), (4, 3, 4, 2, 1, 4, 1, 2))


@functools.cache
def micro(family: str) -> LoopedLM:
    """The micro models: `small-` ones have one layer a stage and a context of 26 tokens, for tests of many runs."""
    makers = {
        "ouro": micro_ouro,
        "huginn": micro_huginn,
        "coda-ouro": lambda: micro_ouro(num_core_layers=1, num_coda_layers=2),
        "small-ouro": lambda: micro_ouro(num_core_layers=1, max_positions=26),
        "small-huginn": lambda: micro_huginn(
            num_prelude_layers=1, num_core_layers=1, max_loops=4, trained_loops=4, max_positions=26
        ),
    }
    return makers[family]()


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
    most = model.config.max_loops
    cases = {
        "none": lambda: GateCase(None, None),
        "ouro": lambda: GateCase(OuroGate(), 0.6),
        "convergence": lambda: GateCase(ConvergenceGate(), 0.9),
        "fixed": lambda: GateCase(FixedGate(2), None),
        "fixed-1": lambda: GateCase(FixedGate(1), None),
        "fixed-R": lambda: GateCase(FixedGate(most), None),
        "replay": lambda: GateCase(ReplayGate([[min(d, most) for d in row] for row in REPLAYED]), None),
        "delay": lambda: GateCase(DelayGate(ConvergenceGate()), 1.0),
        "cosine": lambda: GateCase(CosineGate(), 0.4),
        "entropy-diff": lambda: GateCase(EntropyDiffGate(), 0.1),
        "kl": lambda: GateCase(KLGate(), 0.5),
        "minp-kl": lambda: GateCase(MinPKLGate(), 0.2),
        "argmax-stability": lambda: GateCase(ArgmaxStabilityGate(), 1.0),
        "delayed-kl": lambda: GateCase(DelayGate(KLGate()), 1.0),
        "lookahead": lambda: GateCase(random_lookahead(model), 0.5),
        "hybrid": lambda: GateCase(HybridGate(random_pre_loop(model), random_lookahead(model)), 0.5),
        "pre-loop": lambda: GateCase(random_pre_loop(model), 0.6),
        **{gate: lambda make=make, q=q: GateCase(make(model), q) for gate, (make, q) in trained.ALL.items()},
    }
    return cases[name]()


class Capped(Gate):
    """A gate whose decode tokens leave after at most `most` steps: what `max_depth` of a request does."""

    kind = "capped"

    def __init__(self, inner: Gate, most: int) -> None:
        self.inner, self.most = inner, most
        for name in ("latency", "uses_carry", "needs_logits", "decode_only", "min_depth"):
            setattr(self, name, getattr(inner, name))
        self.threshold, self.threshold_range = inner.threshold, inner.threshold_range

    def bind(self, model: LoopedLM) -> Gate:
        return Capped(self.inner.bind(model), self.most)

    def start(self, entry: Entry, params: Params) -> tuple[tuple[Tensor, ...], Tensor]:
        cap = torch.where(entry.token_index > 0, self.most, params.max_depth)
        state, ahead = self.inner.start(entry, params)
        return (cap, *state), ahead | (cap <= 1) if self.latency else ahead

    def step(
        self, state: tuple[Tensor, ...], z: Tensor, step: Tensor, params: Params
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        cap, *rest = state
        after, decision = self.inner.step(tuple(rest), z, step, params)
        return (cap, *after), decision | (step + self.latency >= cap)

    def finish(self, z: Tensor, logits: Tensor, token: Tensor, depth: Tensor) -> Carry:
        return self.inner.finish(z, logits, token, depth)


def has_gate(family: str, gate: str) -> bool:
    """Whether a micro model can run with a gate: Huginn has none of its own."""
    return not (gate == "ouro" and "huginn" in family)


def exits_modes(family: str, gate: str, mode: str = "refill") -> tuple[str, ...]:
    """The `exits` modes that a gate allows. `cb` runs without one."""
    known = gate_case(family, gate).gate
    ahead = mode == "cb" or known is None or known.latency == 1
    return ("sync", "lookahead", "device") if ahead else ("sync", "device")


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
    prefill_threshold: PrefillSchedule | None = None,
    threshold: float | None = None,
    min_depth: int | None = None,
    max_depth: int | None = None,
    replayed: int = 0,
) -> tuple[list[int], list[int]]:
    """Token ids and depths of the reference decoder, EOS ignored."""
    result = decoded(
        family, layout, gate, prompt, max_tokens, chunk_size, compute, depth, seed, prefill_threshold, threshold,
        min_depth, max_depth, replayed, Sampling(temperature=temperature),
    )  # fmt: skip
    return result.token_ids, result.depths


def decoded(
    family: str,
    layout: str,
    gate: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    chunk_size: int | None = None,
    compute: str = "sparse",
    depth: int | None = None,
    seed: int = 0,
    prefill_threshold: PrefillSchedule | None = None,
    threshold: float | None = None,
    min_depth: int | None = None,
    max_depth: int | None = None,
    replayed: int = 0,
    sampling: Sampling | None = None,
) -> Generation:
    """What the reference decoder generates, EOS ignored. `prefill_threshold` asks for a ragged prefill, `max_depth`
    caps decode tokens, `replayed` is the request's row of the replay gate."""
    case = gate_case(family, gate)
    chosen = case.gate
    if isinstance(chosen, ReplayGate):
        chosen = ReplayGate([min(d, micro(family).config.max_loops) for d in REPLAYED[replayed]])
    if max_depth is not None:
        chosen = FixedGate(max_depth) if chosen is None else Capped(chosen, max_depth)
    return generate(
        micro(family),
        prompt,
        layout=layout,
        gate=chosen,
        threshold=case.threshold if threshold is None else threshold,
        min_depth=min_depth,
        depth=depth,
        compute=compute,
        prefill="dense" if prefill_threshold is None else "ragged",
        prefill_threshold=prefill_threshold,
        max_new_tokens=max_tokens,
        sampling=sampling or Sampling(temperature=0.0),
        ignore_eos=True,
        chunk_size=chunk_size,
        seed=seed,
    )


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


def run(engine: Engine, work: tuple[tuple[int, ...], ...], params: SamplingParams | list[SamplingParams]) -> Any:
    """Complete all prompts, in order: a list of completions."""
    each = params if isinstance(params, list) else [params] * len(work)
    for number, (prompt, own) in enumerate(zip(work, each, strict=True)):
        engine.add(Request(str(number), prompt, own, ordinal=number))
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


def pairs(**choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Few rows in which every two values of different options meet (a greedy pairwise cover, always the same)."""
    names = list(choices)
    missing = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in range(len(choices[a]))
        for y in range(len(choices[b]))
    }
    draw, rows = random.Random(0), []
    while missing:
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(30):
            row = {name: draw.randrange(len(choices[name])) for name in names}
            a, x, b, y = min(missing) if best[0] == 0 else draw.choice(sorted(missing))
            row[a], row[b] = x, y
            met = sum((a, row[a], b, row[b]) in missing for i, a in enumerate(names) for b in names[i + 1 :])
            best = max(best, (met, row), key=lambda pair: pair[0])
        row = best[1]
        missing -= {(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1 :]}
        rows.append({name: choices[name][row[name]] for name in names})
    return rows
