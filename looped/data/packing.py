"""Fills windows of seq_len + 1 tokens with whole documents, and marks the tokens that metrics look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from looped.data.encoding import Encoder
from looped.data.exemplars import exemplars
from looped.data.mixture import GENERATED, DataConfig, Doc, Sources, mixed, streams
from looped.data.tokenizer import END_ID
from looped.data.wordmath.words import Dice

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SAMPLES = 200
ANSWER_SIDE = 1
"""Mask bit: a token after `A:`, up to the final full stop."""
ANSWER_NUMBER = 2
"""Mask bit: a digit of the final answer."""
DIRECT = 4
"""Mask bit: answer side of a drill without a written chain: here depth has to do the work."""


class Encoded(NamedTuple):
    ids: list[int]
    mask: list[int]
    source: str


class Packed(NamedTuple):
    """Rows of a shard: tokens and mask [N, seq_len + 1], tokens by source (`exemplars` and `ends` included)."""

    tokens: NDArray[np.uint16]
    mask: NDArray[np.uint8]
    counts: dict[str, int]


class Packer:
    """Turns documents into windows with one tokenizer; holds the token ids that every window needs."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.encoder = Encoder(tokenizer)
        self.config = config
        self.newline = self._one("\n")
        self.blank = self.encoder.generated("\n\n")
        self.shots = [self.encoder.generated(f"{exemplar.document()}\n\n") for exemplar in exemplars()]

    def _one(self, text: str) -> int:
        ids = self.encoder.generated(text)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer splits {text!r} into {len(ids)} tokens; packing needs one")
        return ids[0]

    def encode(self, docs: Iterator[Doc]) -> Iterator[Encoded]:
        """Token ids and mask of every document."""
        generated, repeated = self.encoder.generated, self.encoder.repeated
        for doc in docs:
            ids = generated(doc.text) if doc.source in GENERATED else repeated(doc.text)
            yield Encoded(ids, self._mask(ids, doc), doc.source)

    def _mask(self, ids: list[int], doc: Doc) -> list[int]:
        if not doc.answer_digits:
            return [0] * len(ids)
        start = ids.index(self.newline) + 3  # newline, "A", ":"
        side = ANSWER_SIDE | (DIRECT if doc.direct else 0)
        number = len(ids) - 1 - doc.answer_digits  # the last token is the full stop
        return [0] * start + [side] * (number - start) + [side | ANSWER_NUMBER] * doc.answer_digits + [side]

    def mean_tokens(self, sources: Sources) -> dict[str, float]:
        """Mean tokens of a document with its terminator, by source, from a fixed sample."""
        result = {}
        for name, stream in streams(self.config, sources, Dice("mean lengths")).items():
            lengths = [len(e.ids) + 1 for e in self.encode(itertools.islice(stream, _SAMPLES))]
            result[name] = sum(lengths) / len(lengths)
        return result

    def pack(self, sources: Sources, mean_tokens: dict[str, float], shard: int, rows: int) -> Packed:
        """The windows of a shard."""
        config = self.config
        docs = self.encode(mixed(config, sources, mean_tokens, shard))
        dice = Dice(f"windows/{config.split}/{config.seed}/{shard}")
        width = config.seq_len + 1
        tokens = np.zeros((rows, width), np.uint16)
        mask = np.zeros((rows, width), np.uint8)
        counts: dict[str, int] = {}
        for row in range(rows):
            ids, marks = self._window(docs, dice, width, counts)
            tokens[row] = ids[:width]
            mask[row] = marks[:width]
        return Packed(tokens, mask, counts)

    def _window(
        self, docs: Iterator[Encoded], dice: Dice, width: int, counts: dict[str, int]
    ) -> tuple[list[int], list[int]]:
        """One window: it starts with a document at position 0, or with exemplars; `<|endoftext|>` ends every group.

        A group is one document in half of the cases (a lone question is then answered and ended) and up to eight
        documents joined by blank lines, as in a prompt with examples, in the other half.
        """
        ids: list[int] = []
        marks: list[int] = []
        if dice.chance(self.config.exemplar_share):
            shots = 8 if dice.chance(0.75) else dice.n(1, 7)
            for shot in self.shots[:shots]:
                ids += shot
            marks += [0] * len(ids)
            counts["exemplars"] = counts.get("exemplars", 0) + min(len(ids), width)
        while len(ids) < width:
            group = 1 if dice.chance(0.5) else dice.n(2, 8)
            for left in range(group - 1, -1, -1):
                doc = next(docs)
                room = width - len(ids)
                ids += doc.ids
                marks += doc.mask
                counts[doc.source] = counts.get(doc.source, 0) + min(len(doc.ids), room)
                end = self.blank if left and doc.mask[-1] else [END_ID]
                ids += end
                marks += [ANSWER_SIDE if doc.mask[-1] else 0] * len(end)
                if len(ids) >= width:
                    break
        return ids, marks
