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
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from looped.decode import check_prompt, resolve_policy
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.backends import choose_backend
from looped.infer.detokenize import Detokenizer
from looped.infer.graphs import Graphs
from looped.infer.late import LateScheduler, Queues
from looped.infer.options import EngineOptions
from looped.infer.pages import KVMemory, block_hashes
from looped.infer.prompts import PromptPiece, Prompts, Riders
from looped.infer.request import Output, Request, SamplingParams
from looped.infer.sampler import Sampler
from looped.infer.scheduler import Chunk, Job, Limits, Plan, Scheduler, Stage
from looped.infer.sequence import EngineSequence, NewToken, Saved, failed
from looped.infer.stages import Sampled, Stages
from looped.infer.state import CODA, CORE, PHASE_OF, PRELUDE, DeviceState, Resume, SlotInit
from looped.infer.stats import Stats, Tally
from looped.infer.transfer import Fetch
from looped.model import LoopedLM

log = logging.getLogger(__name__)

# Launches whose results may be unread in `device` mode.
LAG = 2


@dataclass(eq=False)
class _Ticket:
    """A launch whose results are on their way. `owners` are the sequences in its slots when it was made."""

    plan: Plan
    fetch: Fetch
    owners: dict[int, EngineSequence]
    cores: int
    """Core steps launched up to and with this one."""
    depths: NDArray[np.int64] | None = None
    """Of a ragged prefill's rows."""
    published: tuple[int, ...] = ()
    """Slots whose prompts are complete with this prefill, for the prefix cache."""

    @property
    def samples(self) -> bool:
        return self.plan.fused or self.plan.stage in (Stage.CODA, Stage.PREFILL)


