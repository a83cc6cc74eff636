"""Prompt and output lengths of well-known workloads, drawn from log-normal fits of their statistics. No torch.

Continuous depth batching, appendix C.1, states medians, means and percentiles under the Ouro tokenizer. Where it gives
a mean alone, the spread is that of texts of the kind. Lengths below 4 and requests above 16,384 tokens are drawn again,
as the paper drops them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

MIN_TOKENS, MAX_TOKENS = 4, 16_384


class LogNormal(NamedTuple):
    """A length's median, and the standard deviation of its logarithm."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> int:
        return round(self.median * math.exp(self.sigma * rng.standard_normal()))


class Lengths(NamedTuple):
    """A workload's prompts and outputs, drawn apart."""

    prompt: LogNormal
    output: LogNormal

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        while True:
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            if min(prompt, output) >= MIN_TOKENS and prompt + output <= MAX_TOKENS:
                return prompt, output


FITS = {
    "alpaca": Lengths(LogNormal(13.8, 0.73), LogNormal(40.0, 0.9)),
    "sharegpt": Lengths(LogNormal(64.0, 1.69), LogNormal(188.0, 1.0)),
    "arxiv": Lengths(LogNormal(6436.0, 0.41), LogNormal(199.0, 1.11)),
}


def fits_of(name: str) -> list[Lengths] | None:
    """The fits of `alpaca`, `sharegpt`, `arxiv`, or of several joined by `+`; None for another name."""
    parts = name.split("+")
    return [FITS[part] for part in parts] if all(part in FITS for part in parts) else None


def draw(fits: list[Lengths], rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens without end; every request is of one of the workloads, each as likely."""
    while True:
        yield fits[int(rng.integers(len(fits)))].draw(rng)
