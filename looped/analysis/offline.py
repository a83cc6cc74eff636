"""The offline bench: one work list under each scheduler, an engine each, against the bound on its speedup.

Generated tokens, first ones included, by wall seconds, prefill included. Modes take turns (A B C, A B C, ...), so that
a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from looped.analysis import bounds
from looped.analysis.agreement import check_outputs
from looped.analysis.device import EnergyMeter, describe
from looped.analysis.drive import Run, run
from looped.analysis.modelled import modelled, workload
from looped.analysis.profile import profile
from looped.analysis.room import num_pages
from looped.analysis.worklist import WorkList
from looped.decode import resolve_policy
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.request import SamplingParams
from looped.infer.scheduler import Stage
from looped.kv import KVLayout
from looped.model import LoopedLM
from looped.progress import progress

if TYPE_CHECKING:
    from looped.analysis.latency import Latencies

MODES = ("cb", "no-refill", "refill")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """What is measured: everything but the scheduler. `latencies` are the stages' times to compare with."""

    model: LoopedLM
    work: WorkList
    kv: str | KVLayout | None = None
    gate: str | Gate | None = None
    threshold: float | None = None
    max_num_seqs: int = 8
    min_coda_batch: int | None = None
    ignore_eos: bool = True
    seed: int = 0
    engine: EngineOptions = field(default_factory=EngineOptions)
    """The rest of the engine's options."""
    latencies: Latencies | None = None


@dataclass(frozen=True)
class SteadyResult:
    """A scheduler in the steady window, as in `ModeResult`; `tok_s` is the median of `runs`."""

    tok_s: float
    spread: float
    runs: tuple[float, ...]
    speedup: float | None
    s_e2e: float | None
    realised: float | None
    mean_depth: float
    prefill_share: float
    core_launches: int
    occupancy: float | None


@dataclass(frozen=True)
class ModeResult:
    """One scheduler. `tok_s` is the median of `runs`, `spread` their range divided by it.

    What follows `realised` is of the median run. Comparisons are None where `cb` was not run. `launches` counts those
    of each stage; `ideal_core_launches` would run the loop steps of all tokens in batches of W, and `occupancy` is
    their ratio. `allowed_tok_s` is the speed of the schedule with the stages' measured latencies and no host.
    `gpu_idle` is the share of a profile's steady steps in which nothing ran.
    """

    tok_s: float
    spread: float
    runs: tuple[float, ...]
    speedup: float | None
    realised: float | None
    mean_core_batch: float
    stage_seconds: dict[str, float]
    prefill_share: float | None = None
    launches: dict[str, int] | None = None
    ideal_core_launches: float | None = None
    occupancy: float | None = None
    steady: SteadyResult | None = None
    joules_per_token: float | None = None
    allowed_tok_s: float | None = None
    of_allowed: float | None = None
    gpu_idle: float | None = None
    preemptions: int = 0
    engine: str = ""


@dataclass(frozen=True)
class DecodeOnly:
    """The bound with first tokens left out of the mean depth: they belong to the prefill. Never below the paper's."""

    s_dec: float
    s_e2e: float | None
    realised: float | None


@dataclass(frozen=True)
class OfflineResult:
    """The bench's result.

    `mean_depth` is over decode tokens; `s_dec` uses `mean_depth_with_first`, in which each request's first token counts
    at R, as the paper does. `prefill_share` is measured under cb. `realised` is the refill scheduler's share of
    `s_e2e` (of the last mode run, if that is another). `agreement` says how the schedulers' tokens were compared.
    `s_dec_attention` counts the FLOPs of attention as well.
    """

    modes: dict[str, ModeResult]
    mean_depth: float
    mean_depth_with_first: float
    depth_counts: tuple[int, ...]
    prefill_share: float | None
    s_dec: float
    s_e2e: float | None
    realised: float | None
    decode_only: DecodeOnly
    tokens: int
    prompt_tokens: int
    rounds: int
    agreement: str
    settings: dict[str, str | int | float | None]
    s_dec_attention: float | None = None
    s_e2e_attention: float | None = None
    energy_ratio: float | None = None
    """Joules a token of the last mode over those of cb."""