class Engine:
    """Continuous depth batching of one model under one KV layout, gate and scheduler.

    Not thread-safe: one thread adds, steps and aborts. Raises `LoopedError` for options that are out of range or
    contradict each other, and where the memory does not suffice.
    """

    def __init__(self, model: LoopedLM, options: EngineOptions) -> None:
        options.check()
        self.model, self.options, self.exits = model, options, options.exits
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
        if options.mode == "cb":
            # Token-level batching runs R loops for every token, whatever the gate says.
            self.policy = replace(self.policy, gate=None, dense_compute=False, prefill=None)
        self.gate: Gate | None = self.policy.gate
        self._check_exits()
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
        self._inflight: deque[_Ticket] = deque()
        self._outputs: list[Output] = []
        self._kill: list[int] = []
        self._riders: Riders | None = None
        self._cores = 0
        self._ahead = np.zeros(limits.max_num_seqs + 1, dtype=bool)
        self._consumed = np.zeros(limits.max_num_seqs + 1, dtype=np.int64)
        self._tally = Tally(self.policy.max_depth)
        try:
            self._build(limits)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise LoopedError(
                "the engine does not fit into memory: lower num_pages or max_num_seqs, or switch graphs off"
            ) from error
        log.info("%s", self.describe())

    def _build(self, limits: Limits) -> None:
        model, options, policy = self.model, self.options, self.policy
        num_slots = limits.max_num_seqs + 1
        pad = model.device.type == "cuda" if options.pad_batches is None else options.pad_batches
        state = DeviceState(model, self.gate, num_slots, policy.dense_compute)
        sampler = Sampler(num_slots, model.config.vocab_size, model.config.eos_ids, model.device)
        self.kv = KVMemory(
            model.config,
            policy.layout,
            policy.max_depth,
            num_slots,
            model.config.max_positions,
            model.dtype,
            model.device,
            page_size=options.page_size,
            num_pages=options.num_pages,
            headroom=options.kv_headroom,
            poison=options.poison,
            prefix_caching=options.prefix_caching,
            chunk_size=options.chunk_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
        )
        page_sizes = [pool.page_size for pool in self.kv.pools]
        self.choice = choose_backend(options.backend, page_sizes, model.config.head_dim, model.dtype, model.device)
        backend = self.choice.backend
        # The reference backend gathers pages by lengths that a graph would freeze.
        capture = options.graphs and model.device.type == "cuda" and backend.name != "sdpa"
        self.graphs = Graphs(model.device, capture, limits.max_num_seqs)
        self.stages = Stages(model, policy, state, self.kv, backend, sampler, self.graphs, pad)
        self.prompts = Prompts(self.stages, policy)
        sensitive = policy.layout.cut_sensitive
        kind = LateScheduler if self.exits == "device" else Scheduler
        self.scheduler = kind(
            options.mode,
            limits,
            self.kv,
            prefill_grid=(options.chunk_size or 0) if sensitive else None,
            max_chunk=None if sensitive else options.chunk_size,
            mix_loops=policy.max_depth if options.mix_prefill else 0,
        )
        if isinstance(self.scheduler, LateScheduler):
            self.scheduler.max_loops = policy.max_depth
            self.scheduler.fuse = options.mode == "refill" and limits.min_coda_batch == 1
        if capture:
            self._capture()

    def _check_exits(self) -> None:
        gate, options = self.gate, self.options
        if self.exits == "lookahead" and gate is not None and gate.latency == 0 and not self.policy.dense_compute:
            raise LoopedError(
                f"exits='lookahead' needs a gate that is known one step ahead; the {gate.name} gate is not: use "
                f"exits='device' or 'sync', or the gate delayed-{gate.name}"
            )
        if options.mix_prefill and (self.exits == "device" or self.policy.prefill is not None):
            raise LoopedError("mix_prefill works with exits 'sync' and 'lookahead' and a dense prefill")

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
        parts = [
            f"{options.mode}: {self.model.name}, R {self.policy.max_depth}, layout {self.policy.layout.name}, {gate}",
            f"exits {self.exits}",
            f"backend {self.choice.describe()}",
            f"{use.num_pages} pages of {use.page_size}, room for {use.capacity_tokens} tokens at "
            f"{use.bytes_per_token} bytes a token",
            f"preemption {self.preemption or 'off'}",
            f"up to {options.max_num_seqs} sequences",
        ]
        if options.prefix_caching:
            parts.append("prefix cache")
        if self.model.device.type == "cuda":
            parts.append(f"CUDA graphs {self.graphs.describe()}")
        return ", ".join(parts)

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `LoopedError` if it can never run."""
        if request.key in self._sequences:
            raise LoopedError(f"a request with the key {request.key!r} is running already")
        params = request.params
        self._check_depths(params)
        if self.gate is not None:
            self.gate.check_request(request.ordinal)
        prompt = check_prompt(self.model, request.prompt_ids)
        self.stages.sampler.check(params)
        max_len = min(len(prompt) + params.max_tokens, self.model.config.max_positions)
        if not self.kv.fits(max_len):
            raise LoopedError(
                f"{len(prompt)} prompt tokens and up to {max_len - len(prompt)} new ones do not fit into a KV pool of "
                f"{self.kv.capacity_tokens} tokens; lower max_tokens or raise num_pages"
            )
        job = Job(request.key, len(prompt), max_len, prefix=self._prefix(request, prompt))
        eos = () if params.ignore_eos else self.model.config.eos_ids
        sequence = EngineSequence(
            request,
            prompt,
            job,
            frozenset((*eos, *params.stop_token_ids)),
            self._detokenizer(request),
            Sampler.level(params),
        )
        self._reserve(job)
        self._sequences[request.key] = sequence
        self.scheduler.add(job)

    def _reserve(self, job: Job) -> None:
        """How much memory admission promises: everything, unless it can be taken back."""
        most = job.max_len - 1
        job.reserve_len = most if self.preemption is None else min(job.prompt_len + 1, most)

    def _prefix(self, request: Request, prompt: list[int]) -> tuple[bytes, ...]:
        """Hashes of the prompt's blocks; whatever a block's K/V depend on besides its tokens is in the salt."""
        if not self.options.prefix_caching:
            return ()
        salt: list[object] = [self.policy.layout.name, self.policy.max_depth, self.options.chunk_size]
        if self.policy.prefill is not None:
            cosine = len(prompt) if self.policy.prefill.cosine else None
            salt += [self.policy.prefill, cosine, request.params.min_depth]
        if self.model.config.injection:
            salt.append(self._seed(request.params))
        return block_hashes(prompt, self.kv.prefix_block, repr(salt).encode())

    def _seed(self, params: SamplingParams) -> int:
        return self.options.seed if params.seed is None else params.seed

    def _check_depths(self, params: SamplingParams) -> None:
        wanted = {"exit_threshold": params.exit_threshold, "min_depth": params.min_depth}
        for name, value in {**wanted, "max_depth": params.max_depth}.items():
            if value is not None and self.options.mode == "cb":
                raise LoopedError(f"{name} has no effect under mode 'cb', which runs every token at full depth")
            if value is not None and self.gate is None and name in wanted:
                raise LoopedError(f"{name} was given, but the engine runs without a gate")
        if params.exit_threshold is not None and self.gate is not None:
            self.gate.check_threshold(params.exit_threshold)
        for name in ("min_depth", "max_depth"):
            value = getattr(params, name)
            if value is not None and value > self.policy.max_depth:
                raise LoopedError(f"{name} must be between 1 and {self.policy.max_depth} loops, got {value}")

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.params
        tokenizer = self.model.tokenizer if request.stream or params.stop else None
        if tokenizer is None:
            if params.stop:
                raise LoopedError(f"stop strings need a tokenizer, and {self.model.name} has none; use stop_token_ids")
            return None
        return Detokenizer(tokenizer, tuple(params.stop), params.min_tokens)

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
            ahead = 1 if plan.fused else 0
            positions = [self._bound(self._by_slot[slot], ahead) for slot in plan.slots]
            return self.kv.grow(slots, np.array(positions, dtype=np.int32))
        return True

    def _bound(self, sequence: EngineSequence, ahead: int = 0) -> int:
        """Upper bound of the position that a sequence's current token has, `ahead` tokens from now."""
        unread = sum(ticket.samples for ticket in self._inflight)
        return min(sequence.position + unread + ahead, sequence.last_position)

    def _run(self, plan: Plan) -> None:
        if self._kill:
            self.stages.state.idle(self._kill)
            self._kill = []
        if plan.stage is Stage.CORE:
            self._cores += 1
            self._consumed[list(plan.slots)] += 1
        if plan.stage is Stage.PREFILL and self.options.mix_prefill and self.scheduler.riding is not plan:
            self._start_ride(plan)
            return
        self.stages.tick.add_(1)
        ticket = self._launch(plan)
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

    # Launching.

    def _launch(self, plan: Plan) -> _Ticket:
        if plan.stage is Stage.PREFILL:
            return self._prefill(plan)
        if plan.stage is Stage.RESTORE:
            return self._restore(plan)
        stages, level = self.stages, self._level()
        owners = {slot: self._by_slot[slot] for slot in plan.slots}
        keys = max((self._bound(owner, int(plan.fused)) for owner in owners.values()), default=0) + 1
        if isinstance(self.scheduler, LateScheduler):
            values = self._launch_late(plan, keys, level)
        elif plan.stage is Stage.PRELUDE:
            values = stages.on("prelude", plan.slots, keys, lambda at: (stages.prelude(at),))
        elif plan.stage is Stage.CODA:
            values = stages.on(f"coda-{level}", plan.slots, keys, lambda at: stages.coda(at, level))
        elif not plan.riders:
            values = stages.on("core", plan.slots, keys, stages.core)
        elif plan.slots:
            values = stages.on("mixed core", plan.slots, keys, lambda at: stages.core(at, self._riders))
        else:
            assert self._riders is not None
            self.prompts.loop(self._riders.batch)
            values = (None, None)
        return _Ticket(plan, Fetch(values), owners, self._cores)

    def _launch_late(self, plan: Plan, keys: int, level: int) -> tuple[torch.Tensor | None, ...]:
        """A stage on the rows that the device picks; the last value counts the queues after it."""
        stages, queues = self.stages, self.stages.state.queues
        if plan.fused:
            name = f"fused-{level}"
            return stages.among(name, CORE, plan.rows, keys, lambda at: (*stages.fused(at, level), queues()))
        if plan.stage is Stage.PRELUDE:
            return stages.among("prelude", PRELUDE, plan.rows, keys, lambda at: (stages.prelude(at), queues()))
        if plan.stage is Stage.CORE:
            return stages.among("core", CORE, plan.rows, keys, lambda at: (*stages.core(at), queues()))
        return stages.among(f"coda-{level}", CODA, plan.rows, keys, lambda at: (*stages.coda(at, level), queues()))

    def _capture(self) -> None:
        """CUDA graphs of the decode stages, for rows of slot 0: largest batches first."""
        stages = self.stages
        for rows in sorted(self.graphs.buckets, reverse=True):
            slots = [0] * rows
            if isinstance(self.scheduler, LateScheduler):
                kinds = [Plan(Stage.PRELUDE, (), rows=rows), Plan(Stage.CORE, (), rows=rows, fused=self.scheduler.fuse)]
                if not self.scheduler.fuse:
                    kinds.append(Plan(Stage.CODA, (), rows=rows))
                with stages.capturing():
                    for plan in kinds:
                        for level in (0, 1) if plan.fused or plan.stage is Stage.CODA else (0,):
                            self._launch_late(plan, 1, level)
                continue
            with stages.capturing():
                stages.on("prelude", slots, 1, lambda at: (stages.prelude(at),))
                stages.on("core", slots, 1, stages.core)
                stages.on("coda-0", slots, 1, lambda at: stages.coda(at, 0))
                stages.on("coda-1", slots, 1, lambda at: stages.coda(at, 1))

    def _level(self) -> int:
        return max((sequence.level for sequence in self._by_slot.values()), default=0)

    def _start_ride(self, plan: Plan) -> None:
        self.stages.tick.add_(1)
        pieces = self._pieces(plan)
        self._riders = Riders(self.prompts, self.prompts.start(pieces))
        self.scheduler.ride(plan)

    def _prefill(self, plan: Plan) -> _Ticket:
        if self.scheduler.riding is plan and self._riders is not None:
            batch, self._riders = self._riders.batch, None
            done = self.prompts.finish(batch, self._level())
            pieces: Sequence[PromptPiece] = batch.pieces
        else:
            pieces = self._pieces(plan)
            done = self.prompts.run(pieces, self._level())
        resumed = [self._by_slot[c.slot] for c in plan.chunks if c.last and self._by_slot[c.slot].token_ids]
        if resumed:
            self.stages.state.resume([self._resume(sequence) for sequence in resumed])
        first = [piece.slot for piece in pieces if piece.sample]
        values: tuple[torch.Tensor | None, ...] = done.sampled or (None,)
        if isinstance(self.scheduler, LateScheduler):
            values = (*values, self.stages.state.queues())
        owners = {piece.slot: self._by_slot[piece.slot] for piece in pieces}
        depths = done.depths if self.policy.prefill is not None else None
        return _Ticket(plan, Fetch(values), owners, self._cores, depths, tuple(first))

    def _pieces(self, plan: Plan) -> list[PromptPiece]:
        """The batch of a prefill plan; sequences that start get their rows on the device."""
        starting, pieces = [], []
        for chunk in plan.chunks:
            sequence = self._sequences[self.scheduler.active[chunk.slot].key]
            if self._by_slot.get(chunk.slot) is not sequence:
                self._by_slot[chunk.slot] = sequence
                self._consumed[chunk.slot] = 0
                starting.append(sequence)
            pieces.append(self._piece(sequence, chunk))
        if starting:
            self._admit(starting)
        return pieces

    def _piece(self, sequence: EngineSequence, chunk: Chunk) -> PromptPiece:
        depths = sequence.depths_of(chunk, self.policy.max_depth)
        sample = chunk.last and not sequence.token_ids
        tokens = sequence.tokens_of(chunk)
        return PromptPiece(chunk.slot, chunk.start, tokens, len(sequence.prompt_ids), depths, sample)

    def _admit(self, sequences: Iterable[EngineSequence]) -> None:
        """Write the parameters of sequences into the rows of their slots."""
        sequences = list(sequences)
        self.stages.state.admit([self._init(sequence) for sequence in sequences])
        self.stages.sampler.admit(
            [sequence.job.slot for sequence in sequences],
            [sequence.request.params for sequence in sequences],
            [self._seed(sequence.request.params) for sequence in sequences],
            [sequence.prompt_ids for sequence in sequences],
            [sequence.token_ids for sequence in sequences],
        )

    def _init(self, sequence: EngineSequence) -> SlotInit:
        params, policy = sequence.request.params, self.policy
        return SlotInit(
            sequence.job.slot,
            self._seed(params),
            policy.threshold if params.exit_threshold is None else params.exit_threshold,
            policy.min_depth if params.min_depth is None else params.min_depth,
            policy.max_depth if params.max_depth is None else params.max_depth,
            sequence.job.max_len,
            sequence.request.ordinal,
        )

    # Preemption.

    def _preempt(self, sequence: EngineSequence) -> None:
        """Give back a sequence's pages; it waits before everyone who came later. Nothing is in flight."""
        job, state = sequence.job, self.stages.state
        stage = self._stage_of(sequence)
        parked: Stage | None = None
        if stage is not Stage.PREFILL and self.preemption == "offload":
            parked = stage
            tokens = sequence.position + (0 if stage is Stage.PRELUDE else 1)
            sequence.saved = Saved(self.kv.save(job.slot, tokens), state.save(job.slot))
            job.prompt_len = tokens
        elif sequence.token_ids:
            sequence.carry = state.save_carry(job.slot)
            sequence.rerun()
        else:
            sequence.prompt_depths = []
        if self._by_slot.pop(job.slot, None) is not None:
            self._kill.append(job.slot)
        self._reserve(job)
        self.scheduler.preempt(job, parked)
        self._tally.add_preemption()

    def _stage_of(self, sequence: EngineSequence) -> Stage:
        if not sequence.token_ids or sequence.job in self.scheduler.prefilling:
            return Stage.PREFILL
        if not isinstance(self.scheduler, LateScheduler):
            return self.scheduler.queue_of(sequence.job)
        phase = int(self.stages.state.phase[sequence.job.slot])
        return next(stage for stage, value in PHASE_OF.items() if value == phase)

    def _resume(self, sequence: EngineSequence) -> Resume:
        slot, tokens = sequence.job.slot, sequence.token_ids
        return Resume(slot, tokens[-1], sequence.position, len(tokens), sequence.carry)

    def _restore(self, plan: Plan) -> _Ticket:
        """Bring a sequence back from host memory, to where it was."""
        slot = plan.slots[0]
        sequence = self._sequences[self.scheduler.active[slot].key]
        assert sequence.saved is not None
        self._by_slot[slot] = sequence
        self._consumed[slot] = sequence.spent = 0
        self._admit([sequence])
        self.kv.load(slot, sequence.saved.kv)
        self.kv.flush()
        self.stages.state.load(slot, sequence.saved.rows)
        sequence.saved = None
        self._ahead[slot] = bool(self.stages.state.ahead[slot]) if self.exits == "lookahead" else False
        late = isinstance(self.scheduler, LateScheduler)
        return _Ticket(plan, Fetch((self.stages.state.queues(),) if late else ()), {}, self._cores)

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
                self._ahead[list(plan.slots)] = ahead.numpy()[: len(plan.slots)]
            if plan.stage is Stage.CORE and values[0] is not None:
                return [slot for slot, leaves in zip(plan.slots, values[0].tolist(), strict=False) if leaves]
        return []

    def _take(self, ticket: _Ticket, values: list[torch.Tensor | None]) -> None:
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
            if first and new.ok and slot in ticket.published:
                self.kv.publish(slot, sequence.job.prefix, len(sequence.prompt_ids))
            if output.token is not None:
                self._tally.add_token(new.depth, first=first)
                if not first:
                    self._count(sequence, slot, ticket, new.depth)
            if output.finished:
                self._end(sequence, scrub=not new.ok)

    def _count(self, sequence: EngineSequence, slot: int, ticket: _Ticket, depth: int) -> None:
        """A decode pass is complete: what it used of its pages is known."""
        depth = self.policy.max_depth if self.policy.dense_compute else depth
        self.kv.token_done(slot, depth)
        sequence.spent += depth
        if isinstance(self.scheduler, LateScheduler):
            self._consumed[slot] = sequence.spent + self._cores - ticket.cores

    def _note_depths(self, ticket: _Ticket) -> None:
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


def _rows(sampled: Sampled) -> Iterable[tuple[int, NewToken]]:
    """Slots and tokens of a batch, without padding."""
    none = [None] * len(sampled.slots)
    logprobs = none if sampled.logprobs is None else sampled.logprobs.tolist()
    tops: Sequence[tuple[tuple[int, float], ...]] = [()] * len(none)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        pairs = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    columns = (sampled.slots.tolist(), sampled.tokens.tolist(), sampled.depths.tolist(), sampled.ok.tolist())
    for slot, token, depth, ok, logprob, top in zip(*columns, logprobs, tops, strict=True):
        if slot:
            yield slot, NewToken(token, depth, ok, logprob, top)
