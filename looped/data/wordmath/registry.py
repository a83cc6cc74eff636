"""The table of templates. A template draws a question, writes its chain, and returns question and answer."""

from __future__ import annotations

from collections.abc import Callable

from looped.data.wordmath.problem import Chain, Problem, Redraw
from looped.data.wordmath.words import Dice

Template = Callable[[Dice, Chain], tuple[str, int]]

TRAINED: dict[str, Template] = {}
HELD_OUT: dict[str, Template] = {}
"""Templates that training never sees."""


def template(function: Template) -> Template:
    TRAINED[function.__name__] = function
    return function


def unseen(function: Template) -> Template:
    HELD_OUT[function.__name__] = function
    return function


def draw(name: str, function: Template, dice: Dice) -> Problem:
    """One problem of this template, numbers redrawn until every step is in range."""
    while True:
        chain = Chain()
        try:
            question, answer = function(dice, chain)
        except Redraw:
            continue
        return Problem(question, chain.text(), answer, name, chain.steps, question)
