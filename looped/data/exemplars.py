"""The eight public chain-of-thought exemplars (Wei et al., 2022) that GSM8K is commonly prompted with."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import NamedTuple


class Exemplar(NamedTuple):
    question: str
    target: str

    def document(self) -> str:
        return f"Q: {self.question}\nA: {self.target}"


@cache
def exemplars() -> tuple[Exemplar, ...]:
    rows = json.loads(resources.files("looped.data").joinpath("exemplars.json").read_text(encoding="utf-8"))
    return tuple(Exemplar(row["question"], row["target"]) for row in rows)


def prefix(count: int = 8) -> str:
    """The first `count` exemplars, each followed by a blank line: what stands before the question of a prompt."""
    return "".join(f"{exemplar.document()}\n\n" for exemplar in exemplars()[:count])
