"""A profile of steady steps: a trace to look at, and the share of it in which the GPU had nothing to do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from looped.analysis.device import wait
from looped.analysis.drive import queue
from looped.infer.engine import Engine
from looped.infer.request import SamplingParams

STEPS = 50
# What a trace calls the things that occupy a GPU.
BUSY = ("kernel", "gpu_memcpy", "gpu_memset")


def profile(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], path: Path
) -> float | None:
    """Write a chrome trace of STEPS steps, once 2 W requests (of a short list: half of it) have ended; the rest of
    the list is dropped. Returns the share of the time between the first kernel and the last in which no kernel and no
    copy ran; None on a CPU."""
    keys = queue(engine, prompts, params)
    wanted = min(2 * engine.scheduler.limits.max_num_seqs, len(keys) // 2)
    finished = 0
    while finished < wanted and engine.has_work:
        finished += sum(output.finished for output in engine.step())
    device = engine.model.device
    gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    wait(device)
    with torch.profiler.profile(activities=[kind]) as seen:
        for _ in range(STEPS):
            engine.step()
        wait(device)
    for key in keys:
        engine.abort(key)
    while engine.has_work:
        engine.step()
    seen.export_chrome_trace(str(path))
    return idle_share(_busy(path)) if gpu else None


def _busy(path: Path) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in _events(path, BUSY)]


def _events(path: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") in kinds and "dur" in event]


def kernels(run: Callable[[], object], device: torch.device) -> list[tuple[str, int, float]]:
    """(name, calls, seconds) of every kernel and copy of `run` on a GPU, of every operator on a CPU; longest first."""
    gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as seen:
        run()
        wait(device)
    found: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        for event in _events(path, BUSY if gpu else ("cpu_op",)):
            calls, seconds = found.get(event["name"], (0, 0.0))
            found[event["name"]] = (calls + 1, seconds + event["dur"] / 1e6)
    ranked = sorted(found.items(), key=lambda item: -item[1][1])
    return [(name, calls, seconds) for name, (calls, seconds) in ranked]


def idle_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time from the first start to the last end that no (start, end) span covers; None without any."""
    covered, first, reach = 0.0, None, 0.0
    for start, end in sorted(spans):
        if first is None:
            first = reach = start
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    if first is None or reach <= first:
        return None
    return 1.0 - covered / (reach - first)
