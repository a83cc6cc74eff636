"""A gate in training: what it sees, what it learns, and the finished gate."""

# N positions, R loop steps

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looped.errors import LoopedError
from looped.gates import Gate
from looped.gates.losses import distillation_loss, improvement_weights
from looped.gates.trained import TrainedGate
from looped.model import LoopedLM
from looped.train.gates.heads import Finished, Heads
from looped.train.gates.spec import Spec

Blocks = Mapping[str, Tensor]


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


def made(kind: type[TrainedGate], heads: Finished, model: LoopedLM, inputs: tuple[str, ...] | None = None) -> Any:
    """The gate of a kind with finished heads, bound to its teacher."""
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


def needs_loops(model: LoopedLM, kind: str, least: int) -> None:
    """Raise LoopedError for a model with fewer loops than a kind of gate needs."""
    if model.config.max_loops < least:
        raise LoopedError(f"{model.name} runs {model.config.max_loops} loops; a {kind} gate needs {least}")


def start_as(model: LoopedLM, heads: Heads) -> None:
    """Begin as the model's own gate, where it has one, on the first D inputs."""
    if model.exit_gate is None:
        return
    with torch.no_grad():
        heads.weight[:, : model.config.hidden_size].copy_(model.exit_gate.weight)
        heads.bias.copy_(model.exit_gate.bias)
