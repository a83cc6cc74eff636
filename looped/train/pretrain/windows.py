"""Training windows: token tables that batches are taken from, on the training device or left on disk."""

# N windows, B rows, T tokens

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looped.data.packed import read_packed
from looped.data.packing import ANSWER_NUMBER, ANSWER_SIDE, DIRECT
from looped.errors import LoopedError

RESIDENT_SHARE = 0.05
"""Of a GPU's memory that a table may take; a larger one stays on disk."""


class Batch(NamedTuple):
    """Inputs [B, T] long, targets [B, T] long, and marks [B, T] uint8 of the targets (bits of `looped.data`)."""

    inputs: Tensor
    targets: Tensor
    marks: Tensor

    @property
    def answer(self) -> Tensor:
        """Targets that are generated when the model is used: everything after `A:`, [B, T] bool."""
        return (self.marks & ANSWER_SIDE) != 0

    @property
    def number(self) -> Tensor:
        """Targets that are digits of a final answer, [B, T] bool."""
        return (self.marks & ANSWER_NUMBER) != 0

    @property
    def direct(self) -> Tensor:
        """Targets that are digits of an answer given without a written chain, [B, T] bool: depth must do the work."""
        both = ANSWER_NUMBER | DIRECT
        return (self.marks & both) == both


class Windows:
    """Windows of T + 1 tokens in an order that is a pure function of (seed, position).

    A few hundred million tokens are under a gigabyte, lie on the training device, and a batch is one gather there. A
    larger table is mapped from disk: the host gathers the rows, and copies them while the device computes.
    """

    def __init__(self, tokens: Tensor, marks: Tensor | None, seed: int, device: torch.device | None = None) -> None:
        """Token ids below 2**32 and marks (None: all 0), both [N, T + 1]; batches come on `device` (the table's)."""
        if tokens.ndim != 2 or len(tokens) == 0 or (marks is not None and tokens.shape != marks.shape):
            raise LoopedError(
                f"training windows must be a non-empty table, got {tuple(tokens.shape)} and marks of "
                f"{None if marks is None else tuple(marks.shape)}"
            )
        # Unsigned types have few operations: the bits are kept in signed ones, and read back as unsigned.
        wide = tokens.dtype == torch.int32 or (tokens.dtype != torch.int16 and int(tokens.max()) >= 1 << 16)
        self._tokens = tokens.to(torch.int32 if wide else torch.int16)
        self._bits = 0xFFFFFFFF if wide else 0xFFFF
        self._marks, self._seed = marks, seed
        self._device = tokens.device if device is None else device
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @classmethod
    def read(cls, folder: Path, device: torch.device, seed: int) -> Windows:
        """All windows of a packed data set: copied to a GPU that has room for them, else left on disk."""
        packed = read_packed(folder)
        kind = np.int16 if packed.tokens.dtype.itemsize == 2 else np.int32
        names = ("tokens.npy",) if packed.mask is None else ("tokens.npy", "mask.npy")
        # mapped privately ("c"), which torch wants; nothing is ever written to it
        arrays = [np.load(folder / name, mmap_mode="c") for name in names]
        tokens, *marks = (torch.from_numpy(array) for array in (arrays[0].view(kind), *arrays[1:]))
        if device.type == "cuda":
            room = torch.cuda.get_device_properties(device).total_memory * RESIDENT_SHARE
            if sum(array.nbytes for array in arrays) <= room:
                tokens, *marks = (table.to(device) for table in (tokens, *marks))
        return cls(tokens, marks[0] if marks else None, seed, device)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        """T, the tokens a window predicts."""
        return int(self._tokens.shape[1]) - 1

    def rows(self, indices: Tensor) -> Batch:
        """The windows of these indices [B]."""
        picked = self._pick(self._tokens, indices).long() & self._bits
        if self._marks is None:
            marks = torch.zeros((), dtype=torch.uint8, device=picked.device).expand(picked.shape)
        else:
            marks = self._pick(self._marks, indices)
        return Batch(picked[:, :-1], picked[:, 1:], marks[:, 1:])

    def _pick(self, table: Tensor, indices: Tensor) -> Tensor:
        if table.device == self._device:
            return table[indices.to(self._device, non_blocking=True)]
        return table[indices].pin_memory().to(self._device, non_blocking=True)

    def take(self, position: int, rows: int) -> Batch:
        """Windows `position` .. `position + rows` of an endless sequence of shuffled passes over the data."""
        return self.rows(self.indices(position, rows))

    def indices(self, position: int, rows: int) -> Tensor:
        """Which windows `take` takes: their rows in the table [rows]."""
        parts: list[Tensor] = []
        while rows > 0:
            epoch, start = divmod(position, len(self))
            parts.append(self._epoch_order(epoch)[start : start + rows])
            position, rows = position + len(parts[-1]), rows - len(parts[-1])
        return torch.cat(parts)

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self), generator=generator)
        return self._order
