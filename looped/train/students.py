"""Gates in training: what each kind sees, its heads, and the finished gate."""

# B sequences, T tokens, N positions, D width, R loop steps, F features, V vocabulary

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.errors import LoopedError, unknown
from looped.gates import Carry, HybridGate, LookaheadGate, OuroGate, PreLoopGate
from looped.gates.hazard import Hidden, TrainedGate, pre_loop_features
from looped.gates.losses import fold
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.walk import Sequences, Walk

_LOGITS_AT_ONCE = 1 << 26
_SMALLEST_SPREAD = 1e-6
_DROPOUT = 0.1


class Reading(NamedTuple):
    """What the head makes of states: entropy and surprisal of the next token, [N] nats, at least float32."""

    entropy: Tensor
    surprisal: Tensor


@torch.no_grad()
def read(model: LoopedLM, h: Tensor, following: Tensor) -> Reading:
    """Entropy and surprisal of the tokens `following` [N] after states h [N, D] of a fully looped model."""
    size = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
    entropy, surprisal = [], []
    for states, tokens in zip(torch.split(h, size), torch.split(following, size), strict=True):
        logits = model.coda(states, torch.zeros_like(tokens), dense_causal)
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        surprisal.append(-log_p.gather(-1, tokens[:, None])[:, 0])
    return Reading(torch.cat(entropy), torch.cat(surprisal))


class Student(nn.Module, ABC):
    """A gate in training: sees numbers of a position, predicts its hazards from depth `min_depth` on."""

    kind: ClassVar[str]
    min_depth: ClassVar[int]

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Numbers the gate sees of one position."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Heads, ...]:
        """The sets of heads it is made of."""

    @abstractmethod
    def inputs(self, model: LoopedLM, batch: Sequences, seen: Walk, where: Tensor) -> Tensor:
        """What the gate sees at the positions `where` [B, T]: [N, ...] float32."""

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, R - min_depth] of predicted hazards."""

    @abstractmethod
    def prepare(self, inputs: Tensor, hazards: Tensor) -> None:
        """Set what depends on data from a first batch: inputs [N, ...] and teacher hazards [N, R-1]."""

    @abstractmethod
    def gate(self, model: LoopedLM) -> TrainedGate | HybridGate:
        """The finished gate, bound to its teacher."""


class Heads(Student):
    """Linear heads in float32, one a hazard: weight [R - min_depth, F] and bias of lambda from `min_depth` to R-1.

    Weights act on standardised inputs, with mean and scale taken from a first batch, so that one step size and one
    ridge suit every input; the finished gate has them folded in. `hidden` units in a layer beside the heads start
    without effect; while `linear` is set they are left out.
    """

    gate_class: ClassVar[type[TrainedGate]]
    mean: Tensor
    scale: Tensor

    def __init__(self, model: LoopedLM, num_heads: int, num_features: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise LoopedError(
                f"{model.name} runs {model.config.max_loops} loops; a {self.kind} gate needs {self.min_depth + 1}"
            )
        self.weight = nn.Parameter(torch.zeros(num_heads, num_features, device=model.device))
        self.bias = nn.Parameter(torch.zeros(num_heads, device=model.device))
        self.register_buffer("mean", torch.zeros_like(self.weight.detach()))
        self.register_buffer("scale", torch.ones_like(self.weight.detach()))
        self.linear = hidden == 0
        self.hidden = nn.ParameterList()
        if hidden:
            generator = torch.Generator().manual_seed(0)
            start = torch.randn(num_layers, hidden, num_features, generator=generator) / num_features**0.5
            parts = (start, torch.zeros(num_layers, hidden), torch.zeros(num_heads, hidden))
            self.hidden.extend(nn.Parameter(part.to(model.device)) for part in parts)

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def parts(self) -> tuple[Heads, ...]:
        return (self,)

    def prepare(self, inputs: Tensor, hazards: Tensor) -> None:
        weight, bias = self.heads()
        self.mean.copy_(inputs.mean(0))
        spread = inputs.std(0)
        self.scale.copy_(torch.where(spread > _SMALLEST_SPREAD, spread, torch.ones_like(spread)))
        with torch.no_grad():
            self.weight.copy_(weight * self.scale)
            self.bias.copy_(bias + (weight * self.mean).sum(-1))

    def heads(self) -> tuple[Tensor, Tensor]:
        """Weight and bias as they act on inputs as they are."""
        weight = self.weight / self.scale
        return weight, self.bias - (weight * self.mean).sum(-1)

    def layer(self) -> Hidden:
        """The hidden layer as it acts on inputs as they are."""
        weight, bias, out = self.hidden
        raw = weight / self.scale[: len(weight), None]
        return Hidden(raw, bias - (raw * self.mean[: len(weight), None]).sum(-1), out)

    def activate(self, x: Tensor) -> Tensor:
        """The hidden units' non-linearity, with dropout while training."""
        return F.dropout(F.gelu(x), _DROPOUT, self.training)

    def gate(self, model: LoopedLM) -> TrainedGate:
        config = model.config
        weight, bias = self.heads()
        trained = self.gate_class(
            weight.detach(),
            bias.detach(),
            Hidden(*(x.detach() for x in self.layer())) if self.hidden else None,
            hidden_size=config.hidden_size,
            max_loops=config.max_loops,
            teacher=model.name,
            revision=model.revision,
        )
        return trained.bind(model)


