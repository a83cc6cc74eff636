"""From the offline bench's runs to its result: medians, speedups, shares of the bounds."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from looped.analysis import bounds
from looped.analysis.device import describe
from looped.analysis.drive import Run
from looped.analysis.modelled import modelled, workload
from looped.analysis.offline_results import DecodeOnly, ModeResult, OfflineResult, SteadyResult
from looped.analysis.worklist import WorkList
from looped.decode import resolve_policy
from looped.gates import Gate
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.scheduler import Stage
from looped.kv import KVLayout
from looped.model import LoopedLM

if TYPE_CHECKING:
    from looped.analysis.latency import Latencies


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


def _mean_depth(counts: tuple[int, ...]) -> float | None:
    total = sum(counts)
    return sum(depth * count for depth, count in enumerate(counts)) / total if total else None


def median_run(done: list[Run]) -> Run:
    """The run with the median speed (of an even number, the slower of the two in the middle)."""
    return sorted(done, key=lambda one: one.tok_s)[(len(done) - 1) // 2]


class Summary:
    """From runs to the result."""

    def __init__(
        self, setup: Setup, engines: dict[str, Engine], runs: dict[str, list[Run]], idle: dict[str, float | None]
    ) -> None:
        self.setup, self.engines, self.runs, self.idle = setup, engines, runs, idle
        self.config = setup.model.config
        self.medians = {mode: median_run(done) for mode, done in runs.items()}
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
            prompt_tok_s=median.prompt_tok_s,
            prompt_mean_depth=_mean_depth(stats.prompt_depth_counts),
            kv_rows_share=stats.kv.rows / stats.kv.full_rows if stats.kv.full_rows else None,
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
