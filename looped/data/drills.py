"""Short arithmetic drills. Most are answered directly, so the whole computation happens inside one token.

There extra loop steps can pay: with a written chain every token is easy. Drills in SINGLE_DIGIT have answers of one
digit, hence one token, computed from several operands. The `*_steps` drills ask for a written chain instead, and say so
in the question. The held-out split hashes the bare expression, not its wording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from looped.data.wordmath.problem import Chain, Problem, Redraw, held_out
from looped.data.wordmath.words import Dice


class Draft(NamedTuple):
    """What a drill draws: the question, its bare expression, the answer, and the hidden or written operations."""

    question: str
    expression: str
    answer: int
    steps: int


Drill = Callable[[Dice, Chain], Draft]

DRILLS: dict[str, Drill] = {}
WEIGHTS: dict[str, int] = {}
SINGLE_DIGIT: set[str] = set()


def drill(weight: int = 1, single: bool = False) -> Callable[[Drill], Drill]:
    def register(function: Drill) -> Drill:
        DRILLS[function.__name__] = function
        WEIGHTS[function.__name__] = weight
        if single:
            SINGLE_DIGIT.add(function.__name__)
        return function

    return register


def _terms(d: Dice, operations: int, inside: bool) -> tuple[str, int]:
    """A sum of single digits with + and -; `inside` keeps every partial sum in 0..9. Returns text and value."""
    value = d.n(0, 9)
    text = [str(value)]
    for _ in range(operations):
        if inside:
            target = d.n(0, 9)
            step = target - value
            plus = step > 0 or (step == 0 and d.chance(0.5))
            k = abs(step)
        else:
            plus, k = d.chance(0.6), d.n(1, 9)
        value = value + k if plus else value - k
        text.append(f"{'+' if plus else '-'} {k}")
    return " ".join(text), value


@drill(weight=5, single=True)
def chain_small(d: Dice, c: Chain) -> Draft:
    k = d.n(1, 6)
    text, value = _terms(d, k, inside=True)
    return Draft(d.pick(f"{text} = ?", f"What is {text}?"), text, value, k)


@drill(weight=5, single=True)
def chain_last_digit(d: Dice, c: Chain) -> Draft:
    """Sum of digits modulo 10: no partial result is bounded, only the last digit is asked."""
    k = d.n(1, 6)
    digits = [d.n(0, 9) for _ in range(k + 1)]
    text = " + ".join(map(str, digits))
    return Draft(
        d.pick(f"({text}) mod 10 = ?", f"What is the last digit of {text}?"), f"{text} mod 10", sum(digits) % 10, k
    )


@drill(weight=3, single=True)
def chain_times(d: Dice, c: Chain) -> Draft:
    """Mixed + and * applied one after another modulo 10: order matters, so no shortcut by adding up."""
    value = d.n(0, 9)
    text = [str(value)]
    k = d.n(1, 5)
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


def assignments(d: Dice, count: int) -> tuple[list[str], str, int]:
    """`a = 4`, `b = a + 3`, ... with every value in 0..9. Returns the lines, the last name and its value."""
    names = d.sample("abcdefghkmnpqrstuvwxyz", count)
    value = d.n(0, 9)
    lines = [f"{names[0]} = {value}"]
    for i in range(1, count):
        target = d.n(0, 9)
        step = target - value
        lines.append(f"{names[i]} = {names[i - 1]} {'-' if step < 0 else '+'} {abs(step)}")
        value = target
    return lines, names[-1], value


@drill(weight=4, single=True)
def variables(d: Dice, c: Chain) -> Draft:
    k = d.n(1, 5)
    lines, name, value = assignments(d, k + 1)
    text = ", ".join(lines)
    return Draft(d.pick(f"{text}. What is {name}?", f"Let {text}. {name} = ?"), text, value, k)


@drill(weight=4, single=True)
def variables_shuffled(d: Dice, c: Chain) -> Draft:
    """The same assignments in random order: each needs one more look-up before it can be used."""
    k = d.n(1, 4)
    lines, name, value = assignments(d, k + 1)
    d.random.shuffle(lines)
    text = ", ".join(lines)
    return Draft(d.pick(f"{text}. What is {name}?", f"Let {text}. {name} = ?"), text, value, k)


@drill(weight=4, single=True)
def cups(d: Dice, c: Chain) -> Draft:
    """State tracking: a ball under one of four cups that are swapped."""
    at = start = d.n(1, 4)
    k = d.n(1, 5)
    swaps = []
    for _ in range(k):
        x, y = d.sample((1, 2, 3, 4), 2)
        swaps.append(f"{x} and {y}")
        at = y if at == x else x if at == y else at
    text = f"A ball is under cup {start} of 4. Swap {', then '.join(swaps)}."
    return Draft(f"{text} {d.pick('Where is the ball?', 'Under which cup is it?')}", text, at, k)


@drill(weight=2, single=True)
def parity(d: Dice, c: Chain) -> Draft:
    bits = [d.n(0, 1) for _ in range(d.n(3, 10))]
    text = " ".join(map(str, bits))
    return Draft(f"Is the number of ones even (0) or odd (1): {text}?", text, sum(bits) % 2, len(bits) - 1)


@drill(weight=2, single=True)
def count_digit(d: Dice, c: Chain) -> Draft:
    pool = d.sample(range(10), 3)
    digits = [d.choice(pool) for _ in range(d.n(3, 9))]
    text = f"How many times does {pool[0]} occur in {' '.join(map(str, digits))}?"
    return Draft(text, text, digits.count(pool[0]), len(digits) - 1)


@drill(weight=3, single=True)
def remainder(d: Dice, c: Chain) -> Draft:
    a, b = d.n(10, 199), d.n(2, 9)
    return Draft(d.pick(f"{a} mod {b} = ?", f"What is the remainder of {a} / {b}?"), f"{a} mod {b}", a % b, 2)


@drill(weight=3, single=True)
def last_digit_product(d: Dice, c: Chain) -> Draft:
    a, b, e = d.n(11, 99), d.n(2, 99), d.n(0, 9)
    text = f"{a} * {b} + {e}"
    return Draft(f"What is the last digit of {text}?", text, (a * b + e) % 10, 2)


@drill(weight=2, single=True)
def digit_max(d: Dice, c: Chain) -> Draft:
    """The larger of two small sums: compute both, then compare."""
    a, b, e, f = d.n(0, 5), d.n(0, 4), d.n(0, 5), d.n(0, 4)
    text = f"{a} + {b} or {e} + {f}"
    return Draft(f"Which is larger, {text}? Give its value.", text, max(a + b, e + f), 3)


@drill(weight=2, single=True)
def digit_sum_mod(d: Dice, c: Chain) -> Draft:
    a, b = d.n(100, 9999), d.n(3, 9)
    return Draft(
        f"What is the digit sum of {a} mod {b}?", f"digits {a} mod {b}", sum(map(int, str(a))) % b, len(str(a))
    )


@drill(weight=3)
def add(d: Dice, c: Chain) -> Draft:
    top = d.pick(99, 99, 499)
    a, b = d.n(2, top), d.n(2, top)
    return Draft(d.pick(f"{a} + {b} = ?", f"What is {a} plus {b}?"), f"{a} + {b}", a + b, 1)


@drill(weight=3)
def subtract(d: Dice, c: Chain) -> Draft:
    top = d.pick(99, 199, 999)
    a = d.n(10, top)
    b = d.n(1, a)
    return Draft(d.pick(f"{a} - {b} = ?", f"What is {a} minus {b}?"), f"{a} - {b}", a - b, 1)


@drill(weight=3)
def multiply(d: Dice, c: Chain) -> Draft:
    a, b = d.n(2, 12), d.n(2, d.pick(12, 80))
    if d.chance(0.5):
        a, b = b, a
    return Draft(d.pick(f"{a} * {b} = ?", f"What is {a} times {b}?"), f"{a} * {b}", a * b, 1)


@drill(weight=3)
def divide(d: Dice, c: Chain) -> Draft:
    b, q = d.n(2, 12), d.n(2, 80)
    return Draft(d.pick(f"{b * q} / {b} = ?", f"What is {b * q} divided by {b}?"), f"{b * q} / {b}", q, 1)


@drill(weight=2)
def percent(d: Dice, c: Chain) -> Draft:
    rate, part, times = d.pick((10, 10, 1), (20, 5, 1), (25, 4, 1), (50, 2, 1), (75, 4, 3), (30, 10, 3), (40, 5, 2))
    a = part * d.n(2, 80)
    return Draft(d.pick(f"What is {rate}% of {a}?", f"{rate}% of {a} = ?"), f"{rate}% of {a}", a // part * times, 2)


@drill(weight=1)
def larger(d: Dice, c: Chain) -> Draft:
    a = d.n(10, 999)
    b = d.pick(d.n(10, 999), int(str(a)[::-1]), max(1, a + d.n(-9, 9)))
    word = d.pick("larger", "smaller")
    return Draft(f"Which is {word}, {a} or {b}?", f"{word} {a} {b}", max(a, b) if word == "larger" else min(a, b), 1)


@drill(weight=2)
def ranked(d: Dice, c: Chain) -> Draft:
    values = d.sample(range(1, 100), d.n(3, 4))
    k = d.n(0, len(values) - 1)
    words = ("smallest", "second smallest", "third smallest", "largest")
    word = "largest" if k == len(values) - 1 else words[k]
    shown = ", ".join(map(str, values))
    return Draft(f"Which is the {word} of {shown}?", f"{word} {shown}", sorted(values)[k], len(values) - 1)


@drill(weight=2)
def sort_digits(d: Dice, c: Chain) -> Draft:
    digits = [d.n(1, 9) for _ in range(d.n(3, 5))]
    text = "".join(map(str, digits))
    return Draft(f"Sort the digits of {text} from small to large.", text, int("".join(sorted(text))), len(digits) - 1)


@drill(weight=2)
def chain_steps(d: Dice, c: Chain) -> Draft:
    k = d.n(2, 6)
    value = d.n(1, 60)
    text = [str(value)]
    for _ in range(k):
        b = d.n(1, 60)
        plus = value < b or d.chance(0.5)
        text.append(f"{'+' if plus else '-'} {b}")
        value = c.add(value, b) if plus else c.sub(value, b)
    shown = " ".join(text)
    return Draft(d.pick(f"Step by step: {shown}", f"Compute {shown} step by step."), f"steps {shown}", value, k)


@drill(weight=2)
def add_steps(d: Dice, c: Chain) -> Draft:
    a, b = d.n(100, 899), d.n(11, 899)
    if a + b > 999:
        raise Redraw
    parts = []
    if b >= 100:
        parts.append(c.add(a // 100 * 100, b // 100 * 100))
    else:
        parts.append(a // 100 * 100)
    parts += [c.add(a % 100 // 10 * 10, b % 100 // 10 * 10), c.add(a % 10, b % 10)]
    value = c.total(parts)
    return Draft(
        d.pick(f"Step by step: {a} + {b}", f"Add {a} and {b} step by step."), f"steps {a} + {b}", value, c.steps
    )


@drill(weight=2)
def multiply_steps(d: Dice, c: Chain) -> Draft:
    a, b = d.n(11, 80), d.n(3, 9) if d.chance(0.4) else d.n(11, 40)
    if a * b > 999:
        raise Redraw
    if b < 10:
        parts = [c.mul(a // 10 * 10, b), c.mul(a % 10, b)]
    else:
        first = c.mul(a, b // 10)
        parts = [c.mul(first, 10), c.mul(a, b % 10)]
    value = c.add(parts[-2], parts[-1])
    return Draft(
        d.pick(f"Step by step: {a} * {b}", f"Multiply {a} by {b} step by step."), f"steps {a} * {b}", value, c.steps
    )


@drill(weight=1)
def variables_steps(d: Dice, c: Chain) -> Draft:
    k = d.n(2, 5)
    value = d.n(1, 30)
    names = d.sample("abcdefghkmnpqrstuvwxyz", k + 1)
    lines = [f"{names[0]} = {value}"]
    for i in range(k):
        b = d.n(1, 30)
        plus = value < b or d.chance(0.5)
        lines.append(f"{names[i + 1]} = {names[i]} {'+' if plus else '-'} {b}")
        value = c.add(value, b) if plus else c.sub(value, b)
    text = ", ".join(lines)
    return Draft(f"Step by step: {text}. What is {names[-1]}?", f"steps {text}", value, k)


def draw_drill(name: str, dice: Dice, drill: Drill | None = None) -> Problem:
    """A problem of a drill: of the one of this name unless another is given."""
    function = drill or DRILLS[name]
    while True:
        chain = Chain()
        try:
            draft = function(dice, chain)
        except Redraw:
            continue
        return Problem(draft.question, chain.text(), draft.answer, name, draft.steps, f"{name} {draft.expression}")


def drill_problems(dice: Dice, evaluation: bool = False, names: tuple[str, ...] | None = None) -> Iterator[Problem]:
    """Endless drills, by weight; `evaluation` selects the held-out part of the expressions, else the rest."""
    chosen = [name for name in names or tuple(DRILLS) for _ in range(WEIGHTS[name])]
    while True:
        problem = draw_drill(dice.choice(chosen), dice)
        if held_out(problem.key) == evaluation:
            yield problem
