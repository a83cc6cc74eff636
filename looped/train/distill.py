"""What exit gates are distilled from: a frozen teacher that turns documents into features under a policy of deployment.

One forward of the teacher serves every student. While all features fit in memory they are made once; else the teacher
runs for each optimiser step and nothing is kept.
"""

# B sequences, T tokens, N positions, R loop steps

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates import OuroGate
from looped.kv import KVLayout
from looped.model import LoopedLM
from looped.progress import progress
from looped.train.distill_data import Document, batches
from looped.train.students import Student, teacher_hazards
from looped.train.walk import ExitPolicy, Sequences, walk

_CACHE_BYTES = 1 << 30
_ADAMW_STEPS = 1000
_LBFGS_STEPS = 80
LBFGS_AT_ONCE = 10
"""L-BFGS steps between two looks at the loss."""


@dataclass(frozen=True)
class Deployment:
    """What the gates will run under: KV layout and prefill; thresholds of the teacher between which contexts leave."""

    layout: KVLayout
    ragged_prefill: bool
    low: float = 0.1
    high: float = 0.9

    def policy(self, model: LoopedLM, thresholds: Tensor, min_depth: Tensor) -> ExitPolicy:
        """The teacher's own exits at thresholds [B], folded at `min_depth` [B]."""
        return ExitPolicy(self.layout, self.ragged_prefill, OuroGate().bind(model), thresholds, min_depth)

    def trained_on(self, batch: Sequences) -> Tensor:
        """Positions [B, T] whose exits a gate decides."""
        return batch.decode | batch.prompt if self.ragged_prefill else batch.decode


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train. `tokens` is what the teacher reads; without `steps` there is a default.

    The KL of linear heads is convex, so while its features are in memory L-BFGS on all of them at once finds the best
    heads within seconds, without a learning rate. `auto` takes AdamW where they are not, or where the loss has kinks.
    A teacher that is sure of itself is almost separable, and heads without a ridge then learn the training tokens by
    heart: `ridge` times the sum of squared weights (on standardised inputs) is what all positions together pay.
    """

    tokens: int = 40_000
    steps: int | None = None
    batch_tokens: int = 4096
    lr: float = 3e-3
    loss: str = "kl"
    seed: int = 0
    optimizer: str = "auto"
    ridge: float = 5.0


class Features(NamedTuple):
    """One training example a position: what each student sees [N, ...], and the teacher's hazards [N, R-1]."""

    inputs: tuple[Tensor, ...]
    hazards: Tensor


class Teaching:
    """A frozen teacher that turns documents into features for its students."""

    def __init__(self, model: LoopedLM, students: list[Student], deployment: Deployment, plan: Plan) -> None:
        self.model, self.students, self.deployment, self.plan = model, students, deployment, plan

    def features(self, batch: Sequences, index: int) -> Features:
        """Features of a batch; its thresholds are drawn from (seed, index), and the floors of the exits alternate
        between those of the students, so that each meets the contexts it will cause."""
        batch = Sequences(*(part.to(self.model.device) for part in batch))
        rows = len(batch.tokens)
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + index)
        span = self.deployment.high - self.deployment.low
        thresholds = self.deployment.low + span * torch.rand(rows, generator=generator)
        turn = torch.randperm(rows, generator=generator) % len(self.students)
        floors = torch.tensor([student.min_depth for student in self.students])[turn]
        device = self.model.device
        seen = walk(self.model, batch, self.deployment.policy(self.model, thresholds.to(device), floors.to(device)))
        where = self.deployment.trained_on(batch)
        inputs = tuple(student.inputs(self.model, batch, seen, where) for student in self.students)
        return Features(inputs, teacher_hazards(self.model, seen, where).float())

    def stream(self, documents: Iterator[Document]) -> Iterator[tuple[Sequences, int]]:
        """Batches with their index."""
        for index, batch in enumerate(batches(documents, self.plan.batch_tokens, self.plan.seed)):
            yield batch, index

    @property
    def cached(self) -> bool:
        """All features fit in memory."""
        numbers = sum(student.num_inputs for student in self.students)
        return 4 * numbers * self.plan.tokens <= _CACHE_BYTES

    @property
    def lbfgs(self) -> bool:
        """Heads are fitted to all features at once. Raises LoopedError where that was asked for and cannot be."""
        if self.plan.optimizer == "lbfgs" and not self.cached:
            raise LoopedError(
                f"the features of {self.plan.tokens} tokens do not fit memory, which lbfgs needs; use adamw"
            )
        return self.plan.optimizer == "lbfgs" or (
            self.plan.optimizer == "auto" and self.cached and self.plan.loss == "kl"
        )

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


def collect(teaching: Teaching, documents: Iterator[Document]) -> Features:
    """Features of the plan's number of tokens, made once."""
    parts: list[Features] = []
    wanted, done = teaching.plan.tokens, 0
    with progress(wanted, "teacher (tokens)") as bar:
        for batch, index in teaching.stream(documents):
            if done >= wanted:
                break
            parts.append(teaching.features(batch, index))
            read = min(int(batch.lengths.sum()), wanted - done)
            done += read
            bar.advance(read)
    inputs = tuple(torch.cat([part.inputs[i] for part in parts]) for i in range(len(teaching.students)))
    return Features(inputs, torch.cat([part.hazards for part in parts]))
