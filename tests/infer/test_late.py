"""The late scheduler beside a simulated device: its bounds are bounds, and everybody gets to the end."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.infer.late import LateScheduler, Queues
from looped.infer.scheduler import Job, Limits, Plan, Stage

MAX_LOOPS = 4


class Device:
    """Queues as a device keeps them; what the host hears of comes `lag` launches late."""

    def __init__(self, scheduler: LateScheduler, lag: int, exits: st.DataObject) -> None:
        self.scheduler, self.lag, self.exits = scheduler, lag, exits
        self.prelude: list[int] = []
        self.core: dict[int, int] = {}
        self.coda: list[int] = []
        self.left: dict[int, int] = {}
        self.unheard: deque[tuple[Queues, list[Job]]] = deque()
        self.killed: list[int] = []

    def all(self) -> tuple[list[int], list[int], list[int]]:
        return self.prelude, list(self.core), self.coda

    def queues(self) -> Queues:
        return Queues(len(self.prelude), len(self.core), len(self.coda))

    def launch(self, plan: Plan) -> None:
        """Do what a launch does; who ends with it is heard of later. Those that the host took out go first."""
        ended: list[Job] = []
        rows = self.scheduler.padded(plan.rows)
        for slot in self.killed:
            self.forget(slot)
        self.killed = []
        if plan.stage is Stage.PREFILL:
            for chunk in plan.chunks:
                if chunk.last:
                    self._token(chunk.slot, ended)
        elif plan.stage is Stage.PRELUDE:
            taken, self.prelude = self.prelude[:rows], self.prelude[rows:]
            self.core.update(dict.fromkeys(taken, 0))
        elif plan.stage is Stage.CORE:
            for slot in list(self.core)[:rows]:
                self.core[slot] += 1
                if self.core[slot] == MAX_LOOPS or self.exits.draw(st.booleans()):
                    del self.core[slot]
                    self.coda.append(slot)
            if plan.fused:
                done, self.coda = self.coda, []
                for slot in done:
                    self._token(slot, ended)
                self.core.update(dict.fromkeys(self.prelude, 0))
                self.prelude = []
        else:
            taken, self.coda = self.coda[:rows], self.coda[rows:]
            for slot in taken:
                self._token(slot, ended)
        self.unheard.append((self.queues(), ended))

    def forget(self, slot: int) -> None:
        self.prelude = [other for other in self.prelude if other != slot]
        self.coda = [other for other in self.coda if other != slot]
        self.core.pop(slot, None)

    def _token(self, slot: int, ended: list[Job]) -> None:
        self.left[slot] -= 1
        if self.left[slot] > 0:
            self.prelude.append(slot)
        else:
            ended.append(self.scheduler.active[slot])

    def abort(self, job: Job) -> None:
        """The host takes a sequence out; the device hears of it with the next launch."""
        if job.slot:
            self.killed.append(job.slot)
        self.scheduler.remove(job)

    def hear(self) -> None:
        queues, ended = self.unheard.popleft()
        self.scheduler.arrived(queues)
        for job in ended:
            if job.slot and self.scheduler.active[job.slot] is job:
                self.scheduler.left(job.slot)
                self.scheduler.remove(job)


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bounds_hold_and_everybody_ends(mode: str, fuse: bool, aborts: bool, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 6))
    limits = Limits.of(width, 8, data.draw(st.integers(1, width)), data.draw(st.integers(1, width)))
    scheduler = LateScheduler(mode, limits)
    scheduler.max_loops, scheduler.fuse = MAX_LOOPS, fuse and mode == "refill"
    if data.draw(st.booleans()):
        scheduler.padded = lambda rows: 1 << (rows - 1).bit_length()
    device = Device(scheduler, data.draw(st.integers(0, 3)), data)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    jobs = [Job(str(number), 3, 3 + length) for number, length in enumerate(lengths)]
    for job in jobs:
        scheduler.add(job)
    launches = 0
    while scheduler.has_work:
        plan = scheduler.next()
        if plan is None:
            assert device.unheard, "nothing to run and nothing to hear of"
            device.hear()
            continue
        bounds = scheduler.bounds()
        prelude, core, coda = (len([slot for slot in queue if slot not in device.killed]) for queue in device.all())
        assert prelude <= bounds.prelude
        if not scheduler.fuse:
            assert core <= bounds.core
            # An empty loop leaves only those whose end the host has not heard of.
            assert coda >= bounds.coda or not bounds.core
            assert bounds.core or prelude + coda <= len(scheduler.decode)
        if plan.stage is Stage.CODA and mode == "refill" and bounds.core and not scheduler.can_prefill():
            assert coda >= limits.min_coda_batch
        for chunk in plan.chunks:
            if chunk.start == 0:
                device.left[chunk.slot] = lengths[int(scheduler.active[chunk.slot].key)]
        device.launch(plan)
        scheduler.launched(plan)
        launches += 1
        assert len(scheduler.active) <= width
        # Every token takes at most R core steps, a coda and a prelude, and what is launched for nothing is bounded.
        assert launches < 40 + 12 * (1 + device.lag) * sum(lengths), "no end in sight"
        while len(device.unheard) > device.lag:
            device.hear()
        living = [*scheduler.active.values(), *scheduler.waiting]
        if aborts and living and data.draw(st.sampled_from([False, False, False, True])):
            device.abort(data.draw(st.sampled_from(living)))
    assert not scheduler.decode and scheduler.num_free_slots == width
