"""The engine's hands: the model, its memory and its rows on the device, and how a plan of the scheduler is launched.

Nothing here decides anything or waits for a result; that is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from looped.decode import DecodePolicy
from looped.infer.backends import choose_backend
from looped.infer.graphs import Graphs
from looped.infer.options import EngineOptions
from looped.infer.pages import KVMemory
from looped.infer.prompts import PromptPiece, Prompts, Riders
from looped.infer.request import SamplingParams
from looped.infer.rowops import CODA, CORE, PRELUDE
from looped.infer.sampler import Sampler
from looped.infer.scheduler import Chunk, Limits, Plan, Stage
from looped.infer.sequence import EngineSequence, Saved
from looped.infer.stages import Stages
from looped.infer.state import PHASE_OF, DeviceState, Resume, SlotInit
from looped.infer.transfer import Fetch
from looped.model import LoopedLM
from looped.sampling_options import FILTERED, GREEDY, RANDOM

Values = tuple[Tensor | None, ...]
# Sampling levels that have graphs of their own. Penalties and log-probabilities make their tables when first asked for.
CAPTURED_LEVELS = (GREEDY, RANDOM, FILTERED)
# Those at which a whole fused step is one graph: it has the core in it, so it takes long to capture. Any other level
# takes a graph that all levels share, and one of what follows it.
FUSED_LEVELS = (GREEDY, RANDOM)


@dataclass(eq=False)
class Ticket:
    """A launch whose results are on their way. `owners` are the sequences in its slots when it was made."""

    plan: Plan
    fetch: Fetch
    owners: dict[int, EngineSequence]
    cores: int = 0
    """Core steps launched up to and with this one."""
    depths: NDArray[np.int64] | None = None
    """Of a ragged prefill's rows."""

    @property
    def samples(self) -> bool:
        return self.plan.fused or self.plan.stage in (Stage.CODA, Stage.PREFILL)


