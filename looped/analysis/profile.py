"""A profile of steady steps: a trace to look at, and the share of it in which the GPU had nothing to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from looped.analysis.device import wait
from looped.analysis.drive import queue
from looped.infer.engine import Engine
from looped.infer.request import SamplingParams

STEPS = 50
# What a trace calls the things that occupy a GPU.
_BUSY = ("kernel", "gpu_memcpy", "gpu_memset")


def profile(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], path: Path, steps: int = STEPS
) -> float | None:
    """Write a chrome trace of `steps` steps, once 2 W requests (of a short list: half of it) have ended; the rest of
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
        for _ in range(steps):
            engine.step()
        wait(device)
    for key in keys:
        engine.abort(key)
    while engine.has_work:
        engine.step()
    seen.export_chrome_trace(str(path))
    return idle_share(_busy(path)) if gpu else None


def _busy(path: Path) -> list[tuple[float, float]]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _BUSY]


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