class LookaheadStudent(Heads):
    """One head a step on z_r, r = 1..R-2, that starts as the teacher's own head and learns lambda_{r+1}."""

    kind, min_depth, gate_class = "lookahead", LookaheadGate.min_depth, LookaheadGate

    def __init__(self, model: LoopedLM, hidden: int = 0) -> None:
        config = model.config
        super().__init__(model, config.max_loops - 2, config.hidden_size, hidden, num_layers=config.max_loops - 2)
        assert model.exit_gate is not None
        with torch.no_grad():
            self.weight.copy_(model.exit_gate.weight)
            self.bias.copy_(model.exit_gate.bias)

    @property
    def num_inputs(self) -> int:
        return self.weight.numel()

    def inputs(self, model: LoopedLM, batch: Sequences, seen: Walk, where: Tensor) -> Tensor:
        steps = seen.states[: model.config.max_loops - 2]
        return torch.stack([model.readout(h[where]) for h in steps], 1).float()

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.heads()
        logits = torch.stack([inputs[:, r] @ head for r, head in enumerate(weight)], -1) + bias
        if self.linear:
            return logits
        layer = self.layer()
        active = [inputs[:, r] @ w.T + b for r, (w, b) in enumerate(zip(layer.weight_KMF, layer.bias_KM, strict=True))]
        return logits + (self.activate(torch.stack(active, 1)) * layer.out_NM).sum(-1)


class PreLoopStudent(Heads):
    """All hazards, or the first `num_heads`, from the token's input and the carry of the token before it."""

    kind, min_depth, gate_class = "pre-loop", 1, PreLoopGate

    def __init__(self, model: LoopedLM, hidden: int = 0, num_heads: int | None = None) -> None:
        config = model.config
        num_heads = config.max_loops - 1 if num_heads is None else num_heads
        super().__init__(model, num_heads, 2 * config.hidden_size + 3, hidden, num_layers=1)

    def inputs(self, model: LoopedLM, batch: Sequences, seen: Walk, where: Tensor) -> Tensor:
        before = where.roll(-1, 1)
        before[:, -1] = False
        if int(before.sum()) != int(where.sum()):
            raise ValueError("the first token of a sequence has no token before it")
        depth = seen.depths[before]
        h = seen.at(seen.depths)[before]
        reading = read(model, h, batch.tokens[where])
        carry = Carry(model.readout(h), reading.entropy, reading.surprisal, depth.to(reading.entropy.dtype))
        return pre_loop_features(seen.start[where], carry).float()

    def prepare(self, inputs: Tensor, hazards: Tensor) -> None:
        super().prepare(inputs, hazards)
        with torch.no_grad():
            self.bias.copy_(torch.logit(hazards.float().mean(0), eps=1e-4))

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.heads()
        logits = inputs @ weight.T + bias
        if self.linear:
            return logits
        layer = self.layer()
        return logits + self.activate(inputs @ layer.weight_KMF[0].T + layer.bias_KM[0]) @ layer.out_NM.T


