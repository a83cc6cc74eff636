"""The scheduler where exits stay on the device: the same rules over bounds of the queues.

The device keeps the queues and picks the rows of a stage itself. The host hears of them late: what it knows is the
state after some launch, and which launches it has made since. From these follow an upper bound of the prelude and core
queues and a lower bound of the coda queue, which are all that `choose` looks at. A stage launched for fewer rows than
wait leaves the rest for the next launch, and one launched for more pads, so no bound can change a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from looped.infer.scheduler import Counts, Job, Plan, Scheduler, Stage


class Queues(NamedTuple):
    """Rows in each queue after some launch, as counted on the device."""

    prelude: int
    core: int
    coda: int


@dataclass
class _Launch:
    """A launch whose counts are on their way: its stage, the rows it can have moved, and how many the host has taken
    out since."""

    stage: Stage
    rows: int
    gone: int = 0


class LateScheduler(Scheduler):
    """Call `next`, launch, report with `launched`; when the counts of a launch arrive, in order, call `arrived`.

    `fuse` runs coda and prelude inside every core step (K = 1): then nobody waits anywhere.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_loops = 1
        self.fuse = False
        self.padded: Callable[[int], int] = int
        """Rows that a launch for so many is padded to: it takes that many, if they wait."""
        self.decode: set[int] = set()
        self._known = Queues(0, 0, 0)
        self._since: deque[_Launch] = deque()
        """Launches whose counts have not arrived."""
        self._gone = 0
        """Of the rows in the counts known, those that the host has taken out since."""
        self._rounds = 0
        """Core steps launched since rows last entered the loop: after R of them it is empty."""

    @property
    def decoding(self) -> bool:
        return bool(self.decode)

    def queue_of(self, job: Job) -> Stage:
        raise NotImplementedError("the device knows")

    def _unqueue(self, job: Job) -> None:
        super()._unqueue(job)
        if job.slot in self.decode:
            self.decode.discard(job.slot)
            self._gone += 1
            for launch in self._since:
                launch.gone += 1

    def left(self, slot: int) -> None:
        """A sequence ended on the device: it is in no queue that is counted there. `remove` follows."""
        self.decode.discard(slot)

    def bounds(self) -> Queues:
        """Upper bounds of prelude and core, lower bound of coda (exact once the loop has certainly run empty)."""
        prelude, core, coda = self._known
        coda = max(0, coda - self._gone)
        for launch in self._since:
            stage, rows = launch.stage, launch.rows
            if stage is Stage.PREFILL:
                prelude += rows
            elif stage is Stage.PRELUDE:
                core, prelude = core + prelude, 0
            elif stage is Stage.CODA:
                coda, prelude = max(0, coda - rows), prelude + rows
            elif stage is Stage.RESTORE:
                prelude, core = prelude + rows, core + rows  # to whichever it was taken from
        most = len(self.decode)
        prelude = min(prelude, most)
        if self._rounds >= self.max_loops:
            return Queues(prelude, 0, most - prelude)
        return Queues(prelude, min(core, most), min(coda, most))

    def next(self) -> Plan | None:
        bounds = self.bounds()
        if self.fuse:
            # Codas happen inside the core steps; whoever is past the prelude counts as looping.
            bounds = Queues(bounds.prelude, len(self.decode) - bounds.prelude, 0)
        stage = self._choose(Counts(*bounds, can_prefill=self.can_prefill()), self.limits.min_coda_batch)
        if stage is None:
            return None
        if stage is Stage.PREFILL:
            return self._prompts()
        rows = {Stage.PRELUDE: bounds.prelude, Stage.CORE: bounds.core, Stage.CODA: bounds.coda}[stage]
        return Plan(stage, tuple(sorted(self.decode)), rows=rows, fused=self.fuse and stage is Stage.CORE)

    def launched(self, plan: Plan, ending: Collection[int] = ()) -> None:
        """A launch was made; what it did to the queues is known later."""
        rows = len(plan.slots)
        if plan.stage is Stage.PREFILL:
            complete = [chunk.slot for chunk in plan.chunks if chunk.last]
            self.decode.update(slot for slot in complete if slot not in ending)
            self.done_prefill(plan, ending=complete)  # in no queue of ours
            rows = len(complete)
        elif plan.stage is Stage.RESTORE:
            for slot in plan.slots:
                self.active[slot].parked = None
                self.decode.add(slot)
            self._record(plan)
        else:
            rows = self.padded(max(plan.rows, 1))
            self._record(plan)
        if plan.stage is Stage.CORE:
            self._rounds += 1
        elif plan.stage is not Stage.CODA:
            self._rounds = 0
        self._since.append(_Launch(plan.stage, rows))

    def arrived(self, queues: Queues) -> None:
        """The queues after the oldest launch that was not known of."""
        self._gone = self._since.popleft().gone
        self._known = queues