@dataclass(frozen=True)
class Measured:
    """The result, and the depths of every request's tokens in the last mode, the prompt's pass first."""

    result: OfflineResult
    depths: list[list[int]]


def measure(
    setup: Setup, modes: Sequence[str] = MODES, repeats: int = 3, max_seconds: float | None = None, show: bool = True
) -> OfflineResult:
    """`measure_all` without the depths."""
    return measure_all(setup, modes, repeats, max_seconds, show).result


def measure_all(
    setup: Setup,
    modes: Sequence[str] = MODES,
    repeats: int = 3,
    max_seconds: float | None = None,
    show: bool = True,
    trace: Path | None = None,
) -> Measured:
    """Run the work list `repeats` times under each mode; rounds that would end after `max_seconds` are left out.

    `trace` is where a profile of steady steps goes, one file a mode. Raises `LoopedError` for options out of range, and
    `RuntimeError` if two schedulers disagree on a token or a depth.
    """
    if repeats < 1:
        raise LoopedError(f"--repeats must be at least 1, got {repeats}")
    if not modes or len(set(modes)) < len(modes):
        raise LoopedError(f"--modes must name each scheduler once, got {', '.join(modes) or 'none'}")
    pages = num_pages(setup.model, _options(setup, modes[-1]), setup.work, len(modes))
    engines = {mode: _engine(setup, mode, pages) for mode in modes}
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    meter = EnergyMeter(setup.model.device)
    began = time.monotonic()
    with progress((repeats + 1) * len(modes), "bench", every=len(modes)) as bar:
        bar.stream = bar.stream if show else _Silent()
        bar.bar = bar.bar and show
        for engine in engines.values():
            _warm_up(engine, setup)
            bar.advance(note="warm-up")
        for _ in range(repeats):
            start = time.monotonic()
            for mode, engine in engines.items():
                runs[mode].append(run(engine, _prompts(setup), _params(setup), meter))
                bar.advance(note=f"{mode} {runs[mode][-1].tok_s:.0f} tok/s")
            now = time.monotonic()
            if max_seconds is not None and 2 * now - start - began > max_seconds:
                break
    wanted = setup.work.output_tokens if setup.ignore_eos else None
    replayed = isinstance(setup.gate, Gate) and setup.gate.decode_only
    agreement = check_outputs(setup.model, runs, wanted, replayed, lambda: _in_float64(setup, runs))
    idle = {mode: _profile(engine, setup, trace, mode, len(modes)) for mode, engine in engines.items()}
    result = _Summary(setup, engines, runs, idle).result(agreement)
    return Measured(result, [depths for _, depths in _median_run(runs[modes[-1]]).outputs])


