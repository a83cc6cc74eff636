"""Problems built from a random run of events: these give every length from one to six steps."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain, Redraw
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import ANIMALS, CROPS, DAYS, Dice


def _length(d: Dice) -> int:
    return d.pick(1, 2, 2, 3, 3, 3, 4, 4, 5, 6)


def _up_or_down(d: Dice, c: Chain, now: int, largest: int) -> tuple[bool, int, int]:
    """A random gain or loss that keeps the count positive; returns (gain, amount, new count)."""
    gain = now < 4 or d.chance(0.5)
    amount = d.n(1, largest) if gain else d.n(1, min(largest, now - 1))
    return gain, amount, c.add(now, amount) if gain else c.sub(now, amount)


@template
def inventory(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    now = d.n(5, 90)
    said = [f"{p} has {now} {x}."]
    he = p.he.capitalize()
    for _ in range(_length(d)):
        kind = d.n(0, 9)
        if kind == 0 and now <= 60:
            said.append(f"{he} doubles the number.")
            now = c.mul(now, 2)
        elif kind == 1 and now % 2 == 0 and now > 4:
            said.append(f"{he} gives away half.")
            now = c.div(now, 2)
        else:
            gain, k, now = _up_or_down(d, c, now, 40)
            said.append(
                d.pick(f"{he} finds {k} more.", f"{w} gives {p} {k} {x}.", f"{he} buys {k}.")
                if gain
                else d.pick(f"{he} loses {k}.", f"{he} gives {k} to {w}.", f"{he} sells {k}.")
            )
    said.append(
        d.pick(f"How many {x} does {p} have now?", f"How many {x} are left?", f"How many {x} does {p.he} have?")
    )
    return " ".join(said), now


@template
def wallet(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    now = d.n(20, 200)
    said = [f"{p} has ${now}."]
    he = p.he.capitalize()
    for _ in range(_length(d)):
        kind = d.n(0, 5)
        if kind == 0:
            a, u = d.n(2, 9), d.n(2, 12)
            x = d.food()
            said.append(f"{he} buys {a} times a {x} for ${u}.")
            now = c.sub(now, c.mul(a, u))
        elif kind == 1:
            a, u = d.n(2, 9), d.n(5, 15)
            said.append(f"{he} works {a} hours for ${u} an hour.")
            now = c.add(now, c.mul(a, u))
        else:
            gain, k, now = _up_or_down(d, c, now, 80)
            said.append(
                d.pick(f"{he} gets ${k} from {p.his} aunt.", f"{he} earns ${k}.", f"{he} finds ${k}.")
                if gain
                else d.pick(f"{he} spends ${k}.", f"{he} pays ${k} for a {d.good()}.", f"{he} lends ${k} to a friend.")
            )
    if c.steps > 6:
        raise Redraw
    said.append(d.pick(f"How much money does {p} have now?", f"How many dollars does {p.he} have in the end?"))
    return " ".join(said), now


@template
def bus_stops(d: Dice, c: Chain) -> tuple[str, int]:
    what = d.pick("bus", "train", "tram", "ferry")
    now = d.n(5, 50)
    said = [f"A {what} starts with {now} people."]
    for i in range(d.n(1, 3)):
        on, off = d.n(1, 25), d.n(1, min(20, now))
        stop = ("first", "second", "third")[i]
        said.append(d.pick(f"At the {stop} stop {off} get off and {on} get on.", f"Then {off} leave and {on} board."))
        now = c.sub(now, off)
        now = c.add(now, on)
    said.append(d.pick(f"How many people are on the {what}?", f"How many people does the {what} carry now?"))
    return " ".join(said), now


@template
def farm_animals(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    k = d.n(2, 4)
    kinds = d.sample(ANIMALS, k)
    now = d.n(3, 60)
    counts = [now]
    said = [f"{p} has {now} {kinds[0]}"]
    for i in range(1, k):
        if d.chance(0.4):
            said.append(f"twice as many {kinds[i]} as {kinds[i - 1]}")
            now = c.mul(now, 2, f"The {kinds[i]} are")
        else:
            m = d.n(1, 30)
            more = now <= m or d.chance(0.5)
            said.append(f"{m} {'more' if more else 'fewer'} {kinds[i]} than {kinds[i - 1]}")
            now = c.add(now, m, f"The {kinds[i]} are") if more else c.sub(now, m, f"The {kinds[i]} are")
        counts.append(now)
    text = ", ".join(said[:-1]) + f" and {said[-1]}."
    question = d.pick(f"How many animals does {p} have?", "How many animals are there in all?")
    return f"{text} {question}", c.total(counts, "In all")


@template
def harvest(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    x = d.choice(CROPS)
    rows, per, bad = d.n(2, 12), d.n(3, 25), d.n(2, 30)
    k = d.n(2, 9)
    total = rows * per - bad
    split = total > 0 and total % k == 0
    q = f"{p} picks {per} {x} from each of {rows} rows. {bad} are bad and thrown away."
    s = c.mul(rows, per, f"{p} picks")
    t = c.sub(s, bad, "Good are")
    if split:
        q += d.pick(
            f" The rest goes into {k} equal bags. How many are in each bag?",
            f" {k} stores share the rest. How many does each get?",
        )
        return q, c.div(t, k, "Each has")
    return q + d.pick(f" How many good {x} are there?", " How many are left?"), t


@template
def game_points(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    now = d.n(0, 40)
    said = [f"{p} starts a game with {now} points."]
    for i in range(_length(d)):
        if d.chance(0.15) and 0 < now <= 90:
            said.append("Then the points double.")
            now = c.mul(now, 2)
        else:
            gain, k, now = _up_or_down(d, c, now, 50)
            verb = d.pick("wins", "gains", "gets") if gain else d.pick("loses", "drops")
            said.append(f"In round {i + 1} {p.he} {verb} {k}.")
    said.append(d.pick(f"How many points does {p} have?", "What is the final score?"))
    return " ".join(said), now


@template
def week_log(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    verb, unit = d.pick(("runs", "km"), ("reads", "pages"), ("swims", "laps"), ("bakes", "rolls"), ("plants", "trees"))
    first = d.n(2, 40)
    start = d.n(0, 3)
    counts = [first]
    said = [f"On {DAYS[start]} {p} {verb} {first} {unit}."]
    for i in range(1, d.n(2, 4)):
        k = d.n(1, 20)
        day = DAYS[start + i]
        if d.chance(0.3):
            said.append(f"On {day} {p.he} {verb} twice as many as the day before.")
            counts.append(c.mul(counts[-1], 2, day))
        else:
            said.append(f"On {day} {p.he} {verb} {k} more than the day before.")
            counts.append(c.add(counts[-1], k, day))
    said.append(d.pick(f"How many {unit} is that in total?", f"How many {unit} are that in all these days?"))
    return " ".join(said), c.total(counts, "In total")


@template
def number_puzzle(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    now = d.n(2, 20)
    said = [d.pick(f"{p} thinks of the number {now}.", f"Start with {now}.")]
    he = p.he.capitalize() if str(p) in said[0] else ""
    for _ in range(d.n(2, 5)):
        kind = d.n(0, 3)
        k = d.n(2, 9)
        if kind == 0:
            said.append(f"{he} multiplies it by {k}." if he else f"Multiply by {k}.")
            now = c.mul(now, k)
        elif kind == 1 and now % k == 0:
            said.append(f"{he} divides it by {k}." if he else f"Divide by {k}.")
            now = c.div(now, k)
        elif kind == 2:
            k = d.n(2, 30)
            said.append(f"{he} adds {k}." if he else f"Add {k}.")
            now = c.add(now, k)
        else:
            k = d.n(1, 20)
            said.append(f"{he} subtracts {k}." if he else f"Subtract {k}.")
            now = c.sub(now, k)
    said.append(d.pick("What is the result?", "Which number comes out?"))
    return " ".join(said), now


@template
def reverse_puzzle(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    x, k, m = d.n(2, 40), d.n(2, 9), d.n(1, 40)
    plus = d.chance(0.5)
    result = x * k + (m if plus else -m)
    if result < 1:
        raise Redraw
    q = d.pick(
        f"{p} multiplies a number by {k} and then {'adds' if plus else 'subtracts'} {m}. The result is {result}. What is the number?",
        f"{k} times a number {'plus' if plus else 'minus'} {m} is {result}. Which number is it?",
    )
    s = c.sub(result, m) if plus else c.add(result, m)
    return q, c.div(s, k, "The number is")


@template
def before_story(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    x = d.thing()
    gave, got, left = d.n(2, 60), d.n(2, 60), d.n(5, 120)
    q = d.pick(
        f"{p} gives away {gave} {x} and then gets {got}. Now {p.he} has {left}. How many {x} did {p.he} have at first?",
        f"After losing {gave} {x} and finding {got}, {p} has {left} {x}. How many did {p.he} have before?",
    )
    s = c.sub(left, got, "Before that")
    return q, c.add(s, gave, "At first")


@template
def daily_growth(d: Dice, c: Chain) -> tuple[str, int]:
    start, up, down, days = d.n(2, 60), d.n(3, 15), d.n(1, 9), d.n(2, 9)
    what = d.pick(
        "A snail at {} cm climbs {} cm each day and slides back {} cm each night.",
        "A plant of {} cm grows {} cm a day and loses {} cm a day to insects.",
        "A jar with {} coins gets {} coins and gives {} coins every day.",
    )
    unit = "coins are in it" if what.startswith("A jar") else "cm is it"
    q = f"{what.format(start, up, down)} How many {unit} after {days} days?"
    s = c.sub(up, down, "Each day adds")
    t = c.mul(s, days, f"{days} days add")
    return q, c.add(start, t, "Then")


@template
def two_step_gift(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, k = d.n(2, 12), d.n(2, 12), d.n(1, 20)
    q = d.pick(
        f"{p} has {a} packs of {b} {x}. {w} has {k} {x} fewer than {p}. How many {x} do they have together?",
        f"{p} owns {a} packs with {b} {x} in each, and {w} owns {k} less than {p}. What is the total number of {x}?",
    )
    s = c.mul(a, b, f"{p} has")
    t = c.sub(s, k, f"{w} has")
    return q, c.add(s, t, "Together")
