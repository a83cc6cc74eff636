"""What exit gates are distilled from: a frozen teacher that turns documents into features under a policy of deployment.

One forward of the teacher serves every student. While all features fit in memory they are made once; else the teacher
runs for each optimiser step and nothing is kept.
"""

# B sequences, T tokens, N positions, R loop steps

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates import Gate, native_gate
from looped.gates.criteria import ConvergenceGate
from looped.gates.dial import curve_of
from looped.kv import KVLayout
from looped.model import LoopedLM
from looped.progress import progress
from looped.train.gates.batches import Shape
from looped.train.gates.documents import Documents
from looped.train.gates.feed import Feed, Place
from looped.train.gates.leaving import ExitPolicy
from looped.train.gates.sequences import Batch
from looped.train.gates.sights import Sights
from looped.train.gates.speed import Meter
from looped.train.gates.student import Student
from looped.train.gates.token_table import TokenTable
from looped.train.gates.walk import walk

_CACHE_BYTES = 1 << 30
_ADAMW_STEPS = 1000
_LBFGS_STEPS = 80
LBFGS_AT_ONCE = 10
"""L-BFGS steps between two looks at the loss."""
_HAZARD_SPAN = (0.1, 0.9)
# Times the criterion's own threshold.
_CHANGE_SPAN = (1 / 30, 10.0)


@dataclass(frozen=True)
class Deployment:
    """What the gates will run under: KV layout and prefill; the teacher, a model's own gate or its criterion; and the
    thresholds of the teacher between which contexts leave while training."""

    layout: KVLayout
    ragged_prefill: bool
    teacher: Gate
    low: float
    high: float

    @classmethod
    def of(
        cls, model: LoopedLM, layout: KVLayout, ragged_prefill: bool = False, span: tuple[float, float] | None = None
    ) -> Deployment:
        """With the model's own gate, or its convergence criterion where it has none."""
        teacher = native_gate(model)
        if span is None and isinstance(teacher, ConvergenceGate):
            own = teacher.default_threshold(model.config)
            span = (own * _CHANGE_SPAN[0], own * _CHANGE_SPAN[1])
        return cls(layout, ragged_prefill, teacher, *(span or _HAZARD_SPAN))

    def policy(self, batch: Batch, thresholds: Tensor, min_depth: Tensor) -> ExitPolicy:
        """The teacher's own exits at a threshold each sequence, folded at a `min_depth` each."""
        return ExitPolicy(
            self.layout, self.ragged_prefill, self.teacher, batch.spread(thresholds), batch.spread(min_depth)
        )

    def floor(self, min_depth: int) -> int:
        """The first depth at which gate and teacher are compared."""
        return max(min_depth, self.teacher.min_depth)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Thresholds of contexts [count]: even between the bounds, of a criterion even in their logarithms."""
        share = torch.rand(count, generator=generator)
        if not isinstance(self.teacher, ConvergenceGate):
            return self.low + (self.high - self.low) * share
        low, high = math.log(max(self.low, 1e-9)), math.log(max(self.high, 1e-9))
        return torch.exp(low + (high - low) * share)

    def trained_on(self, batch: Batch) -> Tensor:
        """Positions [B, T] whose exits a gate decides."""
        return batch.decode | batch.prompt if self.ragged_prefill else batch.decode


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train. `tokens` is what the teacher reads; without `steps` there is a default.

    The KL of linear heads is convex, so while its features are in memory L-BFGS on all of them at once finds the best
    heads within seconds, without a learning rate. `auto` takes AdamW where they are not, or where a loss has kinks.
    A teacher that is sure of itself is almost separable, and heads without a ridge then learn the training tokens by
    heart: `ridge` times the sum of squared weights (on standardised inputs) is what all positions together pay.
    AdamW's rate rises over `warmup` steps and falls by a cosine to `final_lr` times its peak. Documents are packed into
    rows of `width` places; None pads one a row.
    """

    tokens: int = 40_000
    steps: int | None = None
    batch_tokens: int = 4096
    width: int | None = None
    lr: float = 3e-3
    seed: int = 0
    optimizer: str = "auto"
    ridge: float = 5.0
    warmup: int = 0
    final_lr: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None


class Features(NamedTuple):
    """One training example a position: what students see by name [N, ...], and what they learn from [N, ...]."""

    blocks: dict[str, Tensor]
    targets: dict[str, Tensor]
    batch: int = 0
    """Number of the batch, from 0; of features in memory 0."""

    @property
    def num(self) -> int:
        """N."""
        return len(next(iter(self.targets.values())))

    def rows(self, chosen: Tensor) -> Features:
        """The examples of `chosen` [n]."""
        blocks, targets = ({name: x[chosen] for name, x in part.items()} for part in (self.blocks, self.targets))
        return Features(blocks, targets, self.batch)