class _Silent:
    """A stream that shows nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _options(setup: Setup, mode: str) -> EngineOptions:
    return replace(
        setup.engine,
        mode=mode,
        kv=setup.kv,
        gate=setup.gate,
        threshold=setup.threshold,
        max_num_seqs=setup.max_num_seqs,
        min_coda_batch=setup.min_coda_batch,
        seed=setup.seed,
    )


def _engine(setup: Setup, mode: str, pages: int | None) -> Engine:
    return Engine(setup.model, replace(_options(setup, mode), num_pages=pages))


def _prompts(setup: Setup) -> list[tuple[int, ...]]:
    return [item.prompt_ids for item in setup.work.items]


def _params(setup: Setup, limit: int | None = None) -> list[SamplingParams]:
    """Greedy, with the lengths of the work list."""
    lengths = [item.output_len if limit is None else min(item.output_len, limit) for item in setup.work.items]
    return [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=setup.ignore_eos) for n in lengths]


def _warm_up(engine: Engine, setup: Setup) -> None:
    """The first 2 W requests, cut to a few tokens: kernels are chosen, memory is touched."""
    count = min(len(setup.work.items), 2 * setup.max_num_seqs)
    run(engine, _prompts(setup)[:count], _params(setup, WARM_UP_TOKENS)[:count], None)


def _in_float64(setup: Setup, runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """The schedulers with exits once more, without rounding that matters."""
    wide = replace(setup, model=copy.deepcopy(setup.model).to(torch.float64))
    gated = [mode for mode in runs if mode != "cb"]
    return {mode: [run(_engine(wide, mode, None), _prompts(wide), _params(wide), None)] for mode in gated}


def _profile(engine: Engine, setup: Setup, trace: Path | None, mode: str, count: int) -> float | None:
    if trace is None:
        return None
    path = trace if count == 1 else trace.with_name(f"{trace.stem}-{mode}{trace.suffix or '.json'}")
    return profile(engine, _prompts(setup), _params(setup), path)


def _median_run(done: list[Run]) -> Run:
    """The run with the median speed (of an even number, the slower of the two in the middle)."""
    return sorted(done, key=lambda one: one.tok_s)[(len(done) - 1) // 2]


class _Summary:
    """From runs to the result."""

    def __init__(
        self, setup: Setup, engines: dict[str, Engine], runs: dict[str, list[Run]], idle: dict[str, float | None]
    ) -> None:
        self.setup, self.engines, self.runs, self.idle = setup, engines, runs, idle
        self.config = setup.model.config
        self.medians = {mode: _median_run(done) for mode, done in runs.items()}
        self.last = "refill" if "refill" in runs else list(runs)[-1]
        stats = self.medians[self.last].stats
        self.s_dec = bounds.decode_bound(self.config, stats.mean_depth_with_first)
        self.alpha = self.medians["cb"].prefill_share if "cb" in runs else None

    def result(self, agreement: str) -> OfflineResult:
        last = self.medians[self.last]
        stats, s_e2e = last.stats, self._end_to_end(self.s_dec, self.alpha)
        decode_only = bounds.decode_bound(self.config, stats.mean_depth if stats.decode_tokens else self._deepest)
        strict = self._end_to_end(decode_only, self.alpha)
        attention = self._attention_bound(last)
        modes = {mode: self._mode(mode, s_e2e) for mode in self.runs}
        speedup = modes[self.last].speedup
        cb, joules = modes.get("cb"), modes[self.last].joules_per_token
        return OfflineResult(
            modes=modes,
            mean_depth=stats.mean_depth,
            mean_depth_with_first=stats.mean_depth_with_first,
            depth_counts=stats.depth_counts,
            prefill_share=self.alpha,
            s_dec=self.s_dec,
            s_e2e=s_e2e,
            realised=modes[self.last].realised,
            decode_only=DecodeOnly(decode_only, strict, None if not strict or not speedup else speedup / strict),
            tokens=last.tokens,
            prompt_tokens=self.setup.work.prompt_tokens,
            rounds=len(self.runs[self.last]),
            agreement=agreement,
            settings=self._settings(),
            s_dec_attention=attention,
            s_e2e_attention=self._end_to_end(attention, self.alpha),
            energy_ratio=joules / cb.joules_per_token if cb and joules and cb.joules_per_token else None,
        )

    @property
    def _deepest(self) -> int:
        return self.config.max_loops

    @staticmethod
    def _end_to_end(s_dec: float, alpha: float | None) -> float | None:
        return None if alpha is None else bounds.end_to_end_bound(min(alpha, 1.0), s_dec)

    def _attention_bound(self, run: Run) -> float:
        """Token i of a request is made by a pass over prompt + i tokens, the first by the prompt's."""
        items = self.setup.work.items
        return bounds.attention_bound(
            self.config,
            (
                (depth, len(item.prompt_ids) + index)
                for item, (_, depths) in zip(items, run.outputs, strict=True)
                for index, depth in enumerate(depths)
            ),
        )

    def _mode(self, mode: str, s_e2e: float | None) -> ModeResult:
        done, median = self.runs[mode], self.medians[mode]
        tok_s, spread, speeds = _speeds([one.tok_s for one in done])
        cb = self.runs.get("cb")
        speedup = None if cb is None else tok_s / statistics.median(one.tok_s for one in cb)
        stats = median.stats
        allowed = self._allowed(mode, median)
        core = stats.stages[Stage.CORE].batches
        ideal = stats.loop_steps / self.setup.max_num_seqs
        return ModeResult(
            tok_s=tok_s,
            spread=spread,
            runs=speeds,
            speedup=speedup,
            realised=None if speedup is None or s_e2e is None else bounds.realised(speedup, s_e2e),
            mean_core_batch=stats.loop_steps / core if core else float("nan"),
            stage_seconds={stage.value: of.seconds for stage, of in stats.stages.items()},
            prefill_share=median.prefill_share,
            launches={stage.value: of.batches for stage, of in stats.stages.items() if of.batches},
            ideal_core_launches=ideal,
            occupancy=ideal / core if core else None,
            steady=self._steady(mode),
            joules_per_token=None if median.joules is None else median.joules / median.tokens,
            allowed_tok_s=allowed,
            of_allowed=None if allowed is None else tok_s / allowed,
            gpu_idle=self.idle[mode],
            preemptions=stats.preemptions,
            engine=self.engines[mode].describe(),
        )

    def _steady(self, mode: str) -> SteadyResult | None:
        """None where a list is too short for a steady window."""
        windows = [one.steady for one in self.runs[mode] if one.steady is not None]
        if not windows:
            return None
        tok_s, spread, speeds = _speeds([window.tok_s for window in windows])
        median = sorted(windows, key=lambda window: window.tok_s)[(len(windows) - 1) // 2]
        speedup = s_e2e = None
        full = [one.steady for one in self.runs.get("cb", []) if one.steady is not None]
        stats = median.stats
        if full:
            speedup = tok_s / statistics.median(window.tok_s for window in full)
            alpha = statistics.median(window.prefill_share for window in full)
            s_e2e = self._end_to_end(bounds.decode_bound(self.config, stats.mean_depth_with_first), alpha)
        core = stats.stages[Stage.CORE].batches
        return SteadyResult(
            tok_s=tok_s,
            spread=spread,
            runs=speeds,
            speedup=speedup,
            s_e2e=s_e2e,
            realised=None if speedup is None or s_e2e is None else bounds.realised(speedup, s_e2e),
            mean_depth=stats.mean_depth,
            prefill_share=median.prefill_share,
            core_launches=core,
            occupancy=stats.loop_steps / (core * self.setup.max_num_seqs) if core else None,
        )

    def _allowed(self, mode: str, median: Run) -> float | None:
        latencies = self.setup.latencies
        if latencies is None:
            return None
        lens = [len(item.prompt_ids) for item in self.setup.work.items]
        work = workload(lens, [depths for _, depths in median.outputs])
        limits = self.engines[mode].scheduler.limits
        return median.tokens / modelled(mode, limits, work, self._deepest, latencies).seconds

    def _settings(self) -> dict[str, str | int | float | None]:
        setup, model = self.setup, self.setup.model
        policy = resolve_policy(model, setup.kv, setup.gate, setup.threshold)
        engine = self.engines[self.last]
        limits = engine.scheduler.limits
        return {
            "model": model.name,
            "revision": model.revision[:12],
            "max_loops": model.config.max_loops,
            "kv": policy.layout.name,
            "gate": policy.gate.name if policy.gate else None,
            "threshold": policy.threshold if policy.gate else None,
            "exits": engine.exits,
            **{name: asdict(limits)[name] for name in ("max_num_seqs", "min_free_slots", "min_coda_batch")},
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "num_requests": len(setup.work.items),
            "work_list": setup.work.source,
            "output_tokens": setup.work.output_tokens,
            "ignore_eos": setup.ignore_eos,
            "device": str(model.device),
            "device_name": describe(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "backend": engine.runner.backend.describe(),
            "capture_seconds": round(engine.runner.graphs.seconds, 2),
            "capture_bytes": engine.runner.graphs.num_bytes,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "seed": setup.seed,
        }


def _speeds(speeds: list[float]) -> tuple[float, float, tuple[float, ...]]:
    """The median, the range divided by it, and all of them."""
    median = statistics.median(speeds)
    return median, (max(speeds) - min(speeds)) / median, tuple(speeds)
