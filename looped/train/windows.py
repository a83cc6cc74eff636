"""Training windows, resident on the training device, and the data set they come from."""

# B rows, T tokens

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looped.data import ANSWER_NUMBER, ANSWER_SIDE, DIRECT, DataConfig, build_dataset, read_packed
from looped.data.build import MANIFEST
from looped.data.tokenizer import END_ID, PAD_ID, VOCAB_SIZE
from looped.data.tokenizer import folder as tokenizer_folder
from looped.errors import LoopedError
from looped.progress import progress
from looped.train.recipe import Data


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
    """Windows of T + 1 tokens as tensors on a device, in an order that is a pure function of (seed, position).

    A few hundred million tokens are under a gigabyte this way, and a batch is one gather.
    """

    def __init__(self, tokens: Tensor, marks: Tensor, seed: int) -> None:
        """Token ids below 32,768 and marks, both [N, T + 1]."""
        if tokens.ndim != 2 or tokens.shape != marks.shape or len(tokens) == 0:
            raise LoopedError(f"training windows must be a non-empty table, got {tokens.shape} and {marks.shape}")
        self._tokens, self._marks, self._seed = tokens.to(torch.int16), marks, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    @classmethod
    def read(cls, folder: Path, device: torch.device, seed: int) -> Windows:
        """All windows of a packed data set."""
        packed = read_packed(folder)
        tokens = torch.from_numpy(np.array(packed.tokens).view(np.int16)).to(device)
        return cls(tokens, torch.from_numpy(np.array(packed.mask)).to(device), seed)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        """T, the tokens a window predicts."""
        return int(self._tokens.shape[1]) - 1

    def rows(self, indices: Tensor) -> Batch:
        """The windows of these indices [B]."""
        indices = indices.to(self._tokens.device, non_blocking=True)
        ids = self._tokens[indices].long()
        return Batch(ids[:, :-1], ids[:, 1:], self._marks[indices][:, 1:])

    def take(self, position: int, rows: int) -> Batch:
        """Windows `position` .. `position + rows` of an endless sequence of shuffled passes over the data."""
        parts: list[Tensor] = []
        while rows > 0:
            epoch, start = divmod(position, len(self))
            parts.append(self._epoch_order(epoch)[start : start + rows])
            position, rows = position + len(parts[-1]), rows - len(parts[-1])
        return self.rows(torch.cat(parts))

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self), generator=generator)
        return self._order


class Corpus(NamedTuple):
    """What a run trains on and is scored on."""

    train: Windows
    held_out: Windows
    vocab_size: int
    eos_id: int
    pad_id: int
    tokenizer: Path


HELD_OUT_TOKENS = 1_000_000


def open_corpus(data: Data, seed: int, device: torch.device, as_found: bool = False) -> Corpus:
    """The packed sets of `data.folder`, made there first where they are missing.

    Two runs that share a folder may start together: one builds, the other waits. `as_found` takes sets that are there
    without comparing them with `data`: a resumed run goes on with what it began with, though a text has changed since.
    """
    if data.folder is None:
        raise LoopedError("data.folder is missing: give the folder of the packed windows, or an empty one to make them")
    data.folder.mkdir(parents=True, exist_ok=True)
    train = DataConfig(
        folder=str(data.folder / "train"),
        tokens=data.tokens,
        seed=data.seed,
        workers=data.workers,
        seq_len=data.window,
        gsm8k=None if data.gsm8k is None else str(data.gsm8k),
        text=data.text,
    )
    tokens = min(data.tokens, HELD_OUT_TOKENS)
    held_out = replace(train, folder=str(data.folder / "held-out"), tokens=tokens, text=(), split="eval")
    with _exclusive(data.folder / "lock"):
        folders = [_build(config, as_found) for config in (train, held_out)]
    sets = [Windows.read(folder, device, seed) for folder in folders]
    return Corpus(sets[0], sets[1], VOCAB_SIZE, END_ID, PAD_ID, tokenizer_folder())


def _build(config: DataConfig, as_found: bool) -> Path:
    if as_found and (Path(config.folder) / MANIFEST).is_file():
        return Path(config.folder)
    bar = progress(max(1, -(-config.tokens // (config.seq_len + 1))), f"data {Path(config.folder).name}")
    folder = build_dataset(config, lambda done, _: bar.advance(done - bar.done))
    if bar.done:
        bar.close()
    return folder


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
