"""More and less, twice and half, ages, averages."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import FRACTIONS, TIMES, Dice


@template
def more_than_total(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, m = d.n(3, 150), d.n(2, 90)
    more = d.chance(0.5)
    q = d.pick(
        f"{p} has {a} {x}. {w} has {m} {'more' if more else 'fewer'} than {p}. How many {x} do they have together?",
        f"{w} has {m} {'more' if more else 'fewer'} {x} than {p}, who has {a}. How many {x} do both have?",
    )
    b = c.add(a, m, f"{w} has") if more else c.sub(a, m, f"{w} has")
    return q, c.add(a, b, "Together")


@template
def times_as_many(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, k = d.n(3, 90), d.n(2, 6)
    together = d.chance(0.5)
    end = "do they have together" if together else f"more than {p} does {w} have"
    q = d.pick(
        f"{p} has {a} {x}. {w} has {TIMES[k]} as many. How many {'' if together else x + ' '}{end}?",
        f"{w} collected {TIMES[k]} as many {x} as {p}. {p} collected {a}. How many {'' if together else x + ' '}{end}?",
    )
    b = c.mul(a, k, f"{w} has")
    return q, c.add(a, b, "Together") if together else c.sub(b, a, "The difference is")


@template
def three_people(d: Dice, c: Chain) -> tuple[str, int]:
    p, w, z = d.people(3)
    x = d.thing()
    a, k, m = d.n(2, 60), d.n(2, 4), d.n(2, 40)
    q = d.pick(
        f"{p} has {a} {x}. {w} has {TIMES[k]} as many as {p}. {z} has {m} more than {w}. How many {x} do all three have?",
        f"{w} owns {TIMES[k]} as many {x} as {p}, and {z} owns {m} more than {w}. {p} owns {a}. How many are there in total?",
    )
    b = c.mul(a, k, f"{w} has")
    e = c.add(b, m, f"{z} has")
    return q, c.total([a, b, e], "In total")


@template
def third_person(d: Dice, c: Chain) -> tuple[str, int]:
    p, w, z = d.people(3)
    x = d.thing()
    a, m, k = d.n(10, 150), d.n(2, 60), d.n(2, 60)
    q = d.pick(
        f"{p} has {a} {x}. {w} has {m} fewer than {p}, and {z} has {k} more than {w}. How many {x} does {z} have?",
        f"{z} has {k} more {x} than {w}. {w} has {m} less than {p}. {p} has {a}. How many does {z} have?",
    )
    b = c.sub(a, m, f"{w} has")
    return q, c.add(b, k, f"{z} has")


@template
def half_as_many(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    k = d.pick(2, 2, 3, 4, 5, 10)
    a = k * d.n(2, 60)
    q = d.pick(
        f"{p} sold {a} {x} in May and {FRACTIONS[k]} as many in June. How many {x} did {p.he} sell in both months?",
        f"{p} has {a} {x} and {w} has {FRACTIONS[k]} as many. How many {x} do they have in all?",
    )
    b = c.div(a, k, "The second number is")
    return q, c.add(a, b, "In all")


@template
def difference_now(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, m = d.n(20, 200), d.n(5, 150), d.n(2, 40)
    q = d.pick(
        f"{p} has {a} {x} and {w} has {b}. {p} loses {m} of {p.his} {x}. How many more {x} than {w} does {p} have now?",
        f"{w} has {b} {x}. {p} had {a} but gave away {m}. How many more {x} does {p} have than {w}?",
    )
    s = c.sub(a, m, f"{p} has")
    return q, c.sub(s, b, "The difference is")


@template
def transfer(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, m = d.n(20, 200), d.n(5, 150), d.n(2, 30)
    if a - m <= b + m:
        a, b = b + 2 * m + d.n(1, 20), b
    q = d.pick(
        f"{p} has {a} {x} and {w} has {b}. {p} gives {m} {x} to {w}. How many more {x} than {w} does {p} have then?",
        f"{p} starts with {a} {x}, {w} with {b}. After {w} gets {m} from {p}, what is the difference between them?",
    )
    s = c.sub(a, m, f"{p} has")
    t = c.add(b, m, f"{w} has")
    return q, c.sub(s, t, "The difference is")


@template
def age_later(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    a, k, y = d.n(4, 40), d.n(2, 30), d.n(2, 20)
    older = d.chance(0.6)
    q = d.pick(
        f"{p} is {a} years old. {w} is {k} years {'older' if older else 'younger'}. How old will {w} be in {y} years?",
        f"{w} is {k} years {'older' if older else 'younger'} than {p}, who is {a}. What is {w}'s age {y} years from now?",
    )
    b = c.add(a, k, f"{w} is") if older else c.sub(a, k, f"{w} is")
    return q, c.add(b, y, f"In {y} years")


@template
def age_times(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    a, k, y = d.n(3, 15), d.n(2, 5), d.n(1, 12)
    ago = d.chance(0.4)
    q = d.pick(
        f"{w} is {TIMES[k]} as old as {p}. {p} is {a}. How old {'was' if ago else 'will'} {w} {'' if ago else 'be in '}{y} years{' ago' if ago else ''}?",
        f"{p} is {a} years old and {w} is {TIMES[k]} as old. What {'was' if ago else 'will be'} {w}'s age {y} years {'ago' if ago else 'from now'}?",
    )
    b = c.mul(a, k, f"{w} is")
    return q, c.sub(b, y, "Then") if ago else c.add(b, y, "Then")


@template
def age_sum(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    a, b, y = d.n(3, 60), d.n(3, 60), d.n(2, 15)
    q = d.pick(
        f"{p} is {a} and {w} is {b} years old. What will be the sum of their ages in {y} years?",
        f"{p} is {a} years old and {w} is {b}. How old will they be together {y} years from now?",
    )
    s = c.add(a, y, f"{p} will be")
    t = c.add(b, y, f"{w} will be")
    return q, c.add(s, t, "The sum is")


@template
def average_three(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, b, mean = d.n(2, 90), d.n(2, 90), d.n(5, 80)
    e = 3 * mean - a - b
    if e < 1:
        e = 3 - (a + b) % 3
    what = d.pick("points", "goals", "pages", "miles", "emails")
    q = d.pick(
        f"{p} got {a}, {b} and {e} {what} on three days. What is the average per day?",
        f"In three games {p} counted {a}, {b} and {e} {what}. How many {what} is that on average?",
    )
    s = c.total([a, b, e], "The sum is")
    return q, c.div(s, 3, "The average is")


@template
def needed_for_average(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    mean = d.n(5, 90)
    a, b = d.n(max(1, mean - 20), mean + 10), d.n(max(1, mean - 20), mean + 10)
    q = d.pick(
        f"{p} scored {a} and {b} on two tests. How many points does {p.he} need on the third test for an average of {mean}?",
        f"After tests with {a} and {b} points, {p} wants an average of {mean} over three tests. What must {p.he} score?",
    )
    s = c.mul(mean, 3, "Needed are")
    t = c.add(a, b, f"{p} has")
    return q, c.sub(s, t, "The third is")


@template
def range_of_scores(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    values = d.sample(range(5, 100), d.n(3, 5))
    shown = ", ".join(map(str, values[:-1])) + f" and {values[-1]}"
    q = d.pick(
        f"The scores of {p} are {shown}. How much larger is the best score than the worst?",
        f"{p} measured {shown} degrees. What is the difference between the highest and the lowest?",
    )
    c.note(f"The largest is {max(values)}. The smallest is {min(values)}.")
    return q, c.sub(max(values), min(values), "The difference is")


@template
def goal_remaining(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    k = d.n(2, 4)
    days = [d.n(2, 60) for _ in range(k)]
    goal = sum(days) + d.n(3, 90)
    what = d.pick("miles", "pages", "laps", "words", "cans", "tickets")
    shown = ", ".join(map(str, days[:-1])) + f" and {days[-1]}"
    q = d.pick(
        f"{p} wants {goal} {what}. So far {p.he} has {shown}. How many {what} are missing?",
        f"The goal is {goal} {what}. {p} did {shown}. How many {what} are left to the goal?",
    )
    s = c.total(days, f"{p} has")
    return q, c.sub(goal, s, "Missing are")
