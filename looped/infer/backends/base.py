"""What an attention backend is: two ways to make the `attend` function of a stage's batch."""

# N rows, H heads, G key/value heads, K head dim

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from looped.infer.pages import Pool
from looped.model.attention import Attend


class DecodeBatch(NamedTuple):
    """One new token of each of N sequences, in any order; rows may read different planes. All int64 [N] on the device.

    Padding rows have slot 0 and position 0; there may be several. The tensors may be static buffers of a CUDA graph:
    a backend looks at their values on the device only (`sdpa` apart, which no graph captures on a CPU).

    `packed` batches have several rows of a sequence, at different positions: the tokens of short prompts. Their K/V
    are all stored before any row reads.
    """

    slots: Tensor
    planes: Tensor
    positions: Tensor
    max_len: int
    """No row has more keys than this (positions + 1): an upper bound known to the host."""
    packed: bool = False


class Piece(NamedTuple):
    """Rows `start` to `stop` of a packed batch: tokens of one prompt in rising order of position.

    `first` is the position of the first row and `end` one more than that of the last. `contiguous` says that the rows
    are consecutive positions; in a ragged prefill, tokens that left the loop are missing between them.
    """

    slot: int
    start: int
    stop: int
    first: int
    end: int
    contiguous: bool = True


class PrefillBatch(NamedTuple):
    """Pieces of prompts, packed: N rows, with the slot and position of each (int64 [N] on the device). Never padded,
    never captured in a graph."""

    slots: Tensor
    positions: Tensor
    pieces: tuple[Piece, ...]


class Backend(Protocol):
    """Paged attention. Both functions write the batch's K/V to the pool, then read what each query may see."""

    name: str

    def check(self, page_size: int, head_dim: int, dtype: torch.dtype, device_type: str) -> None:
        """Raise `LoopedError` where the backend cannot serve this model, page size or device."""
        ...

    def describe(self) -> str:
        """What is said once at start."""
        ...

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        """Attention of one query a row: each reads its sequence's earlier tokens in the row's plane, and itself."""
        ...

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        """Causal attention of packed pieces in one plane: a row reads every stored token of its sequence up to itself,
        those of its own piece and those that left the loop earlier included."""
        ...
