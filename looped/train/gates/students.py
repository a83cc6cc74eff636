"""The students that specs ask for; those that decide before the loop, and those with nothing to learn."""

# N positions, D width, R loop steps

from __future__ import annotations

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates import ConvergenceGate, DelayGate, Gate, HybridGate, PreLoopGate
from looped.gates.hazard import hazard_logits
from looped.model import LoopedLM
from looped.train.gates.heads import Heads
from looped.train.gates.spec import CRITERIA, Spec
from looped.train.gates.step_students import ForeseenStudent, LookaheadStudent, SameStepStudent, Stage2Student
from looped.train.gates.student import Blocks, Student, made, needs_loops


class PreLoopStudent(Student):
    """All hazards, or the first `num_heads`, from the token's input and the carry of the token before it."""

    def __init__(self, spec: Spec, model: LoopedLM, num_heads: int | None = None) -> None:
        super().__init__(spec, model)
        needs_loops(model, spec.kind, 2)
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
        gate: PreLoopGate = made(PreLoopGate, self.heads.finished(), model, self.spec.inputs)
        return gate


class HybridStudent(Student):
    """lambda_1 as the pre-loop gate sees a token, lambda_{r+1} from z_r: nothing is folded into the second."""

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        super().__init__(spec, model)
        needs_loops(model, spec.kind, 3)
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


class CriterionStudent(Student):
    """A criterion that has nothing to learn: only its threshold is to be found."""

    target = "changes"

    def __init__(self, spec: Spec, model: LoopedLM) -> None:
        super().__init__(spec, model)
        self.min_depth = self.gate(model).min_depth
        needs_loops(model, spec.kind, self.min_depth + 1)

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
