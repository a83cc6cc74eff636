"""Prompts for benches and the demo, from the evaluation part of the generator."""

from __future__ import annotations

import itertools

from looped.data.evalsets import eval_problems
from looped.data.exemplars import prefix


def prompts(n: int, seed: int = 0, kind: str = "trained", num_fewshot: int = 0) -> list[str]:
    """`n` prompts that end in `A:`; `kind` is an evaluation set: trained, heldout or drills."""
    shots = prefix(num_fewshot)
    return [shots + problem.prompt() for problem in itertools.islice(eval_problems(kind, f"prompts/{seed}"), n)]
