"""What an attention backend is: two ways to make the `attend` function of a stage's batch."""

# N rows, H heads, G key/value heads, K head dim

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looped.infer.pool import Pool
from looped.infer.transfer import upload
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

    `first` is the position of the first row and `end` one more than that of the last. The rows are consecutive
    positions, but for a ragged prefill's, in which tokens that left the loop are missing between them.
    """

    slot: int
    start: int
    stop: int
    first: int
    end: int

    @property
    def contiguous(self) -> bool:
        return self.end - self.first == self.stop - self.start


class PrefillBatch(NamedTuple):
    """Pieces of prompts, packed: N rows, with the slot and position of each (int64 [N] on the device).

    `table_3B` (int32 on the device) has B places for pieces, see `piece_table`. Batches may be padded: places without a
    piece have slot 0 and no rows, and padding rows (slot 0, position 0) are one last piece of slot 0 with a single key.
    The tensors may be static buffers of a CUDA graph. Then `pieces`, what the host knows, hold for its capture alone,
    and a backend goes by the tensors and by the bounds `longest` and `max_len`.
    """

    slots: Tensor
    positions: Tensor
    table_3B: Tensor
    pieces: tuple[Piece, ...]
    longest: int
    """No piece has more rows."""
    max_len: int
    """No row has more keys than this (positions + 1)."""

    @classmethod
    def of(cls, slots: Tensor, positions: Tensor, pieces: Sequence[Piece]) -> PrefillBatch:
        """A batch that is not padded."""
        table = upload(piece_table(pieces, len(pieces)), torch.int32, slots.device)
        longest = max(piece.stop - piece.start for piece in pieces)
        return cls(slots, positions, table, tuple(pieces), longest, max(piece.end for piece in pieces))

    @property
    def starts_B1(self) -> Tensor:
        """Where each piece's rows start, and the end of the last."""
        return self.table_3B[0]

    @property
    def slots_B(self) -> Tensor:
        return self.table_3B[1, :-1]

    @property
    def ends_B(self) -> Tensor:
        """Keys that each piece's last row has."""
        return self.table_3B[2, :-1]

    @property
    def holed(self) -> bool:
        """Whether positions are missing between the rows of a piece."""
        return any(piece.slot and not piece.contiguous for piece in self.pieces)


def piece_table(pieces: Sequence[Piece], places: int) -> NDArray[np.int32]:
    """Pieces as numbers [3, places + 1]: first rows and, behind them, the end; slots; ends."""
    table = np.zeros((3, places + 1), dtype=np.int32)
    table[0] = pieces[-1].stop
    table[:, : len(pieces)] = np.array([(piece.start, piece.slot, piece.end) for piece in pieces]).T
    return table


class Backend(Protocol):
    """Paged attention. Both functions write the batch's K/V to the pool, then read what each query may see."""

    name: str

    @property
    def pads_prefill(self) -> bool:
        """Whether `prefill` serves padded batches, at the cost of the rows they have; where graphs hold it, by their
        tensors and bounds alone. For the others, prompts that do not run by rows are not padded."""
        ...

    @property
    def by_rows(self) -> int:
        """Padded batches of prompts with at most so many rows are better run by `decode`, every token a row."""
        ...

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
