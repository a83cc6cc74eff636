"""Streams of word problems: endless, seeded, split into training and evaluation by the hash of the question."""

from __future__ import annotations

from collections.abc import Iterator

from looped.data.wordmath import comparison, fractions, rates, sharing, shopping, stories, unseen
from looped.data.wordmath.problem import Problem, held_out
from looped.data.wordmath.registry import HELD_OUT, TRAINED, draw
from looped.data.wordmath.words import Dice

_FILES = (comparison, fractions, rates, sharing, shopping, stories, unseen)  # importing them fills the table

LONG = frozenset({"inventory", "wallet", "game_points", "number_puzzle", "farm_animals", "week_log"})
"""Templates of variable length are drawn three times as often, so that every number of steps is well covered."""


def word_problems(dice: Dice, evaluation: bool = False) -> Iterator[Problem]:
    """Endless problems of the templates that training sees; `evaluation` selects the held-out part of the items."""
    names = [name for name in TRAINED for _ in range(3 if name in LONG else 1)]
    while True:
        name = dice.choice(names)
        problem = draw(name, TRAINED[name], dice)
        if held_out(problem.key) == evaluation:
            yield problem


def unseen_problems(dice: Dice) -> Iterator[Problem]:
    """Endless problems of the templates that training never sees."""
    names = list(HELD_OUT)
    while True:
        name = dice.choice(names)
        yield draw(name, HELD_OUT[name], dice)
