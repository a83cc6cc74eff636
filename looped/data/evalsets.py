"""The fixed evaluation sets: `trained` (new seeds of trained templates), `heldout` (unseen templates), `drills`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from looped.data.drills import drill_problems
from looped.data.wordmath.generate import unseen_problems, word_problems
from looped.data.wordmath.problem import Problem
from looped.data.wordmath.words import Dice
from looped.errors import unknown

EVAL_SETS = ("trained", "heldout", "drills")
EVAL_SIZE = 500
EVAL_SEED = 2024


class EvalItem(NamedTuple):
    """A row of an evaluation file; `answer` is chain and `#### N`, as in GSM8K."""

    question: str
    answer: str
    template: str
    steps: int


def eval_problems(name: str, seed: int | str = EVAL_SEED) -> Iterator[Problem]:
    """Endless, never repeating problems of an evaluation set. None of them can be drawn for training."""
    if name not in EVAL_SETS:
        raise unknown("evaluation set", name, EVAL_SETS)
    dice = Dice(f"evaluation/{name}/{seed}")
    if name == "trained":
        problems = word_problems(dice, evaluation=True)
    elif name == "heldout":
        problems = unseen_problems(dice)
    else:
        problems = drill_problems(dice, evaluation=True)
    seen = set()
    for problem in problems:
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem


def eval_items(name: str, count: int = EVAL_SIZE) -> list[EvalItem]:
    """The first `count` items of an evaluation set."""
    items = []
    for problem in eval_problems(name, EVAL_SEED):
        answer = f"{problem.chain} #### {problem.answer}".strip()
        items.append(EvalItem(problem.question, answer, problem.template, problem.steps))
        if len(items) == count:
            break
    return items


def eval_file(name: str) -> str:
    """The text of the committed file `eval/wordmath/{name}.jsonl`."""
    return "".join(json.dumps(item._asdict(), ensure_ascii=False) + "\n" for item in eval_items(name))


def write_eval_files(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in EVAL_SETS:
        (folder / f"{name}.jsonl").write_text(eval_file(name), encoding="utf-8")
