"""Students whose heads look at what loop steps leave."""

# N positions, D width, R loop steps

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.gates import ForeseenConvergenceGate, LookaheadGate
from looped.gates.foreseen import log_change
from looped.gates.hazard import SameStepGate, Stage2Gate
from looped.gates.losses import improvement_weights, paper_loss
from looped.model import LoopedLM
from looped.train.gates.heads import Heads
from looped.train.gates.spec import Spec
from looped.train.gates.student import Blocks, Student, made, needs_loops, start_as

_NEVER = -50.0
"""Logit of a hazard that is none."""


class StepStudent(Student):
    """Heads on the readouts z_r of the steps in `seen_at`, that begin as the model's own gate."""

    def __init__(
        self, spec: Spec, model: LoopedLM, seen_at: range, num_features: int, heads: int | None = None
    ) -> None:
        super().__init__(spec, model)
        self.seen_at = seen_at
        shared, single = spec.sharing == "shared", spec.sharing == "single"
        num_heads = len(seen_at) if heads is None else heads
        self.heads = Heads(num_heads, num_features, spec.hidden, steps=True, shared=shared, single=single)
        if spec.change:
            self.needs = tuple(f"z{r}" for r in range(seen_at.start - 1, seen_at.stop))
        else:
            self.needs = tuple(f"z{r}" for r in seen_at)

    @property
    def parts(self) -> tuple[Heads, ...]:
        return (self.heads,)

    def inputs(self, blocks: Blocks) -> list[Tensor]:
        """What each head sees: [N, F] each."""
        states = [blocks[f"z{r}"] for r in self.seen_at]
        if not self.spec.change:
            return states
        return [torch.cat((z, z - blocks[f"z{r - 1}"]), -1) for r, z in zip(self.seen_at, states, strict=True)]

    def forward(self, blocks: Blocks) -> Tensor:
        logits: Tensor = self.heads(self.inputs(blocks))
        return logits

    def prepare(self, blocks: Blocks, target: Tensor) -> None:
        if self.standardise:
            self.heads.standardise(self.inputs(blocks))


class LookaheadStudent(StepStudent):
    """lambda_{r+1} from z_r, r = 1..R-2."""

    first, min_depth = 2, LookaheadGate.min_depth

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        needs_loops(model, spec.kind, 3)
        width = model.config.hidden_size * (2 if spec.change else 1)
        super().__init__(spec, model, range(1, model.config.max_loops - 1), width)
        if spec.target == "teacher":
            start_as(model, self.heads)

    def gate(self, model: LoopedLM) -> LookaheadGate:
        inputs = ("state", "change") if self.spec.change else ("state",)
        gate: LookaheadGate = made(LookaheadGate, self.heads.finished(), model, inputs)
        return gate


class SameStepStudent(StepStudent):
    """lambda_r from z_r, as the teacher computes it, from scratch."""

    min_depth = SameStepGate.min_depth

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        needs_loops(model, spec.kind, 3)
        super().__init__(spec, model, range(1, model.config.max_loops), model.config.hidden_size)

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        if self.spec.loss == "paper":
            return paper_loss(self(blocks), target, self.first, self.min_depth)
        return super().objective(blocks, target)

    def gate(self, model: LoopedLM) -> SameStepGate:
        gate: SameStepGate = made(SameStepGate, self.heads.finished(), model)
        return gate


class Stage2Student(StepStudent):
    """Whether to go on from how much loops lower the loss (Ouro, stage II).

    `retrospective`, as published: z_t learns whether loop t helped, t = 2..R; lambda_1 has no label and stays what the
    model's own gate says, or zero where it has none. `prospective`: z_t learns whether loop t + 1 will help.
    """

    target = "losses"
    first_weight: Tensor
    first_bias: Tensor

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        needs_loops(model, spec.kind, 3)
        loops = model.config.max_loops
        super().__init__(spec, model, range(1, loops), model.config.hidden_size)
        self.retrospective = spec.target == "retrospective"
        self.min_depth = 2 if self.retrospective else 1
        if self.retrospective and spec.sharing == "single":
            self.needs = (*self.needs, f"z{loops}")  # what is learnt of the last loop serves the others
        start_as(model, self.heads)
        self.has_first = model.exit_gate is not None
        self.register_buffer("first_weight", self.heads.weight[0].detach().clone())
        self.register_buffer("first_bias", self.heads.bias[0].detach().clone())

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        stop, loops = 1 - improvement_weights(target), self.config.max_loops
        logits = self(blocks)
        if self.retrospective:
            logits, stop = logits[:, 1:], stop[:, : loops - 2]
            if f"z{loops}" in self.needs:
                last = self.heads([blocks[f"z{loops}"]])
                logits, stop = torch.cat((logits, last), -1), 1 - improvement_weights(target)
        return F.binary_cross_entropy_with_logits(logits, stop, reduction="none").sum(-1).mean() / loops

    def gate(self, model: LoopedLM) -> Stage2Gate:
        heads = self.heads.finished()
        if self.retrospective and (not self.has_first or self.heads.sets > 1):
            bias = heads.bias.detach().clone()
            bias[0] = self.first_bias if self.has_first else _NEVER
            weight = heads.weight.detach().clone()
            if self.heads.sets > 1:
                weight[0] = self.first_weight if self.has_first else 0.0
            heads = heads._replace(weight=weight, bias=bias)
        gate: Stage2Gate = made(Stage2Gate, heads, model)
        gate.min_depth = self.min_depth
        return gate


class ForeseenStudent(StepStudent):
    """The log of the relative change of step r + 1 from z_r and that of r, r = 1..R-2: a regression, no hazards."""

    min_depth, target = ForeseenConvergenceGate.min_depth, "changes"

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        needs_loops(model, spec.kind, 3)
        super().__init__(spec, model, range(1, model.config.max_loops - 1), model.config.hidden_size + 1)
        self.needs = tuple(f"z{r}" for r in range(model.config.max_loops - 1))

    def inputs(self, blocks: Blocks) -> list[Tensor]:
        states = [(blocks[f"z{r}"], blocks[f"z{r - 1}"]) for r in self.seen_at]
        return [torch.cat((z, log_change(z, before)[:, None]), -1) for z, before in states]

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        """Mean squared error of the logs; the heads say how they differ from step to step."""
        return F.mse_loss(self(blocks), target[:, 1:-1] - target[:, :-2])

    def gate(self, model: LoopedLM) -> ForeseenConvergenceGate:
        gate: ForeseenConvergenceGate = made(ForeseenConvergenceGate, self.heads.finished(), model)
        return gate
