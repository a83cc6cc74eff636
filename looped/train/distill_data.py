"""Documents for gate distillation: cut into prompt and answer, split into training and held-out, batched by length."""

# B sequences, T tokens

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from looped.data.documents import EMBEDDED, embedded_documents, load_documents
from looped.errors import LoopedError
from looped.model import LoopedLM
from looped.train.walk import Sequences

_HELD_OUT_EVERY = 10
_POOL_BATCHES = 8
_ANSWER_MARK = "\nA:"


class Document(NamedTuple):
    """Token ids, the first `prompt_len` of them a prompt; the rest is what the model is to say."""

    token_ids: list[int]
    prompt_len: int


class Corpus:
    """Documents of a source for one model. The held-out ones are never among those to train on.

    The embedded generator holds out by the hash of the question; of a file or hub data set every tenth distinct text is
    held out. A text is split after its last `A:`, else somewhere in its first half. Raises LoopedError where the
    source is empty or too short, or the model has no tokenizer.
    """

    def __init__(self, source: str, model: LoopedLM, seed: int, max_tokens: int) -> None:
        if model.tokenizer is None:
            raise LoopedError(f"{model.name} has no tokenizer, so texts cannot be turned into tokens for it")
        source = EMBEDDED if source == "auto" else source
        self.source, self.model, self.seed = source, model, seed
        self.max_tokens = min(max_tokens, model.config.max_positions)
        self._texts = None if source == EMBEDDED else list(dict.fromkeys(load_documents(source)))
        if self._texts is not None and len(self._texts) < 2:
            raise LoopedError(f"{source} holds {len(self._texts)} documents; distillation needs at least 2")

    def training(self) -> Iterator[Document]:
        """Endless documents; those of a file come again in a new order."""
        if self._texts is None:
            yield from self._usable(embedded_documents(self.seed))
            return
        texts = [text for index, text in enumerate(self._texts) if not self._is_held_out(index)]
        if next(self._usable(texts), None) is None:
            raise LoopedError(f"{self.source} holds no document with an answer of two tokens or more to train on")
        for epoch in range(1 << 30):
            order = random.Random(f"{self.seed}/{epoch}").sample(range(len(texts)), len(texts))
            yield from self._usable(texts[index] for index in order)

    def held_out(self, num_tokens: int) -> list[Document]:
        """About `num_tokens` tokens of held-out documents."""
        if self._texts is None:
            texts: Iterable[str] = embedded_documents(self.seed, evaluation=True)
        else:
            texts = (text for index, text in enumerate(self._texts) if self._is_held_out(index))
        documents = take(self._usable(texts), num_tokens)
        if not documents:
            raise LoopedError(f"{self.source} holds no held-out document with an answer of two tokens or more")
        return documents

    def _is_held_out(self, index: int) -> bool:
        assert self._texts is not None
        return index % min(_HELD_OUT_EVERY, len(self._texts)) == 0

    def _usable(self, texts: Iterable[str]) -> Iterator[Document]:
        """The documents of texts that have at least one decode pass within the length limit."""
        for text in texts:
            document = self.document(text)
            if max(document.token_ids) >= self.model.config.vocab_size:
                raise LoopedError(
                    f"the tokenizer of {self.model.name} makes id {max(document.token_ids)}, outside the model's "
                    f"vocabulary of {self.model.config.vocab_size}; it belongs to another model"
                )
            if document.prompt_len < len(document.token_ids) - 1:
                yield document

    def document(self, text: str) -> Document:
        """A text's tokens, an end-of-text token behind them, cut to the length limit."""
        tokenizer, config = self.model.tokenizer, self.model.config
        assert tokenizer is not None
        head, mark, answer = text.rpartition(_ANSWER_MARK)
        if mark:
            prompt = tokenizer.encode(head + mark)
            ids = prompt + tokenizer.encode(answer, add_special_tokens=False) + list(config.eos_ids[:1])
            return Document(ids[: self.max_tokens], len(prompt))
        ids = (tokenizer.encode(text) + list(config.eos_ids[:1]))[: self.max_tokens]
        share = 0.1 + 0.4 * (zlib.crc32(text.encode()) % 1000) / 1000
        return Document(ids, max(1, round(share * len(ids))))


def take(documents: Iterator[Document], num_tokens: int) -> list[Document]:
    """Documents until they hold `num_tokens` tokens."""
    taken, total = [], 0
    for document in documents:
        taken.append(document)
        total += len(document.token_ids)
        if total >= num_tokens:
            break
    return taken


def batches(documents: Iterable[Document], batch_tokens: int, seed: int = 0) -> Iterator[Sequences]:
    """Padded batches of at most `batch_tokens` places, of documents of like length, in an order that `seed` decides."""
    stream = iter(documents)
    for pool in range(1 << 30):
        taken = take(stream, _POOL_BATCHES * batch_tokens)
        if not taken:
            return
        cut = _cut(sorted(taken, key=lambda document: len(document.token_ids)), batch_tokens)
        random.Random(f"{seed}/{pool}").shuffle(cut)
        yield from map(padded, cut)


def _cut(by_length: list[Document], batch_tokens: int) -> list[list[Document]]:
    """Runs of documents, shortest first, whose padded size stays within `batch_tokens`."""
    runs: list[list[Document]] = [[]]
    for document in by_length:
        if runs[-1] and (len(runs[-1]) + 1) * len(document.token_ids) > batch_tokens:
            runs.append([])
        runs[-1].append(document)
    return runs


def padded(documents: list[Document]) -> Sequences:
    """One batch [B, T] of documents, those with the longest answers first."""
    rows = sorted(documents, key=lambda document: document.prompt_len - len(document.token_ids))
    lengths = torch.tensor([len(document.token_ids) for document in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, document in zip(tokens, rows, strict=True):
        row[: len(document.token_ids)] = torch.tensor(document.token_ids)
    return Sequences(tokens, torch.tensor([document.prompt_len for document in rows]), lengths)
