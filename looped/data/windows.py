"""Reads a packed set: windows in an order fixed by (seed, epoch), resumable at any step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from looped.errors import LoopedError


class Batch(NamedTuple):
    """Windows [B, T + 1]: inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]`; `mask[:, 1:]` goes with the targets."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.uint8]


class Windows:
    """Map-style data set over a folder that `build_dataset` wrote.

    Item i is row `order(epoch)[i]`. `batch(step, size)` needs no state: windows step * size and on of the endless
    sequence of shuffled epochs, so a run resumes by its step number alone.
    """

    def __init__(self, folder: str | Path, seed: int = 0) -> None:
        path = Path(folder)
        if not (path / "manifest.json").is_file():
            raise LoopedError(f"{path} holds no packed data set; build one with looped.data.build_dataset first.")
        self.manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        self.seq_len: int = self.manifest["seq_len"]
        self.tokens = np.load(path / "tokens.npy", mmap_mode="r")
        self.mask = np.load(path / "mask.npy", mmap_mode="r")
        self.seed = seed
        self.epoch = 0
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of the rows in this epoch."""
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self))}
        return self._orders[epoch]

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Tokens [T + 1] and mask [T + 1] of window `index` of the current epoch."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self.order(self.epoch)[index]
        return self.tokens[row].astype(np.int64), np.array(self.mask[row])

    def batch(self, step: int, size: int) -> Batch:
        """The windows of optimiser step `step` (0-based) at `size` windows a step."""
        first = step * size
        rows = np.empty(size, np.int64)
        filled = 0
        while filled < size:
            epoch, at = divmod(first + filled, len(self))
            part = self.order(epoch)[at : at + size - filled]
            rows[filled : filled + len(part)] = part
            filled += len(part)
        return Batch(self.tokens[rows].astype(np.int64), np.asarray(self.mask[rows]))
