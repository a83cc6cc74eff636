"""What an attention backend is: two ways to make the `attend` function of a stage's batch."""

# N rows, H heads, G key/value heads, K head dim

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from looped.infer.pages import Pool
from looped.infer.scheduler import Chunk
from looped.model.attention import Attend


class DecodeBatch(NamedTuple):
    """One new token of each of N sequences, in order of position. Rows may read different planes."""

    slots: Tensor
    planes: Tensor
    positions: Tensor
    lens: list[int]
    """positions + 1, on the host."""


class PrefillBatch(NamedTuple):
    """Consecutive pieces of prompts, packed: N tokens, with the slot and position of each."""

    slots: Tensor
    positions: Tensor
    chunks: tuple[Chunk, ...]


class Backend(Protocol):
    """Paged attention. Both functions write the batch's K/V to the pool, then read what each query may see."""

    name: str

    def check(self, page_size: int, device_type: str) -> None:
        """Raise `LoopedError` where the backend cannot serve this page size or device."""
        ...

    def describe(self) -> str:
        """What is said once at start."""
        ...

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        """Attention of one query a row: each reads its sequence's earlier tokens in the row's plane, and itself."""
        ...

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        """Causal attention of packed pieces in one plane: each reads its own piece and what is stored before it."""
        ...
