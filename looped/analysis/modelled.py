"""How fast a schedule could be if the device never waited: stages simulated with their measured latencies. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from looped.analysis.latency import Latencies
from looped.analysis.simulate import Workload, simulate
from looped.infer.scheduler import Limits, Stage, TraceRow


@dataclass(frozen=True)
class Modelled:
    """Seconds of a whole run and of each stage in it."""

    seconds: float
    stage_seconds: dict[str, float]


def modelled(mode: str, limits: Limits, work: Workload, max_loops: int, latencies: Latencies) -> Modelled:
    """Run the scheduler without a model and add up what its stages take.

    Every stage takes the time measured for its rows at the mean context of the list's decode tokens; a prefill that of
    one prompt with as many tokens. There is no host and nothing overlaps.
    """
    context = mean_context(work)
    seconds: dict[str, float] = {}
    for row in simulate(mode, limits, work, max_loops):
        seconds[row.stage.value] = seconds.get(row.stage.value, 0.0) + _seconds(row, latencies, context)
    return Modelled(sum(seconds.values()), seconds)


def _seconds(row: TraceRow, latencies: Latencies, context: float) -> float:
    if row.stage is Stage.PREFILL:
        return latencies("prefill", row.prompt_tokens, 0)
    return latencies(row.stage.value, row.batch, context)


def mean_context(work: Workload) -> float:
    """Keys that a decode pass reads, in the mean over all of them; that of the prompts without any."""
    passes = [(prompt, len(exits)) for prompt, exits in zip(work.prompt_lens, work.exits, strict=True)]
    total = sum(count for _, count in passes)
    if not total:
        return sum(prompt for prompt, _ in passes) / max(1, len(passes))
    return sum(count * prompt + count * (count + 1) / 2 for prompt, count in passes) / total


def workload(prompt_lens: Sequence[int], depths: Sequence[Sequence[int]]) -> Workload:
    """From depths as the engine reports them, the prompt's pass first."""
    return Workload(tuple(prompt_lens), tuple(tuple(row[1:]) for row in depths))
