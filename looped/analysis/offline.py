"""The offline bench: one work list under each scheduler, on one engine, against the bound on its speedup.

Generated tokens, first ones included, by wall seconds, prefill included. Modes take turns (A B C, A B C, ...), so that
a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from looped.analysis import bounds
from looped.analysis.worklist import WorkList
from looped.decode import resolve_policy
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer import LLM, SamplingParams
from looped.infer.request import Completion
from looped.infer.stats import Stats
from looped.kv import KVLayout
from looped.model import LoopedLM
from looped.progress import progress

MODES = ("cb", "no-refill", "refill")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """What is measured: everything but the scheduler."""

    model: LoopedLM
    work: WorkList
    kv: str | KVLayout | None = None
    gate: str | Gate | None = None
    threshold: float | None = None
    max_num_seqs: int = 8
    min_coda_batch: int | None = None
    ignore_eos: bool = True
    seed: int = 0


@dataclass(frozen=True)
class ModeResult:
    """One scheduler. `tok_s` is the median of `runs`, `spread` their range divided by it.

    `stage_seconds` and `mean_core_batch` are of the median run. Comparisons are None where `cb` was not run.
    """

    tok_s: float
    spread: float
    runs: tuple[float, ...]
    speedup: float | None
    realised: float | None
    mean_core_batch: float
    stage_seconds: dict[str, float]


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


@dataclass(frozen=True)
class _Run:
    """One timed pass over the work list."""

    seconds: float
    completions: list[Completion]
    stats: Stats

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def output(self) -> list[tuple[list[int], list[int]]]:
        return [(completion.token_ids, completion.depths) for completion in self.completions]


def measure(
    setup: Setup, modes: Sequence[str] = MODES, repeats: int = 3, max_seconds: float | None = None, show: bool = True
) -> OfflineResult:
    """Run the work list `repeats` times under each mode; rounds that would end after `max_seconds` are left out.

    Raises `LoopedError` for options out of range, and `RuntimeError` if two schedulers disagree on a token or a depth.
    """
    if repeats < 1:
        raise LoopedError(f"--repeats must be at least 1, got {repeats}")
    if not modes or len(set(modes)) < len(modes):
        raise LoopedError(f"--modes must name each scheduler once, got {', '.join(modes) or 'none'}")
    engines = {mode: _engine(setup, mode) for mode in modes}
    runs: dict[str, list[_Run]] = {mode: [] for mode in modes}
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
                runs[mode].append(_run(engine, setup))
                bar.advance(note=f"{mode} {runs[mode][-1].tok_s:.0f} tok/s")
            now = time.monotonic()
            if max_seconds is not None and 2 * now - start - began > max_seconds:
                break
    agreement = _check_outputs(setup, runs)
    return _summary(setup, engines[modes[-1]], runs, agreement)


class _Silent:
    """A stream that shows nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _engine(setup: Setup, mode: str) -> LLM:
    return LLM(
        setup.model,
        mode=mode,
        kv=setup.kv,
        gate=setup.gate,
        threshold=setup.threshold,
        max_num_seqs=setup.max_num_seqs,
        min_coda_batch=setup.min_coda_batch,
        seed=setup.seed,
    )


def _params(setup: Setup, limit: int | None = None) -> list[SamplingParams]:
    """Greedy, with the lengths of the work list."""
    lengths = [item.output_len if limit is None else min(item.output_len, limit) for item in setup.work.items]
    return [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=setup.ignore_eos) for n in lengths]


def _warm_up(engine: LLM, setup: Setup) -> None:
    """The first 2 W requests, cut to a few tokens: kernels are chosen, memory is touched."""
    count = min(len(setup.work.items), 2 * setup.max_num_seqs)
    prompts = [item.prompt_ids for item in setup.work.items[:count]]
    engine.generate(prompts, _params(setup, WARM_UP_TOKENS)[:count])


def _run(engine: LLM, setup: Setup) -> _Run:
    prompts, params = [item.prompt_ids for item in setup.work.items], _params(setup)
    engine.engine.reset_stats()
    _wait(setup.model)
    start = time.perf_counter()
    completions = engine.generate(prompts, params)
    _wait(setup.model)
    return _Run(time.perf_counter() - start, completions, engine.stats)


