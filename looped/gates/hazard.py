"""Gates that predict hazards: Ouro's own, the lookahead gate and the pre-loop gate.

Exit at the first r >= min_depth with C(r) = 1 - prod_{j<=r} (1 - lambda_j) >= q, so hazard mass below min_depth is
folded onto it (ragged KV, eqs. 2-4). A threshold of 1 never exits early.
"""

# B rows, D width, R loop steps, N heads, F features, M hidden units

from __future__ import annotations

import copy
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.protocol import Carry, Entry, Gate, Params, State, none_ahead, wide
from looped.model import LoopedLM


def crosses(survival: Tensor, step: Tensor | int, params: Params) -> Tensor:
    """C(step) >= q where the step is allowed to exit and q < 1: bool [B]."""
    cumulative = 1 - survival
    reached = cumulative >= params.threshold.to(cumulative.dtype)
    return reached & (step >= params.min_depth) & (params.threshold < 1)


class OuroGate(Gate):
    """The gate inside an Ouro checkpoint: lambda_r = sigmoid(w . z_r + b), decided after the step just run."""

    kind = "ouro"

    def __init__(self, weight_D: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.weight_D, self.bias = weight_D, bias

    def bind(self, model: LoopedLM) -> OuroGate:
        if model.exit_gate is None:
            raise LoopedError(f"{model.name} has no exit gate of its own; use the convergence gate or train one")
        return OuroGate(wide(model.exit_gate.weight[0].detach()), wide(model.exit_gate.bias.detach()))

    def hazard(self, z: Tensor) -> Tensor:
        """lambda of readouts z [..., D]: [...]."""
        if self.weight_D is None or self.bias is None:
            raise LoopedError("the ouro gate has the weights of a model: bind it to one first")
        return torch.sigmoid(wide(z) @ self.weight_D + self.bias)

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival = wide(entry.z0).new_ones(entry.z0.shape[0])
        return (survival,), none_ahead(entry.z0)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        survival = state[0] * (1 - self.hazard(z))
        return (survival,), crosses(survival, step, params)


class Hidden(NamedTuple):
    """A hidden layer beside linear heads: out_NM . gelu(weight_KMF x + bias_KM); K is N, one layer a head, or 1."""

    weight_KMF: Tensor
    bias_KM: Tensor
    out_NM: Tensor


class TrainedGate(Gate):
    """A gate distilled from a teacher: linear heads [N, F] with bias [N], bound to that teacher alone.

    `hidden` is added to the linear heads' logits where there is one.
    """

    def __init__(
        self,
        weight_NF: Tensor,
        bias_N: Tensor,
        hidden: Hidden | None = None,
        *,
        hidden_size: int,
        max_loops: int,
        teacher: str,
        revision: str,
    ) -> None:
        self.weight_NF, self.bias_N, self.hidden = weight_NF, bias_N, hidden
        self.hidden_size, self.max_loops = hidden_size, max_loops
        self.teacher, self.revision = teacher, revision

    def check_model(self, model: LoopedLM, kind: str) -> None:
        """Raise `LoopedError`, about a gate of this `kind`, where `model` is not the teacher or runs more loops."""
        if model.config.hidden_size != self.hidden_size or model.revision != self.revision:
            raise LoopedError(
                f"this {kind} gate was made for {self.teacher} (width {self.hidden_size}, weights "
                f"{self.revision[:12]}) and cannot run on {model.name}; train one with `looped train-gate`"
            )
        if model.config.max_loops > self.max_loops:
            raise LoopedError(
                f"this {kind} gate was made for {self.max_loops} loops; {model.name} runs {model.config.max_loops}"
            )

    def bind(self, model: LoopedLM) -> Self:
        self.check_model(model, self.kind)
        bound = copy.copy(self)
        dtype = torch.promote_types(model.dtype, torch.float32)
        bound.weight_NF = self.weight_NF.to(model.device, dtype)
        bound.bias_N = self.bias_N.to(model.device, dtype)
        if self.hidden is not None:
            bound.hidden = Hidden(*(x.to(model.device, dtype) for x in self.hidden))
        return bound


class LookaheadGate(TrainedGate):
    """Predicts lambda_{r+1} from z_r, one head a step, so exits are known one step ahead; C starts at r = 2."""

    kind = "lookahead"
    latency = 1
    min_depth = 2

    def hazard(self, z: Tensor, step: Tensor) -> Tensor:
        """Predicted hazard [B] of step `step` + 1 from the readout z [B, D] of `step` [B]."""
        head = (step - 1).clamp(0, self.weight_NF.shape[0] - 1)
        x = wide(z)
        logits = (x * self.weight_NF[head]).sum(-1) + self.bias_N[head]
        if self.hidden is not None:
            # every head for every row: rows of a batch may be at different steps
            active_BNM = F.gelu(torch.einsum("bf,nmf->bnm", x, self.hidden.weight_KMF) + self.hidden.bias_KM)
            logits = logits + (active_BNM * self.hidden.out_NM).sum(-1).gather(1, head[:, None])[:, 0]
        return torch.sigmoid(logits)

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival = wide(entry.z0).new_ones(entry.z0.shape[0])
        return (survival,), none_ahead(entry.z0)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        survival = state[0] * (1 - self.hazard(z, step))
        return (survival,), crosses(survival, step + 1, params)


def entry_features(entry: Entry) -> Tensor:
    """`pre_loop_features` of rows about to enter the loop; a token's input is its injection where the model has one."""
    return pre_loop_features(entry.z0 if entry.injection is None else entry.injection, entry.carry)


def pre_loop_features(entry_input: Tensor, carry: Carry | None) -> Tensor:
    """What the pre-loop gate sees: the token's input [B, D], the last token's exit state and three numbers: [B, 2D+3].

    Without a token before it, the second half is zero.
    """
    x = wide(entry_input)
    if carry is None:
        return torch.cat((x, x.new_zeros(x.shape[0], x.shape[1] + 3)), -1)
    numbers = torch.stack((carry.entropy, carry.surprisal, carry.depth), -1)
    return torch.cat((x, wide(carry.z), numbers.to(x.dtype)), -1)


class PreLoopGate(TrainedGate):
    """Predicts all hazards before the first loop: the exit is the first depth whose predicted C >= q."""

    kind = "pre-loop"
    latency = 1
    uses_carry = True

    def first_only(self) -> PreLoopGate:
        """The gate with the head of lambda_1 alone."""
        first = copy.copy(self)
        first.weight_NF, first.bias_N = self.weight_NF[:1], self.bias_N[:1]
        if self.hidden is not None:
            first.hidden = self.hidden._replace(out_NM=self.hidden.out_NM[:1])
        return first

    def hazards(self, features_BF: Tensor) -> Tensor:
        """Predicted lambda_1..lambda_{R-1}: [B, R-1]."""
        logits = features_BF @ self.weight_NF.T + self.bias_N
        if self.hidden is not None:
            active_BM = F.gelu(features_BF @ self.hidden.weight_KMF[0].T + self.hidden.bias_KM[0])
            logits = logits + active_BM @ self.hidden.out_NM.T
        return torch.sigmoid(logits)

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival_BN = (1 - self.hazards(entry_features(entry))).cumprod(-1)
        steps = torch.arange(1, survival_BN.shape[1] + 1, device=survival_BN.device)
        column = Params(*(p[:, None] for p in params))
        exits = crosses(survival_BN, steps[None], column)
        last = torch.full_like(params.max_depth, self.max_loops)
        depth = torch.where(exits.any(-1), exits.int().argmax(-1) + 1, last)
        return (depth,), depth <= 1

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        return state, state[0] <= step + 1
