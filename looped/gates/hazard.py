"""Gates that predict hazards: Ouro's own, and those that learn hazards: step by step, one step ahead, before the loop.

Exit at the first r >= min_depth with C(r) = 1 - prod_{j<=r} (1 - lambda_j) >= q, so hazard mass below min_depth is
folded onto it (ragged KV, eqs. 2-4). A threshold of 1 never exits early.
"""

# B rows, D width, R loop steps, N heads, F features

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.errors import LoopedError
from looped.gates.protocol import Entry, Gate, Params, State, none_ahead, wide
from looped.gates.trained import StepHeads, TrainedGate, entry_features
from looped.model import LoopedLM

CARRY_INPUTS = ("state", "entropy", "surprisal", "depth")
"""What a pre-loop gate may see of the token before: exit state, entropy, surprisal of the next token, exit depth."""


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


class StepGate(StepHeads):
    """A trained gate that decides, like Ouro's own, about the step just run: heads for r = 1..R-1."""

    @classmethod
    def num_heads(cls, max_loops: int) -> int:
        return max(max_loops - 1, 1)

    def hazard(self, z: Tensor, step: Tensor) -> Tensor:
        """Hazard [B] of step `step` [B] from its readout z [B, D]."""
        return torch.sigmoid(self.head_logits(wide(z), step - 1))

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival = wide(entry.z0).new_ones(entry.z0.shape[0])
        return (survival,), none_ahead(entry.z0)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        survival = state[0] * (1 - self.hazard(z, step))
        return (survival,), crosses(survival, step, params)


class Stage2Gate(StepGate):
    """Learnt from how much loops lower the loss (Ouro, stage II); it needs no gate of the model's own."""

    kind = "stage2"


class SameStepGate(StepGate):
    """A copy of the teacher's gate learnt from scratch: the control of the continuous-depth-batching authors."""

    kind = "same-step"
    min_depth = 2


class LookaheadGate(StepHeads):
    """Predicts lambda_{r+1} from z_r, so exits are known one step ahead; C starts at r = 2.

    Heads for r = 1..R-2. With the input `change` it sees z_r - z_{r-1} too; z_0 is the readout before the loop.
    """

    kind = "lookahead"
    latency = 1
    min_depth = 2
    known_inputs = ("state", "change")

    @classmethod
    def num_heads(cls, max_loops: int) -> int:
        return max(max_loops - 2, 1)

    def hazard(self, z: Tensor, step: Tensor, before: Tensor | None = None) -> Tensor:
        """Predicted hazard [B] of step `step` + 1 from the readout z [B, D] of `step` [B], and that before it."""
        x = wide(z)
        if "change" in self.inputs:
            if before is None:
                raise ValueError("a gate that sees changes needs the readout before")
            x = torch.cat((x, x - wide(before)), -1)
        return torch.sigmoid(self.head_logits(x, step - 1))

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival = wide(entry.z0).new_ones(entry.z0.shape[0])
        state = (survival, entry.z0) if "change" in self.inputs else (survival,)
        return state, none_ahead(entry.z0)

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        survival = state[0] * (1 - self.hazard(z, step, *state[1:]))
        return (survival, z)[: len(state)], crosses(survival, step + 1, params)


class PreLoopGate(TrainedGate):
    """Predicts all hazards before the first loop: the exit is the first depth whose predicted C >= q.

    Its heads are hazards lambda_1..lambda_{R-1}, or with `softmax` the depths 1..R, whose probabilities sum to one.
    """

    kind = "pre-loop"
    latency = 1
    known_inputs = ("embedding", *CARRY_INPUTS)
    default_inputs = known_inputs

    @property
    def uses_carry(self) -> bool:  # type: ignore[override]
        """It looks at the token before."""
        return self.inputs != ("embedding",)

    @property
    def softmax(self) -> bool:
        """The heads are depths, not hazards."""
        return self.bias_N.shape[0] == self.max_loops

    @classmethod
    def num_heads(cls, max_loops: int) -> int:
        return max_loops - 1

    def first_only(self) -> PreLoopGate:
        """The gate with the head of lambda_1 alone. Raises `LoopedError` where heads are depths."""
        if self.softmax:
            raise LoopedError("a hybrid gate needs a pre-loop part that predicts hazards, not one with a softmax")
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
        return torch.sigmoid(hazard_logits(logits) if self.softmax else logits)

    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        survival_BN = (1 - self.hazards(entry_features(entry, self.inputs))).cumprod(-1)
        steps = torch.arange(1, survival_BN.shape[1] + 1, device=survival_BN.device)
        column = Params(*(p[:, None] for p in params))
        exits = crosses(survival_BN, steps[None], column)
        last = torch.full_like(params.max_depth, self.max_loops)
        depth = torch.where(exits.any(-1), exits.int().argmax(-1) + 1, last)
        return (depth,), depth <= 1

    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        return state, state[0] <= step + 1


def hazard_logits(depth_logits: Tensor) -> Tensor:
    """Logits of depths 1..R, of which a softmax makes pi, as logits of the hazards: [..., R] to [..., R-1].

    lambda_d = pi(d) / sum_{j >= d} pi(j), so logit lambda_d = l_d - log sum_{j > d} exp l_j.
    """
    later = depth_logits.flip(-1).logcumsumexp(-1).flip(-1)
    return depth_logits[..., :-1] - later[..., 1:]
