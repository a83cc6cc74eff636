"""What an exit gate is, for the reference decoder, the engine and training alike.

A gate works on rows: every tensor has a leading dimension B and lives on the model's device. Its state is a tuple of
such tensors, so an engine can keep it by slot, gather rows and scatter them back. The caller drives it:

    state, ahead = gate.start(entry, params)
    for step in 1..R:
        run the core; z = coda(h) if gate.needs_logits else readout(h)
        state, decision = gate.step(state, z, step, params)
        exit = (decision if gate.latency == 0 else ahead) or step == params.max_depth
        ahead = decision

`start`, `step` and `finish` also run inside CUDA graphs, on batches padded with slots that hold no sequence. So they
never wait for the device (no `.item()`, no `if` on a tensor, no boolean indexing), never copy from the host (no
`torch.tensor`), have shapes that depend on B alone, and no value in a row, however stale, makes them raise. What can be
checked of a request is checked by `check_request` on the host, before it is queued.
"""

# B rows, D width, V vocabulary

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from looped.errors import LoopedError, shown

if TYPE_CHECKING:
    from looped.config import ModelConfig
    from looped.model import LoopedLM

State = tuple[Tensor, ...]


class Carry(NamedTuple):
    """What the next token's decision may see of the token before it: exit state, entropy, surprisal, depth."""

    z: Tensor
    entropy: Tensor
    surprisal: Tensor
    depth: Tensor


class Entry(NamedTuple):
    """Rows about to enter the loop. `token_index` counts a request's tokens: its prefill makes 0."""

    z0: Tensor
    injection: Tensor | None
    carry: Carry | None
    request: Tensor
    token_index: Tensor


class Params(NamedTuple):
    """Per row: the threshold, the smallest and the largest exit depth."""

    threshold: Tensor
    min_depth: Tensor
    max_depth: Tensor


class Gate(ABC):
    """Decides after how many loop steps a token leaves the core.

    `latency` 0: a decision made at step r is about step r; 1: about step r + 1, so it is known one step ahead.
    """

    kind: ClassVar[str]
    latency: int = 0
    uses_carry: bool = False
    needs_logits: bool = False
    """`step` looks at the logits [B, V] of the next token and gets them in place of the readout [B, D]: the caller runs
    the coda after every loop step. What layers of the coda keep of a token then are the K/V of its last step."""
    decode_only: bool = False
    """Acts in decode alone: a prompt runs at full depth whatever the prefill policy says."""
    min_depth: int = 1
    threshold: float | None = None
    """The gate's own default threshold; None takes the model's."""
    threshold_range: tuple[float, float] = (0.0, 1.0)
    layout: str | None = None
    """The KV layout the gate was trained under, None where that does not matter."""
    prefill: str | None = None

    @property
    def name(self) -> str:
        return self.kind

    def bind(self, model: LoopedLM) -> Gate:
        """The gate made ready for a model: teacher and width checked, weights on the model's device."""
        return self

    @abstractmethod
    def start(self, entry: Entry, params: Params) -> tuple[State, Tensor]:
        """State of rows before the first loop step, and the decision about step 1 where latency is 1 (else False)."""

    @abstractmethod
    def step(self, state: State, z: Tensor, step: Tensor, params: Params) -> tuple[State, Tensor]:
        """State and decision [B] after loop step `step` [B] gave the readout z [B, D], or logits [B, V]."""

    def finish(self, z: Tensor, logits: Tensor, token: Tensor, depth: Tensor) -> Carry:
        """The carry for the next token: z [B, D] at the exit, logits [B, V], the token chosen, its depth."""
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        surprisal = -log_p.gather(-1, token[:, None])[:, 0]
        return Carry(z, entropy, surprisal, depth.to(entropy.dtype))

    def default_threshold(self, config: ModelConfig) -> float:
        """The threshold used when a call gives none: the gate file's, else the model config's."""
        return config.exit_threshold if self.threshold is None else self.threshold

    def check_threshold(self, threshold: float) -> float:
        """The threshold, refused where it is outside the gate's range."""
        low, high = self.threshold_range
        if not low <= threshold <= high:
            raise LoopedError(
                f"threshold {shown(threshold)} is outside the range {low:g} to {high:g} of the {self.name} gate"
            )
        return threshold

    def check_request(self, ordinal: int) -> None:  # noqa: B027, most gates decide for any request
        """Raise `LoopedError` if the gate cannot decide for request number `ordinal` of a call (`Entry.request`)."""

    def as_block(self) -> Gate:
        """The gate by which all rows of a call leave together. Raises `LoopedError` where it decides row by row."""
        raise LoopedError(f"the {self.name} gate lets tokens leave one by one; a block needs a training-free criterion")

    def check_layout(self, layout: str, prefill: str) -> None:
        """Say so when the gate was trained under another KV layout or prefill than it will run with."""
        if self.layout is not None and (stored_layout(layout), prefill) != (self.layout, self.prefill or "dense"):
            warnings.warn(
                f"the {self.name} gate was trained under layout {self.layout} with {self.prefill or 'dense'} prefill "
                f"and runs under {layout} with {prefill} prefill",
                stacklevel=3,
            )


def stored_layout(layout: str) -> str:
    """`ragged` and `last-exited` are one function of two storages, so a gate trained under one knows both."""
    return "ragged" if layout == "last-exited" else layout


def wide(x: Tensor) -> Tensor:
    """At least float32: gate probabilities are never computed in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def none_ahead(z: Tensor) -> Tensor:
    """No row exits: [B, D] to False [B]."""
    return torch.zeros(z.shape[0], dtype=torch.bool, device=z.device)