class Runner:
    """A model made ready to run stages. `late` says that the device picks the rows of decode stages, `fuse` that a
    core step takes its exits through coda and prelude."""

    def __init__(
        self, model: LoopedLM, policy: DecodePolicy, options: EngineOptions, limits: Limits, late: bool, fuse: bool
    ) -> None:
        self.model, self.policy, self.options, self.late, self.fuse = model, policy, options, late, fuse
        device = model.device
        num_slots = limits.max_num_seqs + 1
        self.state = DeviceState(model, policy.gate, num_slots, policy.dense_compute)
        self.sampler = Sampler(num_slots, model.config.vocab_size, model.config.eos_ids, device)
        self.kv = KVMemory(
            model.config,
            policy.layout,
            policy.max_depth,
            num_slots,
            model.config.max_positions,
            model.dtype,
            device,
            page_size=options.page_size,
            num_pages=options.num_pages,
            headroom=options.kv_headroom,
            poison=options.poison,
            prefix_caching=options.prefix_caching,
            chunk_size=options.chunk_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            graphs=options.graphs,
        )
        page_sizes = [pool.page_size for pool in self.kv.pools]
        self.backend = choose_backend(options.backend, page_sizes, model.config.head_dim, model.dtype, device)
        # The reference backend gathers pages by lengths that a graph would freeze.
        capture = options.graphs and device.type == "cuda" and self.backend.backend.name != "sdpa"
        self.graphs = Graphs(device, capture, limits.max_num_seqs)
        pad = device.type == "cuda" if options.pad_batches is None else options.pad_batches
        self.stages = Stages(model, policy, self.state, self.kv, self.backend.backend, self.sampler, self.graphs, pad)
        self.prompts = Prompts(self.stages, policy, limits.max_num_batched_tokens)
        self.riders: Riders | None = None
        if capture:
            self._capture()

    def seed(self, params: SamplingParams) -> int:
        """The seed of a request: its own, else the engine's."""
        return self.options.seed if params.seed is None else params.seed

    def queues(self) -> Tensor:
        """How many slots stand in the prelude, core and coda queues: [3]."""
        return self.stages.ops.tally(self.state)

    # Decode stages.

    def decode(self, plan: Plan, owners: dict[int, EngineSequence], keys: int, level: int) -> Ticket:
        """Launch a decode stage; `keys` bounds the keys of any row, `level` is its sampling's."""
        self.stages.tick.add_(1)
        if self.late:
            values = self._late(plan, keys, level)
        elif plan.riders and not plan.slots:
            assert self.riders is not None
            self.prompts.loop(self.riders.batch)
            values = (None, None)
        else:
            values = self._picked(plan, keys, level)
        return Ticket(plan, Fetch(values), owners)

    def _picked(self, plan: Plan, keys: int, level: int) -> Values:
        """On the rows that the host picked."""
        stages = self.stages
        if plan.stage is Stage.PRELUDE:
            return stages.on("prelude", plan.slots, keys, lambda at: (stages.prelude(at),))
        if plan.stage is Stage.CODA:
            return stages.on(f"coda-{level}", plan.slots, keys, lambda at: stages.coda(at, level))
        if plan.riders:
            return stages.on("mixed core", plan.slots, keys, lambda at: stages.core(at, self.riders))
        return stages.on("core", plan.slots, keys, stages.core)

    def _late(self, plan: Plan, keys: int, level: int) -> Values:
        """On rows that the device picks. Values: new tokens if any, and last the queues after it."""
        stages, queues, rows = self.stages, self.queues, plan.rows
        if plan.fused and level in FUSED_LEVELS:
            name = f"fused-{level}"
            return stages.among(name, CORE, rows, keys, lambda at: (*stages.fused(at, level), queues()))
        if plan.fused:
            (out,) = stages.among("exits", CORE, rows, keys, lambda at: (stages.exits(at),))
            assert out is not None
            return stages.launch((f"land-{level}", len(out)), keys, lambda: (*stages.land(out, level), queues()))
        if plan.stage in (Stage.PRELUDE, Stage.CORE):
            run, phase = (stages.prelude, PRELUDE) if plan.stage is Stage.PRELUDE else (stages.core, CORE)

            def counted(at: Tensor) -> Values:
                run(at)
                return (queues(),)

            return stages.among(plan.stage.value, phase, rows, keys, counted)
        return stages.among(f"coda-{level}", CODA, rows, keys, lambda at: (*stages.coda(at, level), queues()))

    def _capture(self) -> None:
        """CUDA graphs of dense prefills and of the decode stages, for rows of slot 0: largest batches first."""
        samples = (Stage.CORE,) if self.fuse else (Stage.CODA,)
        kinds = (Stage.PRELUDE, Stage.CORE) if self.fuse else (Stage.PRELUDE, Stage.CORE, Stage.CODA)
        with self.stages.capturing():
            if self.policy.prefill is None and not self.options.mix_prefill:
                self.prompts.dense.capture(CAPTURED_LEVELS)
            for rows in sorted(self.graphs.buckets, reverse=True):
                for stage in kinds:
                    plan = Plan(stage, (0,) * rows, rows=rows, fused=self.fuse and stage is Stage.CORE)
                    for level in CAPTURED_LEVELS if stage in samples else (GREEDY,):
                        self._late(plan, 1, level) if self.late else self._picked(plan, 1, level)
        self.graphs.settle()

    # Prompts.

    def admit(self, sequences: Sequence[EngineSequence]) -> None:
        """Write the parameters of sequences into the rows of their slots."""
        self.state.admit([self._init(sequence) for sequence in sequences])
        self.sampler.admit(
            [sequence.job.slot for sequence in sequences],
            [sequence.request.params for sequence in sequences],
            [self.seed(sequence.request.params) for sequence in sequences],
            [sequence.prompt_ids for sequence in sequences],
            [sequence.token_ids for sequence in sequences],
        )

    def _init(self, sequence: EngineSequence) -> SlotInit:
        params, policy = sequence.request.params, self.policy
        return SlotInit(
            sequence.job.slot,
            self.seed(params),
            policy.threshold if params.exit_threshold is None else params.exit_threshold,
            policy.min_depth if params.min_depth is None else params.min_depth,
            policy.max_depth if params.max_depth is None else params.max_depth,
            sequence.job.max_len,
            sequence.request.ordinal,
        )

    def start_ride(self, plan: Plan, owners: dict[int, EngineSequence]) -> None:
        """Take a prefill batch through the prelude; its loop steps share those of decode batches."""
        self.stages.tick.add_(1)
        self.riders = Riders(self.prompts, self.prompts.start(self._pieces(plan, owners)))

    def prefill(self, plan: Plan, owners: dict[int, EngineSequence], level: int) -> Ticket:
        """Run a prefill batch, or end the one that was riding along."""
        self.stages.tick.add_(1)
        if self.riders is not None:
            batch, self.riders = self.riders.batch, None
            done = self.prompts.finish(batch, level)
        else:
            done = self.prompts.run(self._pieces(plan, owners), level)
        resumed = [owners[chunk.slot] for chunk in plan.chunks if chunk.last and owners[chunk.slot].token_ids]
        if resumed:
            self.state.resume([_resume(sequence) for sequence in resumed])
        values: Values = done.sampled or (None,)
        depths = done.depths if self.policy.prefill is not None else None
        return Ticket(plan, Fetch(self._with_queues(values)), owners, depths=depths)

    def _with_queues(self, values: Values) -> Values:
        return (*values, self.queues()) if self.late else values

    def _pieces(self, plan: Plan, owners: dict[int, EngineSequence]) -> list[PromptPiece]:
        return [self._piece(owners[chunk.slot], chunk) for chunk in plan.chunks]

    def _piece(self, sequence: EngineSequence, chunk: Chunk) -> PromptPiece:
        depths = sequence.depths_of(chunk, self.policy.max_depth)
        sample = chunk.last and not sequence.token_ids
        tokens = sequence.tokens_of(chunk)
        return PromptPiece(chunk.slot, chunk.start, tokens, len(sequence.prompt_ids), depths, sample)

    # Preemption. These may wait for the device.

    def stage_of(self, slot: int) -> Stage:
        """The queue that a decoding slot stands in, as the device has it."""
        phase = int(self.state.phase[slot])
        return next(stage for stage, value in PHASE_OF.items() if value == phase)

    def save(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Copy a sequence to host memory, with the K/V of its first `num_tokens` positions."""
        slot = sequence.job.slot
        sequence.saved = Saved(self.kv.save(slot, num_tokens), self.state.save(slot))

    def restore(self, plan: Plan, sequence: EngineSequence) -> Ticket:
        """Bring a sequence back from host memory, to where it was."""
        assert sequence.saved is not None
        slot = sequence.job.slot
        self.admit([sequence])
        self.kv.load(slot, sequence.saved.kv)
        self.kv.flush()
        self.state.load(slot, sequence.saved.rows)
        sequence.saved = None
        return Ticket(plan, Fetch(self._with_queues(())), {})


def _resume(sequence: EngineSequence) -> Resume:
    tokens = sequence.token_ids
    return Resume(sequence.job.slot, tokens[-1], sequence.position, len(tokens), sequence.carry)
