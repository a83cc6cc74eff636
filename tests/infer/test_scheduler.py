"""Rules of the scheduler that the printed traces do not show: admission, packing, cuts, the idle flush, removal."""

import pytest

from looped.errors import LoopedError
from looped.infer.scheduler import Counts, Job, Limits, Scheduler, Stage, Unlimited, choose_refill


class Pool(Unlimited):
    """A memory of `size` tokens that keeps `headroom` of them free."""

    def __init__(self, size, headroom=0):
        self.size, self.headroom, self.held = size, headroom, {}

    def can_admit(self, job, idle):
        left = self.size - sum(self.held.values()) - job.reserve_len
        return left >= (0 if idle else self.headroom)

    def admit(self, job):
        self.held[job.slot] = job.reserve_len
        return 0

    def release(self, slot, scrub=False):
        del self.held[slot]


def make(mode="refill", prompts=(), memory=None, limits=None, **options):
    scheduler = Scheduler(mode, limits or Limits.of(4, 16), memory or Unlimited(), **options)
    jobs = [Job(str(i), length, length + 4) for i, length in enumerate(prompts)]
    for job in jobs:
        scheduler.add(job)
    return scheduler, jobs


def pieces(plan):
    return [(chunk.slot, chunk.start, chunk.length, chunk.last) for chunk in plan.chunks]


def test_defaults_are_the_papers():
    assert Limits.of() == Limits(64, 8192, 8, 1, 0.0)
    assert Limits.of(fully_looped=False).min_coda_batch == 16
    assert Limits.of(4).min_free_slots == 1
    assert Limits.of(2, fully_looped=False).min_coda_batch == 1


@pytest.mark.parametrize(
    "bad", [{"max_num_seqs": 0}, {"min_coda_batch": 65}, {"min_free_slots": 65}, {"kv_headroom": 1.0}]
)
def test_bad_limits_are_refused(bad):
    with pytest.raises(LoopedError):
        Limits.of(**bad)


def test_unknown_mode_suggests():
    with pytest.raises(LoopedError, match="did you mean 'refill'"):
        make("refil")


def test_prompts_are_cut_at_the_budget_and_go_on():
    scheduler, _ = make(prompts=(10, 10, 3))
    plan = scheduler.next()
    assert pieces(plan) == [(1, 0, 10, True), (2, 0, 6, False)]
    scheduler.done_prefill(plan)
    scheduler.done_prelude(scheduler.next())
    plan = scheduler.next()
    assert pieces(plan) == [(2, 6, 4, True), (3, 0, 3, True)]


def test_max_chunk_bounds_a_piece():
    scheduler, _ = make(prompts=(10, 3), max_chunk=4)
    assert pieces(scheduler.next()) == [(1, 0, 4, False), (2, 0, 3, True)]


def test_grid_never_cuts_inside_a_piece():
    scheduler, _ = make(prompts=(10, 9, 5), prefill_grid=8)
    plan = scheduler.next()
    assert pieces(plan) == [(1, 0, 8, False), (2, 0, 8, False)]
    scheduler.done_prefill(plan)
    assert pieces(scheduler.next()) == [(1, 8, 2, True), (2, 8, 1, True), (3, 0, 5, True)]


def test_uncut_prompt_longer_than_the_budget_runs_alone():
    scheduler, _ = make(prompts=(4, 40, 4), prefill_grid=0)
    sizes = []
    for _ in range(3):
        plan = scheduler.next()
        while plan.stage is not Stage.PREFILL:
            scheduler.done_prelude(plan)
            plan = scheduler.next()
        sizes.append([chunk.length for chunk in plan.chunks])
        scheduler.done_prefill(plan)
    assert sizes == [[4], [40], [4]]


def test_decode_is_interrupted_only_for_enough_free_slots():
    scheduler, _ = make(prompts=(2, 2, 2, 2, 2, 2), limits=Limits.of(4, 64, min_free_slots=2))
    scheduler.done_prefill(scheduler.next())
    scheduler.done_prelude(scheduler.next())
    for finished, then in (((1,), Stage.CORE), ((2,), Stage.PREFILL)):
        plan = scheduler.next()
        assert plan.stage is Stage.CORE
        scheduler.done_core(plan, plan.slots)
        plan = scheduler.next()
        scheduler.done_coda(plan, finished)
        scheduler.done_prelude(scheduler.next())
        assert (
            scheduler._choose(
                Counts(0, len(scheduler.core), 0, scheduler.can_prefill()), scheduler.limits.min_coda_batch
            )
            is then
        )


def test_head_of_the_line_waits_for_memory_and_nobody_overtakes():
    scheduler, jobs = make(prompts=(8, 8, 1), memory=Pool(20))
    scheduler.done_prefill(scheduler.next())
    assert [job.slot for job in jobs] == [1, 0, 0]
    assert scheduler.next().stage is Stage.PRELUDE


def test_headroom_yields_when_nothing_is_active():
    scheduler, jobs = make(prompts=(8, 1), memory=Pool(20, headroom=15))
    plan = scheduler.next()
    assert pieces(plan) == [(1, 0, 8, True)]
    assert jobs[1].slot == 0


def test_idle_tick_flushes_an_undersized_coda():
    assert choose_refill(Counts(0, 0, 3, False), 16) is Stage.CODA
    assert choose_refill(Counts(0, 1, 3, False), 16) is Stage.CORE
    assert choose_refill(Counts(0, 0, 0, False), 16) is None


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
def test_removal_from_every_queue_frees_slot_and_memory(mode):
    memory = Pool(100)
    scheduler, jobs = make(mode, (3, 3, 3, 20, 5), memory)
    scheduler.remove(jobs[4])
    plan = scheduler.next()
    scheduler.done_prefill(plan)
    scheduler.remove(jobs[3])
    plan = scheduler.next()
    assert plan.stage is Stage.PRELUDE
    scheduler.remove(jobs[0])
    scheduler.done_prelude(scheduler.next())
    plan = scheduler.next()
    scheduler.done_core(plan, plan.slots[:1])
    scheduler.remove(jobs[1])
    scheduler.remove(jobs[2])
    assert not scheduler.has_work and scheduler.next() is None
    assert scheduler.num_free_slots == 4 and memory.held == {}


def test_first_token_may_finish_a_sequence():
    scheduler, _ = make(prompts=(3, 3))
    plan = scheduler.next()
    scheduler.done_prefill(plan, finished={1})
    assert scheduler.prelude == [2] and scheduler.num_free_slots == 3
