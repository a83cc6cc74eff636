"""A run of the scheduler without a model: exits are given, K/V memory never fills. No torch.

What comes out is the order of stages and who is in their batches, which is all that tables 2 and 3 of the paper on
continuous depth batching show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from looped.analysis.depths import Exits
from looped.infer.scheduler import Job, Limits, Plan, Scheduler, Stage, TraceRow


@dataclass(frozen=True)
class Workload:
    """Requests in order: prompt tokens of each, and the exit depths of its decode passes. The prompt's pass gives the
    first new token, so a request makes one token more than it has passes."""

    prompt_lens: tuple[int, ...]
    exits: tuple[Exits, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over the rows of a trace. `core_rows` is the number of loop steps that tokens ran, the sum of exit depths
    once all have left; `ideal_core_launches` would run them in full batches of W; `occupancy` is those over the core
    launches there were."""

    launches: dict[str, int]
    prompt_tokens: int
    exits: int
    core_rows: int
    ideal_core_launches: float
    occupancy: float | None


def simulate(
    mode: str, limits: Limits, work: Workload, max_loops: int, max_stages: int | None = None
) -> list[TraceRow]:
    """The first `max_stages` stages (None: all) of a run in which every request is there from the start. Under `cb`
    every token runs `max_loops` steps, whatever its exit."""
    trace: list[TraceRow] = []
    run = _Run(Scheduler(mode, limits, trace=trace), work, max_loops)
    while run.scheduler.has_work and (max_stages is None or len(trace) < max_stages):
        plan = run.scheduler.next()
        if plan is None:
            raise RuntimeError("the scheduler stands still with requests unfinished")
        run.stage(plan)
    return trace


class _Run:
    """The scheduler and, by request, the exits still to come."""

    def __init__(self, scheduler: Scheduler, work: Workload, max_loops: int) -> None:
        self.scheduler, self.max_loops = scheduler, max_loops
        self.left: dict[str, list[int]] = {}
        for number, (prompt_len, exits) in enumerate(zip(work.prompt_lens, work.exits, strict=True)):
            key = str(number)
            depths = [max_loops] * len(exits) if scheduler.mode == "cb" else list(exits)
            self.left[key] = depths[::-1]
            scheduler.add(Job(key, prompt_len, prompt_len + len(exits) + 1))

    def stage(self, plan: Plan) -> None:
        """Run one stage: nothing happens but the scheduler's own bookkeeping."""
        if plan.stage is Stage.PREFILL:
            self.scheduler.done_prefill(plan, self._finished(chunk.slot for chunk in plan.chunks if chunk.last))
        elif plan.stage is Stage.PRELUDE:
            self.scheduler.done_prelude(plan)
        elif plan.stage is Stage.CORE:
            exited = [slot for slot in plan.slots if self._job(slot).step + 1 == self._depths(slot)[-1]]
            self.scheduler.done_core(plan, exited)
        else:
            for slot in plan.slots:
                self._depths(slot).pop()
            self.scheduler.done_coda(plan, self._finished(plan.slots))

    def _job(self, slot: int) -> Job:
        return self.scheduler.active[slot]

    def _depths(self, slot: int) -> list[int]:
        return self.left[self._job(slot).key]

    def _finished(self, slots: Iterable[int]) -> list[int]:
        return [slot for slot in slots if not self._depths(slot)]


def sums(trace: Sequence[TraceRow], max_num_seqs: int) -> Totals:
    """The sums of a trace under W = `max_num_seqs`."""
    launches = {stage.value: sum(row.stage is stage for row in trace) for stage in Stage}
    core_rows = sum(num for row in trace for _, num in row.steps)
    core = launches[Stage.CORE.value]
    return Totals(
        launches={name: num for name, num in launches.items() if num},
        prompt_tokens=sum(row.prompt_tokens for row in trace),
        exits=sum(row.exits for row in trace),
        core_rows=core_rows,
        ideal_core_launches=core_rows / max_num_seqs,
        occupancy=core_rows / (core * max_num_seqs) if core else None,
    )
