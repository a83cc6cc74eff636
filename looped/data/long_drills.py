"""Drills with more dependent steps than a few layers can take at once, answered directly in one token.

Short drills are solved by four layers, so that loops add nothing once those are there. Here every step needs the result
of the one before it. The numbers of steps begin where those of the short drills end, so none of their held-out
expressions can be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

from looped.data.drills import Draft, Drill, assignments, draw_drill
from looped.data.wordmath.problem import Chain, Problem, held_out
from looped.data.wordmath.words import Dice


def variables_long(d: Dice, c: Chain) -> Draft:
    """Assignments in random order, each of which needs another."""
    k = d.n(5, 9)
    lines, name, value = assignments(d, k + 1)
    d.random.shuffle(lines)
    text = ", ".join(lines)
    return Draft(d.pick(f"{text}. What is {name}?", f"Let {text}. {name} = ?"), text, value, k)


def cups_long(d: Dice, c: Chain) -> Draft:
    """A ball under one of four cups that are swapped."""
    at = start = d.n(1, 4)
    k = d.n(6, 10)
    swaps = []
    for _ in range(k):
        x, y = d.sample((1, 2, 3, 4), 2)
        swaps.append(f"{x} and {y}")
        at = y if at == x else x if at == y else at
    text = f"A ball is under cup {start} of 4. Swap {', then '.join(swaps)}."
    return Draft(f"{text} {d.pick('Where is the ball?', 'Under which cup is it?')}", text, at, k)


def times_long(d: Dice, c: Chain) -> Draft:
    """Sums and products modulo 10, one after another."""
    value = d.n(0, 9)
    text = [str(value)]
    k = d.n(6, 10)
    for _ in range(k):
        if d.chance(0.35):
            m = d.pick(2, 3, 7, 9)
            text.append(f"times {m}")
            value = value * m % 10
        else:
            m = d.n(1, 9)
            text.append(f"plus {m}")
            value = (value + m) % 10
    expression = ", ".join(text)
    return Draft(f"Mod 10, from left to right: {expression}. What is the result?", expression, value, k)


def arrows(d: Dice, c: Chain) -> Draft:
    """Steps along a map of digits: one look-up after another."""
    nodes = d.sample(range(10), d.n(6, 10))
    targets = {node: d.choice(nodes) for node in nodes}
    at = start = d.choice(nodes)
    k = d.n(2, 8)
    for _ in range(k):
        at = targets[at]
    shown = ", ".join(f"{node} to {target}" for node, target in targets.items())
    text = f"{shown}; {k} steps from {start}"
    return Draft(f"Arrows go from {shown}. Where do {k} steps from {start} end?", text, at, k)


LONG_DRILLS: dict[str, Drill] = {drill.__name__: drill for drill in (variables_long, cups_long, times_long, arrows)}


def long_problems(dice: Dice, evaluation: bool = False) -> Iterator[Problem]:
    """Endless long drills; `evaluation` selects the held-out part of the expressions, else the rest."""
    names = tuple(LONG_DRILLS)
    while True:
        name = dice.choice(names)
        problem = draw_drill(name, dice, LONG_DRILLS[name])
        if held_out(problem.key) == evaluation:
            yield problem
