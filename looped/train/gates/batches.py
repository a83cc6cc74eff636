"""Documents into batches: one a row, padded, of like length; or packed into rows of one width."""

# B rows, T places

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from looped.train.gates.sequences import ANSWER, PADDING, PROMPT, Batch, Packed, Sequences

_POOL_BATCHES = 8


class Document(NamedTuple):
    """Token ids, the first `prompt_len` of them a prompt; the rest is what the model is to say.

    In a chat of several turns it says `spans` only, the first of which begins at `prompt_len`.
    """

    token_ids: list[int]
    prompt_len: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def said(self) -> tuple[tuple[int, int], ...]:
        """Where the model speaks."""
        return self.spans or ((self.prompt_len, len(self.token_ids)),)

    def turns(self) -> list[Document]:
        """A document for each thing the model says, all before it a prompt: what a request of one turn sees."""
        return [Document(self.token_ids[:end], begin) for begin, end in self.said if begin < end - 1]


class Shape(NamedTuple):
    """Places of a batch at most, and the width of packed rows; None pads one document a row."""

    batch_tokens: int
    width: int | None = None

    @property
    def pool_tokens(self) -> int:
        """Tokens of documents that are put into batches together."""
        return _POOL_BATCHES * max(self.batch_tokens, self.width or 0)


def take(documents: Iterator[Document], num_tokens: int) -> list[Document]:
    """Documents until they hold `num_tokens` tokens."""
    taken, total = [], 0
    for document in documents:
        taken.append(document)
        total += len(document.token_ids)
        if total >= num_tokens:
            break
    return taken


def batches(documents: Iterable[Document], batch_tokens: int, width: int | None = None) -> Iterator[Batch]:
    """Batches of at most `batch_tokens` places (one row, if that is wider).

    Documents are padded to those of like length, or packed into rows of `width`.
    """
    stream, shape = iter(documents), Shape(batch_tokens, width)
    pool = 0
    while taken := take(stream, shape.pool_tokens):
        yield from in_batches(taken, shape, f"0/{pool}")
        pool += 1


def in_batches(pool: Sequence[Document], shape: Shape, salt: str) -> Iterator[Batch]:
    """The batches of one pool of documents, in an order that `salt` decides."""
    dice = random.Random(salt)
    if shape.width is None:
        by_turn = [turn for document in pool for turn in document.turns()]
        cut = _cut(sorted(by_turn, key=lambda document: len(document.token_ids)), shape.batch_tokens)
        dice.shuffle(cut)
        yield from map(padded, cut)
        return
    rows = [[pool[index] for index in row] for row in best_fit([len(d.token_ids) for d in pool], shape.width)]
    dice.shuffle(rows)
    # As many rows in each batch, so that no batch is left with a few.
    number = -(-len(rows) // max(1, shape.batch_tokens // shape.width))
    for index in range(number):
        begin, end = (len(rows) * edge // number for edge in (index, index + 1))
        yield packed(rows[begin:end], shape.width)


def _cut(by_length: list[Document], batch_tokens: int) -> list[list[Document]]:
    """Runs of documents, shortest first, whose padded size stays within `batch_tokens`."""
    runs: list[list[Document]] = [[]]
    for document in by_length:
        if runs[-1] and (len(runs[-1]) + 1) * len(document.token_ids) > batch_tokens:
            runs.append([])
        runs[-1].append(document)
    return [run for run in runs if run]


def padded(documents: Sequence[Document]) -> Sequences:
    """One batch [B, T] of documents, those with the longest answers first."""
    rows = sorted(documents, key=lambda document: document.prompt_len - len(document.token_ids))
    lengths = torch.tensor([len(document.token_ids) for document in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, document in zip(tokens, rows, strict=True):
        row[: len(document.token_ids)] = torch.tensor(document.token_ids)
    return Sequences(tokens, torch.tensor([document.prompt_len for document in rows]), lengths)


def best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, each put into the fullest row of `width` that has room for it.

    Raises ValueError for a length above `width`.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left and the row, smallest first
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > width:
            raise ValueError(f"a document of {length} tokens does not fit a row of {width}")
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            rows.append([index])
            room, row = width, len(rows) - 1
        else:
            room, row = free.pop(at)
            rows[row].append(index)
        if room > length:
            bisect.insort(free, (room - length, row))
    return rows


def packed(rows: Sequence[Sequence[Document]], width: int) -> Packed:
    """One batch [B, T] of rows of documents that fit a width T together."""
    shape = (len(rows), width)
    tokens, positions, numbers = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    kinds = torch.full(shape, PADDING, dtype=torch.int8)
    lengths: list[int] = []
    for row, documents in enumerate(rows):
        at = 0
        for document in documents:
            end = at + len(document.token_ids)
            tokens[row, at:end] = torch.tensor(document.token_ids)
            positions[row, at:end] = torch.arange(end - at)
            kinds[row, at:end] = PROMPT
            for begin, stop in document.said:
                kinds[row, at + begin : at + stop] = ANSWER
            numbers[row, at:end] = len(lengths)
            lengths.append(end - at)
            at = end
        if at < width:
            positions[row, at:] = torch.arange(width - at)
            numbers[row, at:] = len(lengths)
            lengths.append(width - at)
    cuts = (0, *itertools.accumulate(lengths))
    number = sum(len(document.token_ids) for documents in rows for document in documents)
    return Packed(tokens, positions, kinds, numbers, torch.tensor(cuts, dtype=torch.int32), cuts, number)
