"""Batches of known sequences: one a row, padded behind; or packed, several to a row."""

# B rows, T places of a row, N = B T places, S sequences

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

PADDING, PROMPT, ANSWER = 0, 1, 2
"""Kinds of places of a packed batch."""


class Bounds(NamedTuple):
    """Where the stretches that attend within themselves begin and end, over N places in order.

    `starts` int32 on the batch's device and `cuts` on the host are the same numbers, from 0 to N.
    """

    starts: Tensor
    cuts: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Places of the longest stretch."""
        return max(end - begin for begin, end in itertools.pairwise(self.cuts))


class Sequences(NamedTuple):
    """Token ids [B, T], padded on the right; lengths of the prompt part and of the whole, [B]."""

    tokens: Tensor
    prompt_lens: Tensor
    lengths: Tensor

    @property
    def prompt(self) -> Tensor:
        """Positions of the prompt that have a next token: bool [B, T]."""
        return self.positions < torch.minimum(self.prompt_lens, self.lengths - 1)[:, None]

    @property
    def decode(self) -> Tensor:
        """Positions whose pass is a decode pass: generated tokens but the last, which is never fed: bool [B, T]."""
        after = self.positions >= self.prompt_lens[:, None]
        return after & (self.positions < self.lengths[:, None] - 1)

    @property
    def positions(self) -> Tensor:
        """Of every place in its sequence: [B, T]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand(self.tokens.shape)

    @property
    def bounds(self) -> Bounds:
        """A stretch a row, with the padding behind its sequence."""
        rows, width = self.tokens.shape
        starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=self.tokens.device)
        return Bounds(starts, tuple(range(0, rows * width + 1, width)))

    @property
    def num_sequences(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    def spread(self, values: Tensor) -> Tensor:
        """One value a sequence [S], as a policy takes them: [B]."""
        return values

    def to(self, device: torch.device) -> Sequences:
        return Sequences(*(part.to(device, non_blocking=True) for part in self))


class Packed(NamedTuple):
    """Token ids [B, T] of several sequences a row, none of which sees another.

    `positions` [B, T] start again with every sequence, `kinds` [B, T] say what a place holds, `numbers` [B, T] which
    stretch it is of; `starts` and `cuts` are those of `Bounds`. Padding ends a row and is a stretch of its own.
    """

    tokens: Tensor
    positions: Tensor
    kinds: Tensor
    numbers: Tensor
    starts: Tensor
    cuts: tuple[int, ...]
    num_tokens: int

    @property
    def prompt(self) -> Tensor:
        """Places of prompts that have a next token: bool [B, T]."""
        return (self.kinds == PROMPT) & self._has_next

    @property
    def decode(self) -> Tensor:
        """Places whose pass is a decode pass: bool [B, T]."""
        return (self.kinds == ANSWER) & self._has_next

    @property
    def _has_next(self) -> Tensor:
        following = torch.zeros_like(self.kinds, dtype=torch.bool)
        following[:, :-1] = self.numbers[:, 1:] == self.numbers[:, :-1]
        return following

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.starts, self.cuts)

    @property
    def num_sequences(self) -> int:
        """Stretches, those of padding too."""
        return len(self.cuts) - 1

    def spread(self, values: Tensor) -> Tensor:
        """One value a stretch [S], as a policy takes them: [B, T]."""
        return values[self.numbers]

    def to(self, device: torch.device) -> Packed:
        return self._replace(**{name: getattr(self, name).to(device, non_blocking=True) for name in self._fields[:5]})


Batch = Sequences | Packed