def _wait(model: LoopedLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _check_outputs(setup: Setup, runs: dict[str, list[_Run]]) -> str:
    """Timing never changes output: tokens and depths are equal in every round and under both gated schedulers.

    Batches of different sizes round differently, which can tip a token whose two best logits are nearly equal. So where
    schedulers differ, both run once more in float64; a difference that remains there is an error.
    """
    if any(
        completion.finish_reason == "error" for done in runs.values() for run in done for completion in run.completions
    ):
        raise LoopedError(f"the logits of {setup.model.name} are not finite, so there is no speed to measure")
    if setup.ignore_eos:
        counts = {mode: [run.tokens for run in done] for mode, done in runs.items()}
        if {count for of_mode in counts.values() for count in of_mode} != {setup.work.output_tokens}:
            raise RuntimeError(f"the schedulers generated different numbers of tokens: {counts}")
    for mode, done in runs.items():
        if any(run.output != done[0].output for run in done):
            raise RuntimeError(f"{mode} generated different tokens or depths in two rounds of the same work list")
    gated = [mode for mode in runs if mode != "cb"]
    if len(gated) < 2:
        return "not compared: fewer than two schedulers with exits ran"
    first, second = (runs[mode][0].output for mode in gated)
    differing = sum(a != b for a, b in zip(first, second, strict=True))
    if not differing:
        return f"{' and '.join(gated)}: the same tokens and exit depths"
    if setup.model.dtype != torch.float64:
        wide = _in_float64(setup)
        a, b = (_run(_engine(wide, mode), wide).output for mode in gated)
        if a == b:
            return (
                f"{' and '.join(gated)}: the same tokens and exit depths in float64; in {_name(setup.model.dtype)} "
                f"rounding tips {differing} of {len(first)} requests"
            )
    raise RuntimeError(f"{' and '.join(gated)} generated different tokens or depths; timing must never change output")


def _in_float64(setup: Setup) -> Setup:
    model = copy.deepcopy(setup.model).to(torch.float64)
    return Setup(**{**vars(setup), "model": model})


def _summary(setup: Setup, engine: LLM, runs: dict[str, list[_Run]], agreement: str) -> OfflineResult:
    config = setup.model.config
    medians = {mode: _median_run(done) for mode, done in runs.items()}
    last = "refill" if "refill" in runs else list(runs)[-1]
    stats = medians[last].stats
    s_dec = bounds.decode_bound(config, stats.mean_depth_with_first)
    decode_only = bounds.decode_bound(config, stats.mean_depth if stats.decode_tokens else config.max_loops)
    alpha = medians["cb"].stats.prefill_share if "cb" in medians else None
    s_e2e, strict = (None if alpha is None else bounds.end_to_end_bound(alpha, s) for s in (s_dec, decode_only))
    modes = {mode: _mode_result(done, medians[mode], runs.get("cb"), s_e2e) for mode, done in runs.items()}
    speedup = modes[last].speedup
    return OfflineResult(
        modes=modes,
        mean_depth=stats.mean_depth,
        mean_depth_with_first=stats.mean_depth_with_first,
        depth_counts=stats.depth_counts,
        prefill_share=alpha,
        s_dec=s_dec,
        s_e2e=s_e2e,
        realised=modes[last].realised,
        decode_only=DecodeOnly(decode_only, strict, None if not strict or not speedup else speedup / strict),
        tokens=medians[last].tokens,
        prompt_tokens=setup.work.prompt_tokens,
        rounds=len(runs[last]),
        agreement=agreement,
        settings=_settings(setup, engine),
    )


def _median_run(done: list[_Run]) -> _Run:
    """The run with the median speed (of an even number, the slower of the two in the middle)."""
    return sorted(done, key=lambda run: run.tok_s)[(len(done) - 1) // 2]


def _mode_result(done: list[_Run], median: _Run, cb: list[_Run] | None, s_e2e: float | None) -> ModeResult:
    speeds = [run.tok_s for run in done]
    tok_s = statistics.median(speeds)
    speedup = None if cb is None else tok_s / statistics.median(run.tok_s for run in cb)
    return ModeResult(
        tok_s=tok_s,
        spread=(max(speeds) - min(speeds)) / tok_s,
        runs=tuple(speeds),
        speedup=speedup,
        realised=None if speedup is None or s_e2e is None else bounds.realised(speedup, s_e2e),
        mean_core_batch=median.stats.mean_core_batch,
        stage_seconds={stage.value: of.seconds for stage, of in median.stats.stages.items()},
    )


def _settings(setup: Setup, engine: LLM) -> dict[str, str | int | float | None]:
    model = setup.model
    policy = resolve_policy(model, setup.kv, setup.gate, setup.threshold)
    limits = engine.engine.scheduler.limits
    return {
        "model": model.name,
        "revision": model.revision[:12],
        "max_loops": model.config.max_loops,
        "kv": policy.layout.name,
        "gate": policy.gate.name if policy.gate else None,
        "threshold": policy.threshold if policy.gate else None,
        "max_num_seqs": limits.max_num_seqs,
        "min_free_slots": limits.min_free_slots,
        "min_coda_batch": limits.min_coda_batch,
        "num_requests": len(setup.work.items),
        "work_list": setup.work.source,
        "output_tokens": setup.work.output_tokens,
        "ignore_eos": setup.ignore_eos,
        "device": str(model.device),
        "dtype": _name(model.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seed": setup.seed,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
