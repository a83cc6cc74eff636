"""The offline bench: one work list under each scheduler, an engine each, against the bound on its speedup.

Generated tokens, first ones included, by wall seconds, prefill included. Modes take turns (A B C, A B C, ...), so that
a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from looped.analysis.agreement import check_outputs
from looped.analysis.device import EnergyMeter
from looped.analysis.drive import Run, run
from looped.analysis.offline_results import OfflineResult
from looped.analysis.offline_summary import Setup, Summary, median_run
from looped.analysis.profile import profile
from looped.analysis.room import num_pages
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.request import SamplingParams
from looped.progress import progress

MODES = ("cb", "no-refill", "refill")
WARM_UP_TOKENS = 8


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
    result = Summary(setup, engines, runs, idle).result(agreement)
    return Measured(result, [depths for _, depths in median_run(runs[modes[-1]]).outputs])


class _Silent:
    """A stream that shows nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _options(setup: Setup, mode: str) -> EngineOptions:
    engine = setup.engine
    if mode == "cb":  # every token at full depth, those of prompts too
        engine = replace(engine, prefill="dense", prefill_threshold=None)
    return replace(
        engine,
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
