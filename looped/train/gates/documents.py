"""Documents for gate distillation: read from a source, split into training and held-out, tokenized, shuffled.

Everything that comes is decided by source and seed, and a stream can be opened again behind any document.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from looped.data.embedded import EMBEDDED, Generated
from looped.data.formats import Format, Item
from looped.data.hub import DEFAULT
from looped.data.rows import Reader, Source, State
from looped.data.sources import find_source
from looped.errors import LoopedError
from looped.model import LoopedLM
from looped.train.gates.batches import Document, take
from looped.train.gates.chat import AUTO, Chats

_HELD_OUT = 0.1
_HASHES = 1 << 64
_ENCODE_AT_ONCE = 64


@dataclass(frozen=True)
class DataOptions:
    """How rows are read and chats become text; how many documents are shuffled at once."""

    columns: tuple[str, ...] = ()
    chat_template: str = AUTO
    keep_reasoning: bool = False
    shuffle: int = 10_000


class Stream(ABC, Iterator[Document]):
    """Endless documents to train on. `state` is the place behind the last one, as plain JSON."""

    @abstractmethod
    def state(self) -> State:
        """What `stream` goes on from."""


class Documents(ABC):
    """Documents to train on and others to be scored on."""

    max_tokens: int
    seed: int

    @abstractmethod
    def stream(self, state: State | None = None) -> Stream:
        """Endless documents, from a noted place on."""

    @abstractmethod
    def held_out(self, num_tokens: int) -> list[Document]:
        """About `num_tokens` tokens of documents that are never trained on."""

    def training(self) -> Stream:
        """Endless documents from the first on."""
        return self.stream()


class Corpus(Documents):
    """Documents of a source for one model.

    The embedded generator holds out by the hash of the question; of any other source a tenth of the documents is held
    out, by the hash of their words, so the same ones wherever in a stream they come. A text is split after its last
    `A:`, else somewhere in its first half; of a chat the assistant's turns are what the model says. Raises LoopedError
    where the source is empty or too short, or the model has no tokenizer.
    """

    def __init__(
        self, source: str, model: LoopedLM, seed: int, max_tokens: int, options: DataOptions | None = None
    ) -> None:
        if model.tokenizer is None:
            raise LoopedError(f"{model.name} has no tokenizer, so texts cannot be turned into tokens for it")
        self.options = options or DataOptions()
        self.name = source if source != "auto" else EMBEDDED if _speaks_embedded(model) else DEFAULT
        self.model, self.tokenizer, self.seed = model, model.tokenizer, seed
        self.max_tokens = min(max_tokens, model.config.max_positions)
        self.chats = Chats(model.tokenizer, self.options.chat_template)
        self.format = Format(self.options.columns, self.options.keep_reasoning)
        self.front = model.tokenizer.encode("")
        self.generated = self.name == EMBEDDED
        self.source: Source = Generated(seed) if self.generated else find_source(self.name, seed)
        self.bound = 0 if self.generated else self._bound()

    def _bound(self) -> int:
        """Hashes below it are held out: a tenth, and in a source so small that one side would be empty, one text."""
        low, high, dropped = _HASHES, -1, 0
        tenth = int(_HELD_OUT * _HASHES)
        rows = self.source.open(0)
        for row in rows:
            item = self.format.read(row, rows.where)
            if item is None:
                dropped += 1
                continue
            value = _hash(item)
            low, high = min(low, value), max(high, value)
            if low < tenth <= high:
                return tenth
        if low < high:
            return low + 1 if low >= tenth else high
        number = 0 if high < 0 else 1
        note = f"; {dropped} rows were dropped as reasoning, empty or without an answer" if dropped else ""
        raise LoopedError(f"{self.name} holds {number} documents, and distillation needs at least 2{note}")

    def stream(self, state: State | None = None) -> Stream:
        return _Shuffled(self, state)

    def held_out(self, num_tokens: int) -> list[Document]:
        source = Generated(self.seed, evaluation=True) if self.generated else self.source
        rows = source.open(0)
        chunks = _chunks(self.items(rows, held_out=True), _ENCODE_AT_ONCE)
        found = (document for chunk in chunks for document in self.documents(chunk) if document is not None)
        documents = take(found, num_tokens)
        if not documents:
            raise LoopedError(self.useless("held-out document"))
        return documents

    def useless(self, what: str) -> str:
        """Why there is nothing of `what`."""
        refused = f"; the chat template refuses chats ({self.chats.refusal})" if self.chats.refusal else ""
        return f"{self.name} holds no {what} with an answer of two tokens or more within {self.max_tokens}{refused}"

    def items(self, rows: Reader, held_out: bool) -> Iterator[Item]:
        """Chats and texts of rows, those held out or the others."""
        for row in rows:
            item = self.format.read(row, rows.where)
            if item is not None and (self.generated or (_hash(item) < self.bound) is held_out):
                yield item

    def documents(self, items: list[Item]) -> list[Document | None]:
        """The documents of items; None where a length limit leaves none, or nothing is said."""
        segmented = [self.chats.segments(item) for item in items]
        ids = iter(self.tokenizer.encode_many([segment.text for segments in segmented for segment in segments]))
        return [self._document([(next(ids), segment.said) for segment in segments]) for segments in segmented]

    def document(self, text: str) -> Document:
        """A text's tokens, an end-of-text token behind them, cut to the length limit."""
        document = self.documents([Item((), text)])[0]
        if document is None:
            raise LoopedError(f"a text of {len(text)} characters leaves nothing to say within {self.max_tokens} tokens")
        return document

    def _document(self, parts: list[tuple[list[int], bool]]) -> Document | None:
        config = self.model.config
        ids, spans = list(self.front), []
        for part, said in parts:
            if said:
                spans.append((len(ids), len(ids) + len(part)))
            ids += part
        if spans and config.eos_ids and ids[-1] not in config.eos_ids:
            ids.append(config.eos_ids[0])
            spans[-1] = (spans[-1][0], len(ids))
        if ids and max(ids) >= config.vocab_size:
            raise LoopedError(
                f"the tokenizer of {self.model.name} makes id {max(ids)}, outside the model's vocabulary of "
                f"{config.vocab_size}; it belongs to another model"
            )
        ids = ids[: self.max_tokens]
        # The first token of all is never decoded, and the last of a turn is fed only where another follows it.
        spans = [(max(1, begin), min(end, len(ids))) for begin, end in spans]
        spans = [(begin, end) for begin, end in spans if begin < min(end, len(ids) - 1)]
        if not spans:
            return None
        alone = len(spans) == 1 and spans[0][1] == len(ids)
        return Document(ids, spans[0][0], () if alone else tuple(spans))