class HybridStudent(Student):
    """lambda_1 as the pre-loop gate sees a token, lambda_{r+1} from z_r: nothing is folded into the second.

    Its inputs are those of the two parts side by side, [N, 2 D + 3 + (R - 2) D].
    """

    kind, min_depth = "hybrid", HybridGate.min_depth

    def __init__(self, model: LoopedLM, hidden: int = 0) -> None:
        super().__init__()
        if model.config.max_loops < 3:
            raise LoopedError(f"{model.name} runs {model.config.max_loops} loops; a {self.kind} gate needs 3")
        self.pre_loop = PreLoopStudent(model, hidden, num_heads=1)
        self.lookahead = LookaheadStudent(model, hidden)

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.parts)

    @property
    def parts(self) -> tuple[Heads, ...]:
        return self.pre_loop, self.lookahead

    def inputs(self, model: LoopedLM, batch: Sequences, seen: Walk, where: Tensor) -> Tensor:
        return torch.cat([part.inputs(model, batch, seen, where).flatten(1) for part in self.parts], 1)

    def forward(self, inputs: Tensor) -> Tensor:
        before, states = self._split(inputs)
        return torch.cat((self.pre_loop(before), self.lookahead(states)), -1)

    def prepare(self, inputs: Tensor, hazards: Tensor) -> None:
        before, states = self._split(inputs)
        self.pre_loop.prepare(before, hazards[:, :1])
        self.lookahead.prepare(states, hazards)

    def gate(self, model: LoopedLM) -> HybridGate:
        pre_loop, lookahead = self.pre_loop.gate(model), self.lookahead.gate(model)
        assert isinstance(pre_loop, PreLoopGate) and isinstance(lookahead, LookaheadGate)
        return HybridGate(pre_loop, lookahead)

    def _split(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the two parts: [N, 2 D + 3] and [N, R - 2, D]."""
        size = self.pre_loop.num_inputs
        return inputs[:, :size], inputs[:, size:].reshape(len(inputs), *self.lookahead.weight.shape)


STUDENTS: dict[str, Callable[[LoopedLM, int], Student]] = {
    student.kind: student for student in (LookaheadStudent, PreLoopStudent, HybridStudent)
}
_ALL = (LookaheadStudent.kind, PreLoopStudent.kind)


def student_kinds(names: tuple[str, ...]) -> list[str]:
    """The kinds of gates that names ask for, `all` for those of a single part.

    Raises LoopedError for other names and for none.
    """
    kinds = list(dict.fromkeys(kind for name in names for kind in (_ALL if name == "all" else (name,))))
    for name in kinds:
        if name not in STUDENTS:
            raise unknown("gate to train", name, [*STUDENTS, "all"])
    if not kinds:
        raise LoopedError(f"no gate to train was given; known: {', '.join(STUDENTS)}, all")
    return kinds


def new_students(names: tuple[str, ...], model: LoopedLM, hidden: int = 0) -> list[Student]:
    """The students of names, with `hidden` units beside their heads.

    Raises LoopedError for unknown gates and for a model with too few loops.
    """
    return [STUDENTS[kind](model, hidden) for kind in student_kinds(names)]


def teacher_hazards(model: LoopedLM, seen: Walk, where: Tensor) -> Tensor:
    """lambda_1..lambda_{R-1} of the teacher at positions `where` [B, T]: [N, R-1], at least float32."""
    teacher = OuroGate().bind(model)
    return torch.stack([teacher.hazard(model.readout(h[where])) for h in seen.states[:-1]], -1)


def folded_hazards(student: Student, hazards: Tensor) -> Tensor:
    """The teacher's hazards [N, R-1] as the student's depths see them: [N, R - min_depth]."""
    return fold(hazards, student.min_depth)
