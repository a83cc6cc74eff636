"""The engine: one loop for all schedulers. Requests go in, `step` runs one stage, new tokens come out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from looped.decode import check_prompt, resolve_policy
from looped.errors import LoopedError
from looped.gates import Gate
from looped.infer.backends import get_backend
from looped.infer.detokenize import Detokenizer
from looped.infer.options import EngineOptions
from looped.infer.pages import KVMemory
from looped.infer.request import Output, Request, SamplingParams
from looped.infer.scheduler import Job, Limits, Plan, Scheduler, Stage
from looped.infer.stages import Row, Sampled, Stages
from looped.infer.state import DeviceState, SlotInit
from looped.infer.stats import Stats, Tally
from looped.model import LoopedLM

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Sequence:
    """A request in the engine and what it has produced."""

    request: Request
    prompt_ids: list[int]
    job: Job
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the newest token, the one to run next."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    @property
    def full(self) -> bool:
        return self.position + 1 >= self.job.max_len


class Engine:
    """Continuous depth batching of one model under one KV layout, gate and scheduler.

    Not thread-safe: one thread adds, steps and aborts. Raises `LoopedError` for options that are out of range,
    contradict each other, or are not available yet.
    """

    def __init__(self, model: LoopedLM, options: EngineOptions) -> None:
        options.check()
        self.model, self.options = model, options
        policy = resolve_policy(
            model, options.kv, options.gate, options.threshold, options.min_depth, options.depth, options.compute
        )
        self.policy = policy
        # Token-level batching runs R loops for every token, whatever the gate says.
        self.gate: Gate | None = None if options.mode == "cb" else policy.gate
        dense = policy.dense_compute and options.mode != "cb"
        limits = Limits.of(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            options.min_free_slots,
            options.min_coda_batch,
            options.kv_headroom,
            model.config.fully_looped,
        )
        self.backend = get_backend(options.backend)
        num_slots = limits.max_num_seqs + 1
        try:
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
            )
        except (MemoryError, RuntimeError) as error:
            if options.num_pages is None:
                raise
            raise LoopedError(
                f"a KV pool of {options.num_pages} pages does not fit into memory; lower num_pages"
            ) from error
        self.backend.check(self.kv.page_size, model.device.type)
        sensitive = policy.layout.cut_sensitive
        self.scheduler = Scheduler(
            options.mode,
            limits,
            self.kv,
            prefill_grid=(options.chunk_size or 0) if sensitive else None,
            max_chunk=None if sensitive else options.chunk_size,
        )
        state = DeviceState(model, self.gate, num_slots, dense)
        self.stages = Stages(model, replace(policy, dense_compute=dense), state, self.kv, self.backend)
        self._sequences: dict[str, _Sequence] = {}
        self._by_slot: dict[int, _Sequence] = {}
        self._failed: list[Output] = []
        self._tally = Tally(policy.max_depth)
        log.info("%s", self.describe())

    def describe(self) -> str:
        """What is said once at start: scheduler, layout, gate, backend, pages and their size."""
        use = self.kv.usage()
        gate = self.gate.name if self.gate else "full depth"
        return (
            f"{self.options.mode}: {self.model.name}, R {self.policy.max_depth}, layout {self.policy.layout.name}, "
            f"{gate}, backend {self.backend.describe()}, {use.num_pages} pages of {use.page_size}, "
            f"room for {use.capacity_tokens} tokens at {use.bytes_per_token} bytes a token, "
            f"up to {self.options.max_num_seqs} sequences"
        )

    # Requests.

    def add(self, request: Request) -> None:
        """Queue a request. Raises `LoopedError` if it can never run."""
        if request.key in self._sequences:
            raise LoopedError(f"a request with the key {request.key!r} is running already")
        params = request.params
        self._check_depths(params)
        prompt = check_prompt(self.model, request.prompt_ids)
        max_len = min(len(prompt) + params.max_tokens, self.model.config.max_positions)
        if not self.kv.fits(max_len):
            raise LoopedError(
                f"{len(prompt)} prompt tokens and up to {max_len - len(prompt)} new ones do not fit into a KV pool of "
                f"{self.kv.capacity_tokens} tokens; lower max_tokens or raise num_pages"
            )
        eos = () if params.ignore_eos else self.model.config.eos_ids
        sequence = _Sequence(
            request,
            prompt,
            Job(request.key, len(prompt), max_len),
            frozenset((*eos, *params.stop_token_ids)),
            self._detokenizer(request),
        )
        self._sequences[request.key] = sequence
        self.scheduler.add(sequence.job)

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
        tokenizer = self.model.tokenizer if request.stream or request.params.stop else None
        if tokenizer is None:
            if request.params.stop:
                raise LoopedError(f"stop strings need a tokenizer, and {self.model.name} has none; use stop_token_ids")
            return None
        return Detokenizer(tokenizer, tuple(request.params.stop))

    def abort(self, key: str) -> bool:
        """Drop a request at any stage; its slot and pages are free at once. False where there is none."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self._by_slot.pop(sequence.job.slot, None)
        self.scheduler.remove(sequence.job)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._failed) or self.scheduler.has_work

    # The loop.

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run the next stage; returns the tokens it produced.

        When a stage raises, the sequences of its batch end with the reason "error", reported by the next call; all
        others go on.
        """
        if self._failed:
            failed, self._failed = self._failed, []
            return failed
        started = time.perf_counter()
        plan = self.scheduler.next()
        if plan is None:
            return []
        try:
            outputs = self._run(plan)
        except BaseException:
            self._fail(plan)
            raise
        self._tally.add_stage(plan, time.perf_counter() - started)
        return outputs

    def _run(self, plan: Plan) -> list[Output]:
        if plan.stage is Stage.PREFILL:
            return self._prefill(plan)
        rows = [self._row(slot) for slot in plan.slots]
        if plan.stage is Stage.PRELUDE:
            self.stages.prelude(rows)
            self.scheduler.done_prelude(plan)
            return []
        if plan.stage is Stage.CORE:
            self.scheduler.done_core(plan, self.stages.core(rows))
            return []
        sampled = self.stages.coda(rows)
        outputs, finished = self._take(plan.slots, sampled)
        self.scheduler.done_coda(plan, finished)
        return outputs

    def _row(self, slot: int) -> Row:
        sequence = self._by_slot[slot]
        return Row(slot, sequence.position, sequence.job.step)

    def _prefill(self, plan: Plan) -> list[Output]:
        token_ids: list[int] = []
        inits: list[SlotInit] = []
        for chunk in plan.chunks:
            sequence = self._sequences[self.scheduler.active[chunk.slot].key]
            self._by_slot[chunk.slot] = sequence
            token_ids += sequence.prompt_ids[chunk.start : chunk.start + chunk.length]
            if chunk.start == 0:
                inits.append(self._init(chunk.slot, sequence.request))
        if inits:
            self.stages.state.admit(inits)
        sampled = self.stages.prefill(plan.chunks, token_ids)
        outputs, finished = self._take([chunk.slot for chunk in plan.chunks if chunk.last], sampled)
        self.scheduler.done_prefill(plan, finished)
        return outputs

    def _init(self, slot: int, request: Request) -> SlotInit:
        params, policy = request.params, self.policy
        return SlotInit(
            slot,
            self.options.seed if params.seed is None else params.seed,
            params.temperature,
            policy.threshold if params.exit_threshold is None else params.exit_threshold,
            policy.min_depth if params.min_depth is None else params.min_depth,
            policy.max_depth if params.max_depth is None else params.max_depth,
            request.ordinal,
        )

    def _take(self, slots: Iterable[int], sampled: Sampled) -> tuple[list[Output], set[int]]:
        """Append the new tokens to their sequences; returns what to report and the slots that are done."""
        outputs: list[Output] = []
        finished: set[int] = set()
        for slot, token, depth, ok in zip(slots, *sampled, strict=True):
            sequence = self._by_slot[slot]
            output = self._append(sequence, token, depth) if ok else _error(sequence.request.key)
            outputs.append(output)
            if output.token is not None:
                self._tally.add_token(depth, first=len(sequence.token_ids) == 1)
            if output.finished:
                finished.add(slot)
                del self._by_slot[slot]
                del self._sequences[sequence.request.key]
        return outputs, finished

    def _append(self, sequence: _Sequence, token: int, depth: int) -> Output:
        sequence.token_ids.append(token)
        text, reason, reader = "", None, sequence.detokenizer
        if reader is not None:
            text = reader.push(token)
        if token in sequence.stop_ids or (reader is not None and reader.stopped):
            reason = "stop"
        elif sequence.full:
            reason = "length"
        if reason is not None and reader is not None:
            text += reader.finish()
        return Output(sequence.request.key, token, depth, text, reason)

    def _fail(self, plan: Plan) -> None:
        """Drop the sequences of a batch whose stage raised, those that ended in it too: nobody heard of their end."""
        for slot in plan.slots:
            job = self.scheduler.active.get(slot)
            if job is None:
                continue
            if not self.abort(job.key):
                self.scheduler.remove(job)
            self._failed.append(_error(job.key))

    @property
    def stats(self) -> Stats:
        """Counts and times since the start or the last `reset_stats`."""
        return self._tally.stats(self.kv.usage())

    def reset_stats(self) -> None:
        self._tally = Tally(self.policy.max_depth)


def _error(key: str) -> Output:
    return Output(key, None, 0, "", "error")
