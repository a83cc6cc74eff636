"""Which stage runs next, and on which slots: pure Python over queues, no torch.

A sequence walks `waiting → prefill → (prelude → core × depth → coda) × tokens`. Every stage has a queue of slots. The
three schedulers differ in `choose` alone, the rule that picks a stage from the queues; packing prompts, admission,
preemption and moving slots between queues are common to all. Where exits stay on the device, `late.LateScheduler` keeps
bounds of the queues instead.

Parameters of the paper (continuous depth batching, table 1): W `max_num_seqs`, M `max_num_batched_tokens`,
S `min_free_slots`, K `min_coda_batch`, rho `kv_headroom` (kept by the memory, see `pages.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from looped.errors import LoopedError, unknown


class Stage(StrEnum):
    PREFILL = "prefill"
    PRELUDE = "prelude"
    CORE = "core"
    CODA = "coda"
    RESTORE = "restore"
    """A sequence that was moved to host memory comes back."""


@dataclass(frozen=True)
class Limits:
    """The paper's batching parameters, checked. `Limits.of` fills in the paper's defaults."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    min_free_slots: int = 8
    min_coda_batch: int = 1
    kv_headroom: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "min_free_slots", "min_coda_batch"):
            if getattr(self, name) < 1:
                raise LoopedError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("min_free_slots", "min_coda_batch"):
            if getattr(self, name) > self.max_num_seqs:
                raise LoopedError(
                    f"{name} {getattr(self, name)} is above max_num_seqs {self.max_num_seqs}, so it would never be met"
                )
        if not 0.0 <= self.kv_headroom < 1.0:
            raise LoopedError(f"kv_headroom is a share of the KV pool in [0, 1), got {self.kv_headroom}")

    @classmethod
    def of(
        cls,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        min_free_slots: int | None = None,
        min_coda_batch: int | None = None,
        kv_headroom: float = 0.0,
        fully_looped: bool = True,
    ) -> Limits:
        """Defaults: S = max(1, W // 8); K = 1 for fully looped models (their coda is cheap), else W // 4."""
        if min_free_slots is None:
            min_free_slots = max(1, max_num_seqs // 8)
        if min_coda_batch is None:
            min_coda_batch = 1 if fully_looped else max(1, max_num_seqs // 4)
        return cls(max_num_seqs, max_num_batched_tokens, min_free_slots, min_coda_batch, kv_headroom)


@dataclass(eq=False, slots=True)
class Job:
    """What the scheduler knows of a sequence. `max_len` is prompt plus the most tokens it may generate."""

    key: str
    prompt_len: int
    """Tokens that the prefill runs; after a preemption by recomputation, those generated before as well."""
    max_len: int
    reserve_len: int = 0
    """Tokens whose K/V must be promised at admission; 0: all it may ever keep, `max_len` - 1."""
    prefix: tuple[bytes, ...] = ()
    """Hashes of the prompt's blocks, for the prefix cache."""
    slot: int = 0
    prefilled: int = 0
    step: int = 0
    """Loop steps the current token has run."""
    arrival: int = 0
    parked: Stage | None = None
    """The queue it stood in when it was moved to host memory."""

    def __post_init__(self) -> None:
        self.reserve_len = self.reserve_len or self.max_len - 1


class Chunk(NamedTuple):
    """Prompt tokens `start` to `start + length` of the sequence in `slot`; `last` ends its prompt."""

    slot: int
    start: int
    length: int
    last: bool


class Plan(NamedTuple):
    """One stage to run: `chunks` for a prefill, else the slots of the batch."""

    stage: Stage
    slots: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    riders: tuple[Chunk, ...] = ()
    """Pieces of prompts that share this core step with the slots (`mix_prefill`)."""
    rows: int = 0
    """Rows to launch where the device picks them itself; `slots` are then all that may be among them."""
    fused: bool = False
    """Exits of this core step run the coda and the next prelude in the same launch."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Counts(NamedTuple):
    """All that `choose` may look at."""

    prelude: int
    core: int
    coda: int
    can_prefill: bool


class Memory(Protocol):
    """Who answers for KV pages: `pages.KVMemory`, or a stand-in in tests."""

    def can_admit(self, job: Job, idle: bool) -> bool:
        """Whether `job.reserve_len` tokens fit now, with the headroom kept unless nothing is active."""
        ...

    def admit(self, job: Job) -> int:
        """Promise them to `job.slot`; returns how many prompt tokens are in the pool already."""
        ...

    def release(self, slot: int, scrub: bool = False) -> None:
        """Take everything back; `scrub` where its K/V may hold NaN."""
        ...


class TraceRow(NamedTuple):
    """One row of the paper's tables 2 and 3: a stage, its batch, and the queues after it."""

    stage: Stage
    batch: int
    prompt_tokens: int
    steps: tuple[tuple[int, int], ...]
    """(loop step, rows that ran it) of a core batch."""
    exits: int
    prelude: int
    core: int
    coda: int
    waiting: int


class Unlimited:
    """Memory that never fills."""

    def can_admit(self, job: Job, idle: bool) -> bool:
        return True

    def admit(self, job: Job) -> int:
        return 0

    def release(self, slot: int, scrub: bool = False) -> None:
        pass


def choose_no_refill(counts: Counts, min_coda_batch: int) -> Stage | None:
    """Algorithm 1: prefill while admissible, then one cohort runs prelude, its shrinking loops, and one coda."""
    if counts.core:
        return Stage.CORE
    if counts.coda:
        return Stage.CODA
    if counts.can_prefill:
        return Stage.PREFILL
    return Stage.PRELUDE if counts.prelude else None


def choose_refill(counts: Counts, min_coda_batch: int) -> Stage | None:
    """Algorithm 2: prelude right after prefill or coda; coda at K exits; prefill; core.

    An idle tick flushes a coda queue smaller than K, so no K can deadlock.
    """
    if counts.prelude:
        return Stage.PRELUDE
    if counts.coda >= min_coda_batch:
        return Stage.CODA
    if counts.can_prefill:
        return Stage.PREFILL
    if counts.core:
        return Stage.CORE
    return Stage.CODA if counts.coda else None


# `cb` is the cohort order of no-refill; the engine runs it with every token at full depth, so no cohort shrinks.
POLICIES: dict[str, Callable[[Counts, int], Stage | None]] = {
    "cb": choose_no_refill,
    "no-refill": choose_no_refill,
    "refill": choose_refill,
}


@dataclass
class Scheduler:
    """Queues of slots and the rule that picks the next stage.

    Call `next` for a plan, run it, and report with the `done_*` method of its stage before the next call.
    `prefill_grid` is None where prompts may be cut anywhere (at most `max_chunk` tokens of one prompt a batch), else
    cuts fall only on its multiples from the prompt's start; 0 means a prompt is never cut. With `mix_loops` = R, a
    prefill batch does not run at once: its tokens ride along with the next R core steps.
    """

    mode: str
    limits: Limits
    memory: Memory = field(default_factory=Unlimited)
    prefill_grid: int | None = None
    max_chunk: int | None = None
    mix_loops: int = 0
    trace: list[TraceRow] | None = None

    def __post_init__(self) -> None:
        if self.mode not in POLICIES:
            raise unknown("mode", self.mode, POLICIES)
        self._choose = POLICIES[self.mode]
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.prelude: list[int] = []
        self.core: list[int] = []
        self.coda: list[int] = []
        self.active: dict[int, Job] = {}
        self.riding: Plan | None = None
        self._ridden = 0
        self._arrivals = 0
        self._pressed = False
        """Memory ran short: nobody is admitted until a sequence ends, or they would take turns at being preempted."""
        # A stack whose top is slot 1; slot 0 is padding.
        self._free = list(range(self.limits.max_num_seqs, 0, -1))

    # Requests in and out.

    def add(self, job: Job) -> None:
        self._arrivals += 1
        job.arrival = self._arrivals
        self.waiting.append(job)

    def remove(self, job: Job, scrub: bool = False) -> None:
        """Forget a job wherever it is (ended, aborted or failed); its slot and pages are free at once."""
        if job.slot == 0:
            self.waiting.remove(job)
            return
        self._unqueue(job)
        self._release(job, scrub)

    def preempt(self, job: Job, parked: Stage | None = None) -> None:
        """Take slot and pages from an active job, which waits again, before everyone who arrived after it.

        `parked` is the queue it goes back to when its K/V are kept elsewhere; else it starts with a prefill.
        """
        self._unqueue(job)
        self._release(job)
        self._pressed = True
        job.parked, job.prefilled = parked, 0
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > job.arrival), len(self.waiting))
        self.waiting.insert(place, job)

    def youngest(self) -> Job | None:
        """The active job that arrived last: the one to preempt."""
        return max(self.active.values(), key=_arrival, default=None)

    def queue_of(self, job: Job) -> Stage:
        """The queue an active job stands in."""
        for stage, queue in ((Stage.PRELUDE, self.prelude), (Stage.CORE, self.core), (Stage.CODA, self.coda)):
            if job.slot in queue:
                return stage
        return Stage.PREFILL

    def _unqueue(self, job: Job) -> None:
        if job in self.prefilling:
            self.prefilling.remove(job)
            if self.riding is not None and job.slot in self.riding.slots:
                self.riding = None  # the others of that batch start their pieces again
        for queue in (self.prelude, self.core, self.coda):
            if job.slot in queue:
                queue.remove(job.slot)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def decoding(self) -> bool:
        """Whether a token is on its way through the model."""
        return bool(self.prelude or self.core or self.coda)

    # Choosing.

    def next(self) -> Plan | None:
        """The next stage to run, or None when nothing can run."""
        if self.riding is not None and self._ridden == self.mix_loops:
            return self.riding
        counts = Counts(len(self.prelude), len(self.core), len(self.coda), self.can_prefill())
        if self.riding is not None:
            counts = counts._replace(core=max(1, counts.core), can_prefill=False)
        stage = self._choose(counts, self.limits.min_coda_batch)
        return None if stage is None else self._plan(stage)

    def _plan(self, stage: Stage) -> Plan:
        if stage is Stage.PREFILL:
            return self._prompts()
        if stage is Stage.PRELUDE:
            return Plan(stage, tuple(self.prelude))
        if stage is Stage.CORE:
            return Plan(stage, tuple(self.core), riders=self.riding.chunks if self.riding else ())
        return Plan(stage, tuple(self.coda))

    def _prompts(self) -> Plan:
        """The next prompt work: a sequence that comes back from host memory, or a batch of prompt tokens."""
        if not self.prefilling and self.waiting[0].parked is not None:
            return Plan(Stage.RESTORE, (self._admit(self.waiting.popleft()).slot,))
        chunks = tuple(self._pack())
        return Plan(Stage.PREFILL, tuple(chunk.slot for chunk in chunks), chunks)

    def can_prefill(self) -> bool:
        """A.2: a prompt in progress goes on; a new one needs a slot, memory, and S free slots to interrupt decode."""
        if self.prefilling:
            return True
        if not self.waiting or not self._free or (self._pressed and self.active):
            return False
        if self.decoding and self.num_free_slots < self.limits.min_free_slots:
            return False
        return self.memory.can_admit(self.waiting[0], idle=not self.active)

    def _pack(self) -> Iterable[Chunk]:
        """Up to M prompt tokens, first come first served: prompts in progress, then new ones as they are admitted."""
        budget = self.limits.max_num_batched_tokens
        empty = True
        for job in list(self.prefilling):
            length = self._cut(job, budget, empty)
            if not length:
                return
            yield self._chunk(job, length)
            budget, empty = budget - length, False
        while self.waiting and self._free and self.waiting[0].parked is None and not (self._pressed and self.active):
            job = self.waiting[0]
            if not self._cut(job, budget, empty) or not self.memory.can_admit(job, idle=not self.active):
                return
            length = self._cut(self._admit(self.waiting.popleft()), budget, empty)
            yield self._chunk(job, length)
            budget, empty = budget - length, False

    def _cut(self, job: Job, budget: int, empty: bool) -> int:
        """Tokens of `job` for this batch; 0 when its next piece does not fit. A piece of the grid is never cut, so it
        may exceed M when it is alone in the batch."""
        left = job.prompt_len - job.prefilled
        if self.prefill_grid is None:
            return max(0, min(left, budget, self.max_chunk or left))
        piece = min(left, self.prefill_grid or left)
        return piece if piece <= budget or empty else 0

    def _admit(self, job: Job) -> Job:
        job.slot = self._free.pop()
        self.active[job.slot] = job
        cached = self.memory.admit(job)
        if job.parked is None:
            job.prefilled = cached
            self.prefilling.append(job)
        return job

    def _chunk(self, job: Job, length: int) -> Chunk:
        return Chunk(job.slot, job.prefilled, length, job.prefilled + length == job.prompt_len)

    # Reporting.

    def ride(self, plan: Plan) -> None:
        """A prefill batch has run its prelude and waits for the loop; its plan comes again after R core steps."""
        self.riding, self._ridden = plan, 0
        self._record(plan)

    def done_prefill(self, plan: Plan, finished: Collection[int] = (), ending: Collection[int] = ()) -> None:
        """Prompts move on by their chunks; a complete one joins the prelude queue unless it is `finished`; `ending` as
        in `done_coda`."""
        self.riding = None
        for chunk in plan.chunks:
            job = self.active.get(chunk.slot)
            if job is None or job not in self.prefilling:
                continue
            job.prefilled += chunk.length
            if chunk.last:
                self.prefilling.remove(job)
                if chunk.slot not in ending:
                    self._continue(job, finished)
        self._record(plan)

    def done_restore(self, plan: Plan) -> None:
        """A sequence is back in the queue it was taken from."""
        for slot in plan.slots:
            job = self.active[slot]
            queue = {Stage.PRELUDE: self.prelude, Stage.CORE: self.core, Stage.CODA: self.coda}
            assert job.parked is not None
            queue[job.parked].append(slot)
            job.parked = None
        self._record(plan)

    def done_prelude(self, plan: Plan) -> None:
        """New tokens enter the loop behind those that are in it."""
        self.prelude = []
        slots = self._still_active(plan)
        self.core.extend(slots)
        for slot in slots:
            self.active[slot].step = 0
        self._record(plan)

    def done_core(self, plan: Plan, exited: Collection[int]) -> None:
        """Tokens that exited wait for the coda; the others go round again."""
        out = set(exited)
        steps: dict[int, int] = {}
        slots = self._still_active(plan)
        for slot in slots:
            job = self.active[slot]
            job.step += 1
            steps[job.step] = steps.get(job.step, 0) + 1
        self.core = [slot for slot in slots if slot not in out]
        self.coda.extend(slot for slot in slots if slot in out)
        self._ridden += bool(plan.riders)
        self._record(plan, tuple(sorted(steps.items())), len(out))

    def done_coda(self, plan: Plan, finished: Collection[int] = (), ending: Collection[int] = ()) -> None:
        """Sequences with a new token await the prelude; `finished` ones give back slot and pages. Those that are
        `ending` stay active and in no queue until `remove`, because their last token is still on its way."""
        self.coda = []
        for slot in self._still_active(plan):
            if slot not in ending:
                self._continue(self.active[slot], finished)
        self._record(plan)

    def _still_active(self, plan: Plan) -> list[int]:
        """Slots of a plan whose sequences did not end while it ran."""
        return [slot for slot in plan.slots if slot in self.active]

    def _continue(self, job: Job, finished: Collection[int]) -> None:
        if job.slot in finished:
            self._release(job)
        else:
            self.prelude.append(job.slot)

    def _release(self, job: Job, scrub: bool = False) -> None:
        self.memory.release(job.slot, scrub)
        del self.active[job.slot]
        self._free.append(job.slot)
        job.slot = 0
        self._pressed = False

    def _record(self, plan: Plan, steps: Sequence[tuple[int, int]] = (), exits: int = 0) -> None:
        if self.trace is not None:
            queues = (len(self.prelude), len(self.core), len(self.coda), len(self.waiting))
            batch = plan.rows or len(plan.slots)
            self.trace.append(TraceRow(plan.stage, batch, plan.num_prompt_tokens, tuple(steps), exits, *queues))


def _arrival(job: Job) -> int:
    return job.arrival
