"""Gates in training: what each kind sees, its heads, what it learns, and the finished gate."""

# N positions, D width, R loop steps

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.errors import LoopedError
from looped.gates import (
    ConvergenceGate,
    DelayGate,
    ForeseenConvergenceGate,
    Gate,
    HybridGate,
    LookaheadGate,
    PreLoopGate,
)
from looped.gates.foreseen import log_change
from looped.gates.hazard import SameStepGate, Stage2Gate, hazard_logits
from looped.gates.losses import distillation_loss, improvement_weights, paper_loss
from looped.gates.trained import TrainedGate
from looped.model import LoopedLM
from looped.train.heads import Finished, Heads
from looped.train.student_spec import CRITERIA, Spec

Blocks = Mapping[str, Tensor]
_NEVER = -50.0
"""Logit of a hazard that is none."""


class Student(nn.Module, ABC):
    """A gate in training. It sees `needs`, blocks of numbers [N, ...] by name (`sights.Sights.block`), and predicts
    hazards from depth `first` on; its exits are held against the teacher's from `min_depth` on."""

    first = 1
    min_depth = 1
    needs: tuple[str, ...] = ()
    target = "hazards"
    """What it learns from: a name of `sights.Sights.target`."""

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        super().__init__()
        self.spec, self.config = spec, model.config
        self.standardise, self.threshold = True, 0.5
        if spec.target != "teacher":
            self.target = "losses"

    @property
    @abstractmethod
    def parts(self) -> tuple[Heads, ...]:
        """The sets of heads it is made of."""

    @abstractmethod
    def forward(self, blocks: Blocks) -> Tensor:
        """Logits [N, R - first] of predicted hazards."""

    @abstractmethod
    def gate(self, model: LoopedLM) -> Gate:
        """The finished gate, bound to its teacher."""

    def prepare(self, blocks: Blocks, target: Tensor) -> None:
        """Set what depends on data from a first batch: inputs and targets [N, ...]."""

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        """What its predictions cost, a mean over positions."""
        return distillation_loss(self.spec.loss, self(blocks), self.hazards(target), self.first, self.threshold)

    def hazards(self, target: Tensor) -> Tensor:
        """The hazards lambda_1..lambda_{R-1} to learn, [N, R - 1]: the teacher's, or labels from losses [N, R]."""
        if self.spec.target == "teacher":
            return target
        stop = 1 - improvement_weights(target)  # for t = 2..R
        if self.spec.target == "prospective":
            return stop
        return torch.cat((torch.zeros_like(stop[:, :1]), stop[:, :-1]), -1)


def _made(kind: type[TrainedGate], heads: Finished, model: LoopedLM, inputs: tuple[str, ...] | None = None) -> Any:
    hidden = heads.hidden
    gate = kind(
        heads.weight.detach(),
        heads.bias.detach().clone(),
        type(hidden)(*(x.detach() for x in hidden)) if hidden else None,
        hidden_size=model.config.hidden_size,
        max_loops=model.config.max_loops,
        teacher=model.name,
        revision=model.revision,
        inputs=inputs,
    )
    return gate.bind(model)


def _needs_loops(model: LoopedLM, kind: str, least: int) -> None:
    if model.config.max_loops < least:
        raise LoopedError(f"{model.name} runs {model.config.max_loops} loops; a {kind} gate needs {least}")


def _start_as(model: LoopedLM, heads: Heads) -> None:
    """Begin as the model's own gate, where it has one, on the first D inputs."""
    if model.exit_gate is None:
        return
    with torch.no_grad():
        heads.weight[:, : model.config.hidden_size].copy_(model.exit_gate.weight)
        heads.bias.copy_(model.exit_gate.bias)


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
        _needs_loops(model, spec.kind, 3)
        width = model.config.hidden_size * (2 if spec.change else 1)
        super().__init__(spec, model, range(1, model.config.max_loops - 1), width)
        if spec.target == "teacher":
            _start_as(model, self.heads)

    def gate(self, model: LoopedLM) -> LookaheadGate:
        inputs = ("state", "change") if self.spec.change else ("state",)
        gate: LookaheadGate = _made(LookaheadGate, self.heads.finished(), model, inputs)
        return gate


class SameStepStudent(StepStudent):
    """lambda_r from z_r, as the teacher computes it, from scratch."""

    min_depth = SameStepGate.min_depth

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        _needs_loops(model, spec.kind, 3)
        super().__init__(spec, model, range(1, model.config.max_loops), model.config.hidden_size)

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        if self.spec.loss == "paper":
            return paper_loss(self(blocks), target, self.first, self.min_depth)
        return super().objective(blocks, target)

    def gate(self, model: LoopedLM) -> SameStepGate:
        gate: SameStepGate = _made(SameStepGate, self.heads.finished(), model)
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
        _needs_loops(model, spec.kind, 3)
        loops = model.config.max_loops
        super().__init__(spec, model, range(1, loops), model.config.hidden_size)
        self.retrospective = spec.target == "retrospective"
        self.min_depth = 2 if self.retrospective else 1
        if self.retrospective and spec.sharing == "single":
            self.needs = (*self.needs, f"z{loops}")  # what is learnt of the last loop serves the others
        _start_as(model, self.heads)
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
        gate: Stage2Gate = _made(Stage2Gate, heads, model)
        gate.min_depth = self.min_depth
        return gate


