"""The embedded generator as texts and as a source of rows: endless word problems and drills."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from looped.data.drills import drill_problems
from looped.data.rows import Reader, Row, Source, State
from looped.data.wordmath.generate import word_problems
from looped.data.wordmath.words import Dice

EMBEDDED = "embedded"
"""Name of this source, and of the tokenizer that is shipped."""

_DRILLS = 0.35
"""Share of the drills."""


def embedded_documents(seed: int, evaluation: bool = False) -> Iterator[str]:
    """Endless word problems and drills."""
    dice = Dice(f"embedded/{seed}/{evaluation}")
    words, short = word_problems(dice, evaluation), drill_problems(dice, evaluation)
    while True:
        yield next(short if dice.chance(_DRILLS) else words).document()


class Generated(Source):
    """The generator's texts; to go on from a place it makes those before it again."""

    name = EMBEDDED

    def __init__(self, seed: int, evaluation: bool = False) -> None:
        self.seed, self.evaluation = seed, evaluation

    def open(self, epoch: int, state: State | None = None) -> Reader:
        return _GeneratedReader(embedded_documents(self.seed, self.evaluation), state)


class _GeneratedReader(Reader):
    def __init__(self, texts: Iterator[str], state: State | None) -> None:
        self.where, self.count = EMBEDDED, state["count"] if state else 0
        self.texts = itertools.islice(texts, self.count, None)

    def __next__(self) -> Row:
        self.count += 1
        return {"text": next(self.texts)}

    def state(self) -> State:
        return {"count": self.count}