class _Shuffled(Stream):
    """Documents of a corpus, shuffled in blocks as they come; the place is that of a block, and a number in it."""

    def __init__(self, corpus: Corpus, state: State | None) -> None:
        self.corpus = corpus
        self.epoch: int = state["epoch"] if state else 0
        self.block: State | None = state["block"] if state else None
        self.number: int = state["number"] if state else 0
        self.at: int = state["at"] if state else 0
        self.documents = self._run()

    def __next__(self) -> Document:
        return next(self.documents)

    def state(self) -> State:
        return {"epoch": self.epoch, "block": self.block, "number": self.number, "at": self.at}

    def _run(self) -> Iterator[Document]:
        corpus = self.corpus
        while True:
            rows, found = corpus.source.open(self.epoch, self.block), self.block is not None
            while items := self._block(rows):
                for chunk in _chunks(iter(items[self.at :]), _ENCODE_AT_ONCE):
                    for document in corpus.documents(chunk):
                        self.at += 1
                        if document is not None:
                            found = True
                            yield document
                self.block, self.number, self.at = rows.state(), self.number + 1, 0
            if not found:
                raise LoopedError(corpus.useless("document to train on"))
            self.epoch, self.block, self.number, self.at = self.epoch + 1, None, 0, 0

    def _block(self, rows: Reader) -> list[Item]:
        corpus = self.corpus
        size = _ENCODE_AT_ONCE if corpus.generated else corpus.options.shuffle
        items = list(itertools.islice(corpus.items(rows, held_out=False), size))
        if not corpus.generated:
            random.Random(f"{corpus.seed}/{self.epoch}/{self.number}").shuffle(items)
        return items


class RandomTokens(Documents):
    """Documents of random token ids for a model of random weights: lengths as in chats, the first part a prompt."""

    median, sigma, prompt = 600, 0.9, 0.3

    def __init__(self, model: LoopedLM, seed: int, max_tokens: int) -> None:
        self.vocab_size, self.seed = model.config.vocab_size, seed
        self.max_tokens = min(max_tokens, model.config.max_positions)

    def stream(self, state: State | None = None) -> Stream:
        return _RandomStream(self, state["count"] if state else 0)

    def held_out(self, num_tokens: int) -> list[Document]:
        return take((self.document(-1 - index) for index in itertools.count()), num_tokens)

    def document(self, index: int) -> Document:
        """The document of a number."""
        dice = random.Random(f"{self.seed}/{index}")
        length = min(self.max_tokens, max(8, round(dice.lognormvariate(0, self.sigma) * self.median)))
        return Document(dice.choices(range(self.vocab_size), k=length), max(1, round(self.prompt * length)))


class _RandomStream(Stream):
    def __init__(self, source: RandomTokens, count: int) -> None:
        self.source, self.count = source, count

    def __next__(self) -> Document:
        self.count += 1
        return self.source.document(self.count - 1)

    def state(self) -> State:
        return {"count": self.count}


def open_corpus(source: str, model: LoopedLM, seed: int, max_tokens: int, options: DataOptions) -> Documents:
    """The documents of a source; for a model of random weights, which has no tokenizer, random ones."""
    if model.tokenizer is None and model.revision.startswith("random-"):
        if source != "auto":
            raise LoopedError(f"{model.name} has no tokenizer for {source}; leave --data out, it reads random tokens")
        return RandomTokens(model, seed, max_tokens)
    return Corpus(source, model, seed, max_tokens, options)


def _speaks_embedded(model: LoopedLM) -> bool:
    """The model's tokenizer is the shipped one, whose vocabulary was made for the embedded generator."""
    from looped.data.tokenizer import folder

    assert model.tokenizer is not None
    mine, shipped = (place / "tokenizer.json" for place in (model.tokenizer.folder, folder()))
    return mine.read_bytes() == shipped.read_bytes()


def _hash(item: Item) -> int:
    return int.from_bytes(hashlib.blake2b(item.key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(items, size)):
        yield chunk