class Teaching:
    """A frozen teacher, its students, and the policy and plan they are trained under.

    `baselines` are trained beside the students, to be held against them. `table` gathers what the teacher says of each
    token id, for another baseline.
    """

    def __init__(
        self,
        model: LoopedLM,
        students: list[Student],
        deployment: Deployment,
        plan: Plan,
        baselines: Sequence[Student] = (),
    ) -> None:
        self.model, self.students, self.deployment, self.plan = model, [*students, *baselines], deployment, plan
        self.needs = [*dict.fromkeys(name for student in self.students for name in student.needs)]
        self.targets = [*dict.fromkeys(student.target for student in self.students)]
        self.floors = [deployment.floor(student.min_depth) for student in students]
        self.table = TokenTable()
        self.meter = Meter(model.config, model.device)

    @torch.no_grad()
    def features(self, batch: Batch, index: int) -> Features:
        """Features of a batch; its thresholds are drawn from (seed, index), and the floors of the exits alternate
        between those of the students, so that each meets the contexts it will cause."""
        device = self.model.device
        batch = batch.to(device)
        count = batch.num_sequences
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + index)
        thresholds = self.deployment.draw(count, generator)
        turn = torch.randperm(count, generator=generator) % len(self.floors)
        floors = torch.tensor(self.floors)[turn]
        seen = walk(self.model, batch, self.deployment.policy(batch, thresholds.to(device), floors.to(device)))
        sights = Sights(self.model, batch, seen, self.deployment.trained_on(batch))
        blocks = {name: sights.block(name) for name in self.needs}
        targets = {name: sights.target(name, self.deployment.teacher) for name in self.targets}
        own = curve_of(self.deployment.teacher, sights.seen)
        self.table.add(sights.tokens, own)
        self.meter.count(batch.num_tokens, batch.bounds.cuts, self.num_readings * len(sights.tokens))
        return Features(blocks, targets, index)

    @property
    def num_readings(self) -> int:
        """Times the head reads a token: once for what the token before left, and after each loop for losses."""
        carried = any(name in ("state", "entropy", "surprisal", "depth") for name in self.needs)
        return int(carried) + self.model.config.max_loops * ("losses" in self.targets)

    def feed(self, documents: Documents, place: Place | None = None) -> Feed:
        """Batches with their index, from a noted place on; made ahead where a GPU does the rest."""
        shape = Shape(self.plan.batch_tokens, self.plan.width)
        return Feed(documents, shape, self.plan.seed, place, ahead=self.model.device.type == "cuda")

    @property
    def cached(self) -> bool:
        """All features fit in memory."""
        width = self.model.config.hidden_size
        vectors = sum(name in ("embedding", "state") or name[0] == "z" for name in self.needs)
        return 4 * vectors * width * self.plan.tokens <= _CACHE_BYTES

    @property
    def lbfgs(self) -> bool:
        """Heads are fitted to all features at once. Raises LoopedError where that was asked for and cannot be."""
        if self.plan.optimizer == "lbfgs" and not self.cached:
            raise LoopedError(
                f"the features of {self.plan.tokens} tokens do not fit memory, which lbfgs needs; use adamw"
            )
        smooth = all(student.spec.loss != "paper" for student in self.students)
        return self.plan.optimizer == "lbfgs" or (self.plan.optimizer == "auto" and self.cached and smooth)

    @property
    def steps(self) -> int:
        """Optimiser steps of the run; of L-BFGS, which fits heads before any hidden layer, runs of `LBFGS_AT_ONCE`."""
        if self.lbfgs:
            return math.ceil((self.plan.steps or _LBFGS_STEPS) / LBFGS_AT_ONCE)
        if self.plan.steps is not None:
            return self.plan.steps
        if self.cached:
            return _ADAMW_STEPS
        return max(1, round(self.plan.tokens / self.plan.batch_tokens))


def collect(teaching: Teaching, documents: Documents) -> Features:
    """Features of the plan's number of tokens, made once."""
    parts: list[Features] = []
    wanted, done = teaching.plan.tokens, 0
    with progress(wanted, "teacher (tokens)") as bar:
        for batch, index in teaching.feed(documents):
            if done >= wanted:
                break
            parts.append(teaching.features(batch, index))
            read = min(batch.num_tokens, wanted - done)
            done += read
            bar.advance(read)
    blocks = {name: torch.cat([part.blocks[name] for part in parts]) for name in teaching.needs}
    return Features(blocks, {name: torch.cat([part.targets[name] for part in parts]) for name in teaching.targets})
