"""Exit criteria that need no training: how much a state, or what it predicts, still changes from step to step.

The names and cut-offs are those of the `criterion` argument of Huginn's official code (`convergence` is its
`latent-diff`), where a criterion may hold after the first step. Criteria on states compare with the initial state then;
those on predictions with an entropy of 100, a uniform distribution, no token.
"""

# B rows, D width, V vocabulary

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.protocol import Entry, Gate, Params, State, none_ahead, wide

if TYPE_CHECKING:
    from looped.config import ModelConfig
    from looped.model import LoopedLM

# Huginn's own cut-off for its latent-difference criterion, for models whose config states none for it.
_CONVERGENCE_DEFAULT = 0.03
# What the official code compares the first step's entropy with: no distribution has as much.
_FIRST_ENTROPY = 100.0
# Tokens below this share of the likeliest one's probability count as noise for min-p KL.
_MIN_P = 0.1


class Criterion(Gate):
    """Exit once what is measured after a loop step falls below the threshold; at a threshold of 0 nothing exits."""

    threshold_range = (0.0, math.inf)
    rule: ClassVar[str] = "below"
    """How measure and threshold are compared: "below", or "count", where the measure has to reach it."""

    @abstractmethod
    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        """The state after a step that gave `seen` (see `Gate.step`), and what is compared with the threshold: [B]."""

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        state, value = self.measure(state, z)
        return state, self.holds(value, params.threshold) & (step >= params.min_depth)

    def holds(self, value: Tensor, threshold: Tensor) -> Tensor:
        """Whether a token may leave: measures [B] against thresholds [B], to bool [B]."""
        wanted = threshold.to(value.dtype)
        return value < wanted if self.rule == "below" else value >= wanted

    def as_block(self) -> Gate:
        return BlockGate(self)


class ConvergenceGate(Criterion):
    """||z_r - z_{r-1}|| / ||z_r||; at r = 1 the comparison is with the initial state."""

    kind = "convergence"
    min_depth = 2

    def default_threshold(self, config: ModelConfig) -> float:
        if self.threshold is not None:
            return self.threshold
        return _CONVERGENCE_DEFAULT if config.exit_gate else config.exit_threshold

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return (entry.z0,), none_ahead(entry.z0)

    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        now = wide(seen)
        change = (now - wide(state[0])).norm(dim=-1) / now.norm(dim=-1)
        return (seen,), change


class CosineGate(Criterion):
    """1 - cos(z_r, z_{r-1}); at r = 1 the comparison is with the initial state."""

    kind = "cosine"
    threshold = 1e-3

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return (entry.z0,), none_ahead(entry.z0)

    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        return (seen,), 1 - F.cosine_similarity(wide(seen), wide(state[0]), dim=-1)


class EntropyDiffGate(Criterion):
    """|H_r - H_{r-1}|, H_r the entropy in nats of the next token as predicted after step r."""

    kind = "entropy-diff"
    needs_logits = True
    threshold = 1e-3

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return (torch.full_like(wide(entry.z0[:, 0]), _FIRST_ENTROPY),), none_ahead(entry.z0)

    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        log_p = wide(seen).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return (entropy,), (entropy - state[0]).abs()


class KLGate(Criterion):
    """KL(p_{r-1} || p_r), p_r the distribution of the next token as predicted after step r."""

    kind = "kl"
    needs_logits = True
    threshold = 1e-3
    vocab_size = 1

    def bind(self, model: LoopedLM) -> KLGate:
        bound = copy.copy(self)
        bound.vocab_size = model.config.vocab_size
        return bound

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        uniform = torch.full_like(wide(entry.z0[:, :1]), -math.log(self.vocab_size))
        return (uniform.repeat(1, self.vocab_size),), none_ahead(entry.z0)

    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        before, now = state[0], self.log_probs(wide(seen))
        return (now,), (before.exp() * (before - now)).sum(-1)

    def log_probs(self, logits: Tensor) -> Tensor:
        """log p of logits [B, V]: [B, V]."""
        return logits.log_softmax(-1)


class MinPKLGate(KLGate):
    """KL of distributions in which every token less than a tenth as likely as the likeliest one counts 1 / V."""

    kind = "minp-kl"
    threshold = 1e-5

    def log_probs(self, logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        p = torch.where(p < _MIN_P * p.amax(-1, keepdim=True), 1 / self.vocab_size, p)
        return (p / p.sum(-1, keepdim=True)).log()


class ArgmaxStabilityGate(Criterion):
    """How many steps in a row have predicted the same token as the step before them; a whole number is wanted."""

    kind = "argmax-stability"
    needs_logits = True
    threshold = 5.0
    threshold_range = (1.0, math.inf)
    rule = "count"

    def check_threshold(self, threshold: float) -> float:
        if not float(super().check_threshold(threshold)).is_integer():
            raise LoopedError(f"the {self.name} gate counts loop steps, so its threshold is whole; got {threshold}")
        return threshold

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        zero = torch.zeros_like(params.min_depth)
        return (zero - 1, zero), none_ahead(entry.z0)

    def measure(self, state: State, seen: Tensor) -> tuple[State, Tensor]:
        before, count = state
        now = seen.argmax(-1)
        count = torch.where(now == before, count + 1, 0)
        return (now, count), count

    def holds(self, value: Tensor, threshold: Tensor) -> Tensor:
        return value.double() >= threshold


class BlockGate(Gate):
    """A criterion by which all rows of a call leave together: Huginn's official code runs a whole prompt so.

    Measures of states are averaged over the rows; those of predictions are taken of the last row, whose next token is
    the wanted one. Rows depend on each other here, so only the reference decoder, whose rows are one prompt, uses it.
    """

    def __init__(self, inner: Criterion) -> None:
        self.inner, self.kind = inner, inner.kind  # type: ignore[misc]
        self.min_depth, self.needs_logits = inner.min_depth, inner.needs_logits
        self.threshold, self.threshold_range = inner.threshold, inner.threshold_range

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        return self.inner.start(entry, params)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        state, value = self.inner.measure(state, z)
        value = (value[-1] if self.needs_logits else value.mean()).expand_as(value)
        return state, self.inner.holds(value, params.threshold) & (step >= params.min_depth)


CRITERIA: tuple[type[Criterion], ...] = (
    ConvergenceGate,
    CosineGate,
    EntropyDiffGate,
    KLGate,
    MinPKLGate,
    ArgmaxStabilityGate,
)
