"""What an evaluation measures. No torch, no lm-evaluation-harness."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from looped.eval.setting import Setting

STRICT, FLEXIBLE = "strict-match", "flexible-extract"  # the library's filters whose scores are reported


class Score(NamedTuple):
    """Mean exact match, from 0 to 1, and its standard error (None for a single document)."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Protocol:
    """What must be equal for two scores to be comparable."""

    task: str
    harness_task: str
    """The library's task whose prompt, filters and metric are used."""
    version: float | str
    num_fewshot: int
    filters: tuple[str, ...]
    until: tuple[str, ...]
    max_gen_toks: int
    data: str
    chat_template: bool = False


@dataclass(frozen=True)
class Answer:
    """What the engine returned for one document. `depths[i]` loops produced token i; the first is the prefill's."""

    doc_id: int
    text: str
    depths: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    truncated: bool


@dataclass(frozen=True)
class Sample:
    """One scored document."""

    doc_id: int
    question: str
    target: str
    answer: Answer
    strict: bool
    flexible: bool
    extracted: str


@dataclass(frozen=True)
class EvalResult:
    """A task's scores under one setting; the depth policy and layout are the resolved ones.

    `depth_histogram[r - 1]` decode tokens left after r loops. Decode tokens are all but the first of each answer, which
    the prefill produces; `mean_depth` is theirs, NaN without any. `tok_s` counts all new tokens over the wall time of
    the engine's call, prompts included.
    """

    protocol: Protocol
    setting: Setting
    label: str
    kv: str
    gate: str | None
    threshold: float | None
    min_depth: int | None
    max_depth: int
    dense_compute: bool
    prefill: str
    mode: str
    n: int
    strict: Score
    flexible: Score
    depth_histogram: tuple[int, ...]
    num_tokens: int
    seconds: float
    num_truncated: int
    """Prompts cut on their left to leave room for the answer."""
    num_unfinished: int
    """Answers that ran into `max_gen_toks` or the end of the context."""
    samples: tuple[Sample, ...] = field(repr=False, default=())

    @property
    def task(self) -> str:
        return self.protocol.task

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else math.nan

    @property
    def mean_depth(self) -> float:
        tokens = sum(self.depth_histogram)
        loops = sum(depth * count for depth, count in enumerate(self.depth_histogram, start=1))
        return loops / tokens if tokens else math.nan
