"""One work list through one engine: what came out, how long it took, and the steady part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from looped.analysis.device import EnergyMeter, wait
from looped.infer.engine import Engine
from looped.infer.request import Output, Request, SamplingParams
from looped.infer.runner import Ticket
from looped.infer.scheduler import Plan, Stage
from looped.infer.sequence import EngineSequence
from looped.infer.stats import Stats

Prefill = Callable[[Plan, dict[int, EngineSequence], int], Ticket]
Generated = tuple[list[int], list[int]]
"""Token ids and depths of a request."""


@dataclass(frozen=True)
class Steady:
    """The window from 2 W finished requests to an empty waiting queue, in which the engine is as full as it gets."""

    seconds: float
    tokens: int
    stats: Stats
    prefill_seconds: float | None

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def prefill_share(self) -> float:
        """Prefill's share of the window, on the device where that is known."""
        return _share(self.prefill_seconds, self.seconds, self.stats)


@dataclass(frozen=True)
class Run:
    """One timed pass over a work list. `prefill_seconds` is the device's time in prefills, None on a CPU."""

    seconds: float
    outputs: list[Generated]
    failed: bool
    stats: Stats
    steady: Steady | None
    prefill_seconds: float | None
    joules: float | None

    @property
    def tokens(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.outputs)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def prompt_tok_s(self) -> float | None:
        """Prompt tokens by the seconds of their prefills; None where no time was taken."""
        spent = self.stats.stages[Stage.PREFILL].seconds if self.prefill_seconds is None else self.prefill_seconds
        return self.stats.prompt_tokens / spent if spent else None

    @property
    def prefill_share(self) -> float:
        """Alpha of the end-to-end bound: on a GPU the share of the run that its prefills took there."""
        return _share(self.prefill_seconds, self.seconds, self.stats)


def _share(prefill_seconds: float | None, seconds: float, stats: Stats) -> float:
    return stats.prefill_share if prefill_seconds is None else prefill_seconds / seconds


class PrefillClock:
    """Events before and behind each prefill of an engine, while it is entered. Counts nothing on a CPU, where the
    engine's own times are the device's."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self._on = engine.model.device.type == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> Self:
        if self._on:
            self._runner.prefill = self._timed(self._runner.prefill)  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._on:
            del self._runner.prefill

    def _timed(self, launch: Prefill) -> Prefill:
        def run(plan: Plan, owners: dict[int, EngineSequence], level: int) -> Ticket:
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            ticket = launch(plan, owners, level)
            second.record()
            self._pairs.append((first, second))
            return ticket

        return run

    @property
    def count(self) -> int:
        return len(self._pairs)

    def seconds(self, start: int = 0, stop: int | None = None) -> float | None:
        """Device time of the prefills from number `start` to `stop`, once they have run."""
        if not self._on:
            return None
        return float(sum(first.elapsed_time(second) for first, second in self._pairs[start:stop]) / 1e3)


@dataclass
class _Collected:
    """What has come out so far."""

    keys: Sequence[str]
    outputs: list[Generated] = field(init=False)
    finished: int = 0
    tokens: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        self.outputs = [([], []) for _ in self.keys]
        self._index = {key: number for number, key in enumerate(self.keys)}

    def take(self, output: Output) -> None:
        token_ids, depths = self.outputs[self._index[output.key]]
        if output.token is not None:
            token_ids.append(output.token)
            depths.append(output.depth)
            self.tokens += 1
        if output.finished:
            self.finished += 1
            self.failed = self.failed or output.finish_reason == "error"


@dataclass(frozen=True)
class _Point:
    """Where a run stood at some moment."""

    at: float
    tokens: int
    stats: Stats
    prefills: int


def queue(engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[str]:
    """Give an engine all requests at once; returns their keys."""
    keys = [f"bench-{number}" for number in range(len(prompts))]
    for ordinal, (key, prompt, given) in enumerate(zip(keys, prompts, params, strict=True)):
        engine.add(Request(key, prompt, given, ordinal=ordinal, stream=False))
    return keys


def run(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], meter: EnergyMeter | None
) -> Run:
    """All requests, there from the start, until the last has ended."""
    engine.reset_stats()
    wait(engine.model.device)
    joules = None if meter is None else meter.joules()
    opened: _Point | None = None
    closed: _Point | None = None
    with PrefillClock(engine) as prefills:
        start = time.perf_counter()
        got = _Collected(queue(engine, prompts, params))
        while got.finished < len(prompts):
            if not engine.has_work:
                raise RuntimeError(f"the engine stopped with {len(prompts) - got.finished} requests unfinished")
            for output in engine.step():
                got.take(output)
            if closed is None and not engine.scheduler.waiting:
                closed = _Point(time.perf_counter(), got.tokens, engine.stats, prefills.count)
            elif opened is None and got.finished >= 2 * engine.scheduler.limits.max_num_seqs:
                opened = _Point(time.perf_counter(), got.tokens, engine.stats, prefills.count)
        wait(engine.model.device)
        seconds = time.perf_counter() - start
    return Run(
        seconds,
        got.outputs,
        got.failed,
        engine.stats,
        _steady(opened, closed, prefills),
        prefills.seconds(),
        _difference(joules, None if meter is None else meter.joules()),
    )


def _steady(opened: _Point | None, closed: _Point | None, prefills: PrefillClock) -> Steady | None:
    if opened is None or closed is None or closed.tokens <= opened.tokens:
        return None
    took = prefills.seconds(opened.prefills, closed.prefills)
    return Steady(closed.at - opened.at, closed.tokens - opened.tokens, closed.stats.since(opened.stats), took)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
