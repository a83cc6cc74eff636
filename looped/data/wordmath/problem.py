"""A problem, the arithmetic chain that solves it, and the rule that keeps evaluation items out of training."""

from __future__ import annotations

import zlib
from typing import NamedTuple

LARGEST = 999
"""No number in a chain is larger: three digits are what a model of a few million parameters adds reliably."""
LARGEST_FACTOR = 12
"""One factor of every product, and every divisor below 60, stays inside the multiplication table."""
ROUND_FACTORS = frozenset({20, 25, 50, 60, 100})
"""Larger factors and divisors that are still easy digit by digit: minutes, cents, percentages."""
HELD_OUT_PARTS = 64
"""One part in this many of all items belongs to evaluation."""


class Redraw(Exception):
    """The numbers drawn give a step outside the allowed range; the caller draws again."""


class Problem(NamedTuple):
    """One question with its solution. `steps` counts written operations (for direct drills: the operations hidden)."""

    question: str
    chain: str
    answer: int
    template: str
    steps: int
    key: str
    """What is hashed for the train/evaluation split: the question, or for drills the bare expression."""

    def prompt(self) -> str:
        return f"Q: {self.question}\nA:"

    def document(self) -> str:
        """`Q: ...\\nA: ... The answer is N.` without the trailing blank line."""
        chain = f" {self.chain}" if self.chain else ""
        return f"Q: {self.question}\nA:{chain} The answer is {self.answer}."


def held_out(key: str) -> bool:
    """True where the item belongs to evaluation only. A pure function of the text, so no seed can leak an item."""
    return zlib.crc32(key.encode()) % HELD_OUT_PARTS == 0


class Chain:
    """Writes the steps of a solution: every method appends one true equation and returns its result.

    Raises Redraw where an operand or a result leaves the range a small model can learn.
    """

    __slots__ = ("parts", "steps")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.steps = 0

    def _write(self, a: int, op: str, b: int, result: int, lead: str, unit: str) -> int:
        if not 0 <= result <= LARGEST or a > LARGEST or b > LARGEST:
            raise Redraw
        self.steps += 1
        equation = f"{a} {op} {b} = {result}"
        self.parts.append(f"{lead} {equation}{' ' + unit if unit else ''}." if lead else f"{equation}.")
        return result

    def add(self, a: int, b: int, lead: str = "", unit: str = "") -> int:
        return self._write(a, "+", b, a + b, lead, unit)

    def sub(self, a: int, b: int, lead: str = "", unit: str = "") -> int:
        return self._write(a, "-", b, a - b, lead, unit)

    def mul(self, a: int, b: int, lead: str = "", unit: str = "") -> int:
        if min(a, b) > LARGEST_FACTOR and a not in ROUND_FACTORS and b not in ROUND_FACTORS:
            raise Redraw
        return self._write(a, "*", b, a * b, lead, unit)

    def div(self, a: int, b: int, lead: str = "", unit: str = "") -> int:
        if b == 0 or a % b or (b > LARGEST_FACTOR and b not in ROUND_FACTORS):
            raise Redraw
        return self._write(a, "/", b, a // b, lead, unit)

    def total(self, values: list[int], lead: str = "", unit: str = "") -> int:
        """Adds the values one by one, one written step each; the lead stands before the last step."""
        result = values[0]
        for value in values[1:-1]:
            result = self.add(result, value)
        return self.add(result, values[-1], lead, unit)

    def note(self, text: str) -> None:
        """A sentence without an operation."""
        self.parts.append(text)

    def text(self) -> str:
        return " ".join(self.parts)
