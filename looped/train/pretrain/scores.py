"""Accuracy of a model on the fixed evaluation sets by depth, answered greedily in batches."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from looped.data.evalsets import EVAL_SETS, eval_items
from looped.data.exemplars import prefix
from looped.model import LoopedLM
from looped.train.pretrain.accuracy import Problem, answer_of, greedy

MAX_NEW_TOKENS = 256


class Accuracy(NamedTuple):
    """Share of right answers of one setting."""

    task: str
    num_fewshot: int
    depth: int
    layout: str
    problems: int
    accuracy: float
    unanswered: float
    by_steps: dict[int, float]


def accuracies(model: LoopedLM, tokenizer: Path, num_problems: int) -> list[dict[str, Any]]:
    """Every evaluation set at full depth, 0-shot and with 8 exemplars; 0-shot also at smaller depths."""
    loops = model.config.max_loops
    smaller = sorted({1, loops // 4, loops // 2, 3 * loops // 4} - {0})
    layout = "depth" if not model.config.injection else "shared"
    settings = [(shots, loops, layout) for shots in (0, 8)] + [(0, depth, layout) for depth in smaller]
    if model.config.injection:
        settings.append((0, loops, "depth"))
    return [
        accuracy(model, tokenizer, task, *setting, num_problems)._asdict() for task in EVAL_SETS for setting in settings
    ]


def accuracy(
    model: LoopedLM, tokenizer: Path, task: str, num_fewshot: int, depth: int, layout: str, num_problems: int
) -> Accuracy:
    """Exact match of the final number on the first problems of an evaluation set."""
    from looped.data.tokenizer import load

    words = load(str(tokenizer))
    shots, items = prefix(num_fewshot), eval_items(task, num_problems)
    texts = [f"{shots}Q: {item.question}\nA:" for item in items]
    problems = [
        Problem(words.encode(text, add_special_tokens=False).ids, item.answer.split("####")[1].strip())
        for text, item in zip(texts, items, strict=True)
    ]
    room = model.config.max_positions - max(len(problem.prompt) for problem in problems)
    blank = words.encode("\n\n", add_special_tokens=False).ids
    stops = tuple(blank) if len(blank) == 1 else ()
    prompts = [problem.prompt for problem in problems]
    completions = greedy(model, prompts, depth, min(MAX_NEW_TOKENS, room), layout, stops)
    given = [answer_of(words.decode(ids)) for ids in completions]
    right = [got == problem.answer for got, problem in zip(given, problems, strict=True)]
    by_steps: dict[int, list[bool]] = defaultdict(list)
    for item, good in zip(items, right, strict=True):
        by_steps[item.steps].append(good)
    return Accuracy(
        task,
        num_fewshot,
        depth,
        layout,
        len(items),
        sum(right) / len(right),
        sum(got is None for got in given) / len(given),
        {steps: sum(goods) / len(goods) for steps, goods in sorted(by_steps.items())},
    )