class PreLoopStudent(Student):
    """All hazards, or the first `num_heads`, from the token's input and the carry of the token before it."""

    def __init__(self, spec: Spec, model: LoopedLM, num_heads: int | None = None) -> None:
        super().__init__(spec, model)
        _needs_loops(model, spec.kind, 2)
        self.needs, self.num_hazards = spec.inputs, num_heads or model.config.max_loops - 1
        features = PreLoopGate.num_features(spec.inputs, model.config.hidden_size)
        self.heads = Heads(self.num_hazards + spec.softmax, features, spec.hidden, steps=False)

    @property
    def parts(self) -> tuple[Heads, ...]:
        return (self.heads,)

    def inputs(self, blocks: Blocks) -> list[Tensor]:
        """What the heads see: one [N, F]."""
        return [torch.cat([x if x.ndim == 2 else x[:, None] for x in (blocks[name] for name in self.needs)], -1)]

    def forward(self, blocks: Blocks) -> Tensor:
        logits: Tensor = self.heads(self.inputs(blocks))
        return hazard_logits(logits) if self.spec.softmax else logits

    def prepare(self, blocks: Blocks, target: Tensor) -> None:
        if not self.standardise:
            return
        self.heads.standardise(self.inputs(blocks))
        mean = self.hazards(target).float().mean(0)[: self.num_hazards]
        if not self.spec.softmax:
            with torch.no_grad():
                self.heads.bias.copy_(torch.logit(mean, eps=1e-4))

    def gate(self, model: LoopedLM) -> PreLoopGate:
        gate: PreLoopGate = _made(PreLoopGate, self.heads.finished(), model, self.spec.inputs)
        return gate


class HybridStudent(Student):
    """lambda_1 as the pre-loop gate sees a token, lambda_{r+1} from z_r: nothing is folded into the second."""

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        super().__init__(spec, model)
        _needs_loops(model, spec.kind, 3)
        self.pre_loop = PreLoopStudent(spec, model, num_heads=1)
        self.lookahead = LookaheadStudent(spec, model)
        self.needs = (*self.pre_loop.needs, *self.lookahead.needs)

    @property
    def parts(self) -> tuple[Heads, ...]:
        return self.pre_loop.heads, self.lookahead.heads

    def forward(self, blocks: Blocks) -> Tensor:
        return torch.cat((self.pre_loop(blocks), self.lookahead(blocks)), -1)

    def prepare(self, blocks: Blocks, target: Tensor) -> None:
        for part in (self.pre_loop, self.lookahead):
            part.standardise = self.standardise
            part.prepare(blocks, target)

    def gate(self, model: LoopedLM) -> HybridGate:
        return HybridGate(self.pre_loop.gate(model), self.lookahead.gate(model))


class ForeseenStudent(StepStudent):
    """The log of the relative change of step r + 1 from z_r and that of r, r = 1..R-2: a regression, no hazards."""

    min_depth, target = ForeseenConvergenceGate.min_depth, "changes"

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        _needs_loops(model, spec.kind, 3)
        super().__init__(spec, model, range(1, model.config.max_loops - 1), model.config.hidden_size + 1)
        self.needs = tuple(f"z{r}" for r in range(model.config.max_loops - 1))

    def inputs(self, blocks: Blocks) -> list[Tensor]:
        states = [(blocks[f"z{r}"], blocks[f"z{r - 1}"]) for r in self.seen_at]
        return [torch.cat((z, log_change(z, before)[:, None]), -1) for z, before in states]

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        """Mean squared error of the logs; the heads say how they differ from step to step."""
        return F.mse_loss(self(blocks), target[:, 1:-1] - target[:, :-2])

    def gate(self, model: LoopedLM) -> ForeseenConvergenceGate:
        gate: ForeseenConvergenceGate = _made(ForeseenConvergenceGate, self.heads.finished(), model)
        return gate


class CriterionStudent(Student):
    """A criterion that has nothing to learn: only its threshold is to be found."""

    target = "changes"

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        super().__init__(spec, model)
        self.min_depth = self.gate(model).min_depth
        _needs_loops(model, spec.kind, self.min_depth + 1)

    @property
    def parts(self) -> tuple[Heads, ...]:
        return ()

    def forward(self, blocks: Blocks) -> Tensor:
        raise NotImplementedError

    def objective(self, blocks: Blocks, target: Tensor) -> Tensor:
        return torch.zeros((), device=target.device)

    def gate(self, model: LoopedLM) -> Gate:
        return DelayGate(ConvergenceGate()) if self.spec.kind == CRITERIA[1] else ConvergenceGate()


_STUDENTS: dict[str, type[Student]] = {
    "lookahead": LookaheadStudent,
    "pre-loop": PreLoopStudent,
    "hybrid": HybridStudent,
    "stage2": Stage2Student,
    "same-step": SameStepStudent,
    **dict.fromkeys(CRITERIA, CriterionStudent),
}


def new_students(specs: list[Spec], model: LoopedLM) -> list[Student]:
    """The students of specs. `lookahead` of a model without an exit gate foresees its convergence criterion.

    Raises LoopedError for a model with too few loops, and for one without a gate where a student needs that.
    """
    return [_student(spec, model).to(model.device) for spec in specs]


def _student(spec: Spec, model: LoopedLM) -> Student:
    if model.exit_gate is not None or spec.kind in CRITERIA or spec.target != "teacher":
        return _STUDENTS[spec.kind](spec, model)
    if spec.kind == "lookahead" and not spec.change and spec.loss == "kl":
        return ForeseenStudent(spec, model)
    raise LoopedError(
        f"{model.name} has no exit gate of its own, so {spec.text} has no teacher; plain lookahead foresees its "
        "convergence criterion, and stage2, or :prospective behind another gate, learns from losses"
    )
