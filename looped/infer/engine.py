"""The engine: one loop for all schedulers and all ways to hear of exits.

Requests go in, `step` launches one stage, new tokens come out. What a launch produced is read when it is needed: at
once
(`exits="sync"`), one launch later (`lookahead`: the decision about a step is made by the step before), or two launches
later (`device`: rows leave, sample and come in again without the host). Everything runs on one stream, so whatever the
host queues (freed slots, pages, new prompts) comes after the launches it has made, whether it has seen them or not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from looped.decode import DecodePolicy, resolve_policy
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.intake import Intake
from looped.infer.late import LateScheduler, Queues
from looped.infer.options import EngineOptions
from looped.infer.request import Output, Request, SamplingParams
from looped.infer.runner import Runner, Ticket
from looped.infer.scheduler import Limits, Plan, Scheduler, Stage
from looped.infer.sequence import EngineSequence, NewToken, failed
from looped.infer.stages import Sampled
from looped.infer.stats import Stats, Tally
from looped.model import LoopedLM, ops

log = logging.getLogger(__name__)

# Launches whose results may be unread in `device` mode.
LAG = 2


class Engine:
    """Continuous depth batching of one model under one KV layout, gate and scheduler.

    Not thread-safe: one thread adds, steps and aborts. Raises `LoopedError` for options that are out of range or
    contradict each other, and where the memory does not suffice.
    """

    def __init__(self, model: LoopedLM, options: EngineOptions) -> None:
        options.check()
        self.model, self.options = model, options
        self.policy = resolve_policy(
            model,
            options.kv,
            options.gate,
            options.threshold,
            options.min_depth,
            options.depth,
            options.compute,
            options.prefill,
            options.prefill_threshold,
        )
        if self.policy.prefill is not None and self.policy.prefill.block:
            raise LoopedError("in the engine prompt tokens leave one by one; as one block they do in looped.generate")
        if options.mode == "cb":
            # Token-level batching runs R loops for every token, whatever the gate says.
            self.policy = replace(self.policy, gate=None, dense_compute=False, prefill=None)
        self.gate: Gate | None = self.policy.gate
        self.exits = self._exits()
        self.preemption = self._preemption()
        limits = Limits.of(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.min_free_slots,
            options.min_coda_batch,
            options.kv_headroom,
            model.config.fully_looped,
        )
        self._sequences: dict[str, EngineSequence] = {}
        self._by_slot: dict[int, EngineSequence] = {}
        self._inflight: deque[Ticket] = deque()
        self._outputs: list[Output] = []
        self._kill: list[int] = []
        self._cores = 0
        self._ahead = np.zeros(limits.max_num_seqs + 1, dtype=bool)
        # By slot: pages its decode passes took at most, the newest known token's position, and the last one's.
        self._consumed, self._position, self._last = np.zeros((3, limits.max_num_seqs + 1), dtype=np.int64)
        self._tally = Tally(self.policy.max_depth)
        late = self.exits == "device"
        # With layers outside the core, a coda for every row of every step would cost more than it spares.
        fuse = late and options.mode == "refill" and limits.min_coda_batch == 1 and model.config.fully_looped
        try:
            self.runner = Runner(model, self.policy, options, limits, late, fuse)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise LoopedError(
                "the engine does not fit into memory: lower num_pages or max_num_seqs, or switch graphs off"
            ) from error
        self.kv = self.runner.kv
        self._intake = Intake(self.runner, self.policy, options, self.preemption is None)
        self.scheduler = self._scheduler(limits, late, fuse)
        log.info("%s", self.describe())

    def _scheduler(self, limits: Limits, late: bool, fuse: bool) -> Scheduler:
        options, sensitive = self.options, self.policy.layout.cut_sensitive
        scheduler = (LateScheduler if late else Scheduler)(
            options.mode,
            limits,
            self.kv,
            prefill_grid=(options.chunk_size or 0) if sensitive else None,
            max_chunk=None if sensitive else options.chunk_size,
            mix_loops=self.policy.max_depth if options.mix_prefill else 0,
        )
        if isinstance(scheduler, LateScheduler):
            scheduler.max_loops, scheduler.fuse = self.policy.max_depth, fuse
            scheduler.padded = self.runner.stages.bucket
        return scheduler

    def _exits(self) -> str:
        """How the host learns of exits; `auto` is the way that keeps a GPU busy, and none where it would only wait."""
        options = self.options
        if options.exits == "auto":
            return "device" if self.model.device.type == "cuda" and not options.mix_prefill else "sync"
        check_exits(options.exits, self.policy)
        if options.mix_prefill and options.exits == "device":
            raise LoopedError("mix_prefill works with exits 'sync' and 'lookahead', where the host picks the rows")
        return options.exits

    def _preemption(self) -> str | None:
        wanted, sensitive = self.options.preemption, self.policy.layout.cut_sensitive
        if wanted == "recompute" and sensitive:
            raise LoopedError(
                f"preemption='recompute' is not exact under layout {self.policy.layout.name!r}, which overwrites "
                "planes; use 'offload'"
            )
        if wanted == "auto":
            return "offload" if sensitive else "recompute"
        return None if wanted == "off" else wanted

    def describe(self) -> str:
        """What is said once at start: scheduler, layout, gate, backend, pages and their size."""
        use, options = self.kv.usage(), self.options
        gate = self.gate.name if self.gate else "full depth"
        if self.gate is not None and self.gate.needs_logits:
            gate += " (coda after every step)"
        parts = [
            f"{options.mode}: {self.model.name}, R {self.policy.max_depth}, layout {self.policy.layout.name}, {gate}",
            f"exits {self.exits}",
            f"backend {self.runner.backend.describe()}",
            f"layers {ops.describe(self.model.device, self.model.dtype)}",
            f"{use.num_pages} pages of {use.page_size}, room for {use.capacity_tokens} tokens at "
            f"{use.bytes_per_token} bytes a token",
            f"preemption {self.preemption or 'off'}",
            f"up to {options.max_num_seqs} sequences",
        ]
        if options.prefix_caching:
            parts.append("prefix cache")
        if self.model.device.type == "cuda":
            parts.append(f"CUDA graphs {self.runner.graphs.describe()}")
            parts.append(self.runner.prompts.dense.describe())
        return ", ".join(parts)

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `LoopedError` if it can never run."""
        if request.key in self._sequences:
            raise LoopedError(f"a request with the key {request.key!r} is running already")
        sequence = self._intake.sequence(request)
        self._sequences[request.key] = sequence
        self.scheduler.add(sequence.job)

    def abort(self, key: str) -> bool:
        """Drop a request at any stage; its slot and pages are free at once. False where there is none."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def _end(self, sequence: EngineSequence, scrub: bool = False) -> None:
        """Forget a sequence; launches that still have it write before anything that is queued from now on."""
        sequence.ended = True
        del self._sequences[sequence.request.key]
        slot = sequence.job.slot
        if self._by_slot.get(slot) is sequence:
            del self._by_slot[slot]
            self._kill.append(slot)
        self.scheduler.remove(sequence.job, scrub)

    @property
    def has_work(self) -> bool:
        return bool(self._outputs or self._inflight) or self.scheduler.has_work

    # The loop.

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Launch the next stage; returns the tokens that have become known.

        When a stage raises, the sequences of its batch end with the reason "error", reported by the next call; all
        others go on.
        """
        started = time.perf_counter()
        while self._inflight and self._inflight[0].fetch.ready and self.exits == "device" and self._lagging():
            self._retire()
        plan = self._next()
        if plan is None:
            if self._inflight:
                self._retire()
            return self._collect()
        try:
            self._run(plan)
        except BaseException:
            self._fail(plan)
            raise
        self._tally.add_stage(plan, time.perf_counter() - started)
        return self._collect()

    def _lagging(self) -> bool:
        # On a CPU every result is ready at once; keeping the lag there runs the same code as on a GPU.
        return self.model.device.type == "cuda" or len(self._inflight) >= LAG

    def _collect(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _next(self) -> Plan | None:
        """The next plan, once there are pages for it; who came last makes room."""
        while True:
            plan = self.scheduler.next()
            if plan is None or self._has_room(plan):
                return plan
            if self._inflight:
                self._drain()  # what is on its way may end sequences
                continue
            victim = self.scheduler.youngest()
            if victim is None or len(self.scheduler.active) == 1:
                raise RuntimeError("the KV pool is full though a request that fits is alone in it")
            self._preempt(self._by_slot[victim.slot])

    def _has_room(self, plan: Plan) -> bool:
        """Pages for what a decode stage may write; prompts were promised theirs."""
        slots = np.array(plan.slots, dtype=np.int32)
        if plan.stage is Stage.CORE and len(slots) and not self.kv.supply(slots, self._consumed[slots], 1):
            return False
        if plan.stage is Stage.PRELUDE or plan.fused:
            return self.kv.grow(slots, self._bounds(plan).astype(np.int32))
        return True

    def _bounds(self, plan: Plan) -> NDArray[np.int64]:
        """Upper bounds of the positions that a plan's rows are at, after it where it brings new tokens in."""
        slots = list(plan.slots)
        unread = sum(ticket.samples for ticket in self._inflight)
        return np.minimum(self._position[slots] + unread + int(plan.fused), self._last[slots])

    def _run(self, plan: Plan) -> None:
        if self._kill:
            self.runner.state.idle(self._kill)
            self._kill = []
        if plan.stage is Stage.CORE:
            self._cores += 1
            self._consumed[list(plan.slots)] += 1
        ticket = self._launch(plan)
        if ticket is None:
            return
        ending = self._ending(plan)
        scheduler = self.scheduler
        if isinstance(scheduler, LateScheduler):
            scheduler.launched(plan, ending)
            self._inflight.append(ticket)
            while len(self._inflight) > LAG:
                self._retire()
        elif self.exits == "lookahead":
            if plan.stage is Stage.CORE:
                self._drain()
                self._inflight.append(ticket)
                scheduler.done_core(plan, self._foreseen(plan))
            else:
                self._done(plan, ending)
                self._drain()
                self._inflight.append(ticket)
        else:
            self._inflight.append(ticket)
            left = self._retire()
            if plan.stage is Stage.CORE:
                scheduler.done_core(plan, left)
            else:
                self._done(plan, ())

    def _done(self, plan: Plan, ending: Sequence[int]) -> None:
        if plan.stage is Stage.PREFILL:
            self.scheduler.done_prefill(plan, ending=ending)
        elif plan.stage is Stage.RESTORE:
            self.scheduler.done_restore(plan)
        elif plan.stage is Stage.PRELUDE:
            self.scheduler.done_prelude(plan)
        else:
            self.scheduler.done_coda(plan, ending=ending)

    def _ending(self, plan: Plan) -> list[int]:
        """Slots whose token, now on its way, is certainly their last."""
        if plan.stage is Stage.PREFILL:
            slots = [chunk.slot for chunk in plan.chunks if chunk.last and not self._by_slot[chunk.slot].token_ids]
        else:
            slots = list(plan.slots) if plan.stage is Stage.CODA else []
        return [slot for slot in slots if self._by_slot[slot].ends_with_next()]

    def _foreseen(self, plan: Plan) -> list[int]:
        """Who leaves with this core step, from what the step before said."""
        out = []
        for slot in plan.slots:
            sequence = self._by_slot.get(slot)
            if sequence is not None:
                limit = self._deepest(sequence.request.params)
                if self._ahead[slot] or sequence.job.step + 1 >= limit:
                    out.append(slot)
        return out

    def _deepest(self, params: SamplingParams) -> int:
        """Loop steps after which a token leaves in any case; with dense compute `max_depth` only picks the output."""
        deepest = self.policy.max_depth
        return deepest if params.max_depth is None or self.policy.dense_compute else params.max_depth

    def _launch(self, plan: Plan) -> Ticket | None:
        """Make the launch of a plan; None for prompts that only start to ride along."""
        runner = self.runner
        if plan.stage in (Stage.PREFILL, Stage.RESTORE):
            self._seat(plan)
        owners = dict(self._by_slot)
        level = max((sequence.level for sequence in owners.values()), default=0)
        if plan.stage is Stage.RESTORE:
            ticket = runner.restore(plan, owners[plan.slots[0]])
            self._foresee(plan)
        elif plan.stage is not Stage.PREFILL:
            keys = self._bounds(plan).max(initial=0) + 1
            ticket = runner.decode(plan, owners, int(keys), level)
        elif self.options.mix_prefill and self.scheduler.riding is not plan:
            runner.start_ride(plan, owners)
            self.scheduler.ride(plan)
            return None
        else:
            ticket = runner.prefill(plan, owners, level)
        ticket.cores = self._cores
        return ticket

    def _seat(self, plan: Plan) -> None:
        """Sequences that were admitted with a plan take their slots."""
        starting = []
        for slot in plan.slots:
            sequence = self._sequences[self.scheduler.active[slot].key]
            if self._by_slot.get(slot) is not sequence:
                self._by_slot[slot] = sequence
                self._consumed[slot] = sequence.spent = 0
                # The last position whose K/V it can need: the token behind it is never run.
                self._position[slot], self._last[slot] = sequence.position, sequence.job.max_len - 2
                starting.append(sequence)
        if starting and plan.stage is Stage.PREFILL:
            self.runner.admit(starting)

    def _foresee(self, plan: Plan) -> None:
        """What the gate said of the next step of sequences that came back; with dense compute nobody leaves by it."""
        if self.exits == "lookahead" and not self.policy.dense_compute:
            for slot in plan.slots:
                self._ahead[slot] = bool(self.runner.state.ahead[slot])

    # Preemption.

    def _preempt(self, sequence: EngineSequence) -> None:
        """Give back a sequence's pages; it waits before everyone who came later. Nothing is in flight."""
        job = sequence.job
        stage = self._stage_of(sequence)
        parked: Stage | None = None
        if stage is not Stage.PREFILL and self.preemption == "offload":
            parked = stage
            tokens = sequence.position + (0 if stage is Stage.PRELUDE else 1)
            self.runner.save(sequence, tokens)
            job.prompt_len = tokens
        elif sequence.token_ids:
            if stage is not Stage.PREFILL:  # else it is running again, and the slot has no carry yet
                sequence.carry = self.runner.state.save_carry(job.slot)
            sequence.rerun()
        else:
            sequence.prompt_depths = []
        if self._by_slot.pop(job.slot, None) is not None:
            self._kill.append(job.slot)
        self._intake.reserve(job)
        self.scheduler.preempt(job, parked)
        self._tally.add_preemption()

    def _stage_of(self, sequence: EngineSequence) -> Stage:
        if not sequence.token_ids or sequence.job in self.scheduler.prefilling:
            return Stage.PREFILL
        if not isinstance(self.scheduler, LateScheduler):
            return self.scheduler.queue_of(sequence.job)
        return self.runner.stage_of(sequence.job.slot)

    # Results.

    def _drain(self) -> None:
        while self._inflight:
            self._retire()

    def _retire(self) -> list[int]:
        """Read the oldest launch. Returns the slots that left the loop, where the host decides by them."""
        ticket = self._inflight.popleft()
        values = ticket.fetch.wait()
        if isinstance(self.scheduler, LateScheduler):
            *values, queues = values
            assert queues is not None
            self.scheduler.arrived(Queues(*queues.tolist()))
        plan = ticket.plan
        if ticket.samples:
            self._take(ticket, values)
        elif plan.stage in (Stage.PRELUDE, Stage.CORE) and not isinstance(self.scheduler, LateScheduler):
            ahead = values[-1]
            if ahead is not None:
                for slot, leaves in zip(plan.slots, ahead.tolist(), strict=False):
                    # A sequence may have come back to the slot of one that ended.
                    if ticket.owners.get(slot) is self._by_slot.get(slot):
                        self._ahead[slot] = leaves
            if plan.stage is Stage.CORE and values[0] is not None:
                return [slot for slot, leaves in zip(plan.slots, values[0].tolist(), strict=False) if leaves]
        return []

    def _take(self, ticket: Ticket, values: list[torch.Tensor | None]) -> None:
        """Append new tokens to their sequences and end those that are done."""
        if ticket.depths is not None:
            self._note_depths(ticket)
        if values[0] is None:
            return
        for slot, new in _rows(Sampled(*values)):  # type: ignore[arg-type]
            sequence = ticket.owners[slot]
            if sequence.ended or sequence.job.slot != slot:
                continue
            first = not sequence.token_ids
            output = sequence.take(new)
            self._outputs.append(output)
            if first and new.ok and ticket.plan.stage is Stage.PREFILL:
                self.kv.publish(slot, sequence.job.prefix, len(sequence.prompt_ids))
            if output.token is not None:
                self._position[slot] += 1
                self._tally.add_token(new.depth, first=first)
                if not first:
                    self._count(sequence, slot, ticket, new.depth)
            if output.finished:
                ended_there = not new.ok or new.token in sequence.stop_ids or sequence.full
                if ended_there and isinstance(self.scheduler, LateScheduler):
                    self.scheduler.left(slot)
                self._end(sequence, scrub=not new.ok)

    def _count(self, sequence: EngineSequence, slot: int, ticket: Ticket, depth: int) -> None:
        """A decode pass is complete: what it used of its pages is known."""
        depth = self.policy.max_depth if self.policy.dense_compute else depth
        self.kv.token_done(slot, depth)
        sequence.spent += depth
        if isinstance(self.scheduler, LateScheduler):
            self._consumed[slot] = sequence.spent + self._cores - ticket.cores

    def _note_depths(self, ticket: Ticket) -> None:
        assert ticket.depths is not None
        stops = np.cumsum([chunk.length for chunk in ticket.plan.chunks])
        for chunk, depths in zip(ticket.plan.chunks, np.split(ticket.depths, stops[:-1]), strict=True):
            sequence = ticket.owners[chunk.slot]
            if not sequence.token_ids:
                # Tokens found in the prefix cache left where the gate said, and would again.
                missing = chunk.start - len(sequence.prompt_depths)
                sequence.prompt_depths += [-1] * missing + depths.tolist()
                self._tally.add_prompt_depths(depths)

    def _fail(self, plan: Plan) -> None:
        """End the sequences of a batch whose stage raised, those that ended in it too: nobody heard of their end."""
        for slot in dict.fromkeys((*plan.slots, *(chunk.slot for chunk in plan.riders))):
            job = self.scheduler.active.get(slot)
            if job is None:
                continue
            sequence = self._sequences.get(job.key)
            if sequence is None:
                self.scheduler.remove(job)
            else:
                self._end(sequence)
            self._outputs.append(failed(job.key))

    @property
    def stats(self) -> Stats:
        """Counts and times since the start or the last `reset_stats`."""
        return self._tally.stats(self.kv.usage())

    def reset_stats(self) -> None:
        self._tally = Tally(self.policy.max_depth)


def check_exits(exits: str, policy: DecodePolicy) -> None:
    """Refuse `lookahead` where a gate's answer does not come a step early."""
    gate = policy.gate
    if exits == "lookahead" and gate is not None and gate.latency == 0 and not policy.dense_compute:
        raise LoopedError(
            f"exits='lookahead' needs a gate that is known one step ahead; the {gate.name} gate is not: use "
            f"exits='device' or 'sync', or the gate delayed-{gate.name}"
        )


def _rows(sampled: Sampled) -> Iterable[tuple[int, NewToken]]:
    """Slots and tokens of a batch, without padding."""
    slots, tokens, depths, oks = sampled.rows_4N.tolist()
    logprobs = [None] * len(slots) if sampled.logprobs is None else sampled.logprobs.tolist()
    tops: Sequence[tuple[tuple[int, float], ...]] = [()] * len(slots)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        pairs = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    for slot, token, depth, ok, logprob, top in zip(slots, tokens, depths, oks, logprobs, tops, strict=True):
        if slot:
            yield slot, NewToken(token, depth, bool(ok), logprob, top)
