"""Fractions, percentages, ratios, recipes and shapes."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import FRACTIONS, Dice

FRACTION_PAIRS = ((1, 2), (1, 3), (2, 3), (1, 4), (3, 4), (1, 5), (2, 5), (3, 5), (4, 5), (3, 8), (5, 6))


@template
def fraction_of(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    a, b = d.choice(FRACTION_PAIRS[2:])
    n = b * d.n(2, 40)
    rest = d.chance(0.5)
    q = d.pick(
        f"{p} has {n} {x}. {a}/{b} of them are red. How many {x} are {'not red' if rest else 'red'}?",
        f"Of {n} {x}, {p} {'sells' if rest else 'keeps'} {a}/{b}. How many does {p.he} keep?",
    )
    s = c.div(n, b, f"1/{b} is")
    t = c.mul(s, a, f"{a}/{b} is")
    return q, c.sub(n, t, "The rest is") if rest else t


@template
def two_fractions(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    a, b = d.pick(2, 3, 4, 5), d.pick(2, 3, 4)
    rest = b * d.n(2, 20)
    n = rest * a // (a - 1) if rest % (a - 1) == 0 else a * b * d.n(2, 12)
    q = d.pick(
        f"{p} has {n} {x}. {p.he.capitalize()} gives {FRACTIONS[a]} of them to a friend and loses {FRACTIONS[b]} of the rest. How many are left?",
        f"{p} uses {FRACTIONS[a]} of {n} {x} on Monday and {FRACTIONS[b]} of the remaining ones on Tuesday. How many {x} remain?",
    )
    s = c.div(n, a, f"{FRACTIONS[a].capitalize()} is")
    t = c.sub(n, s, "The rest is")
    u = c.div(t, b, f"{FRACTIONS[b].capitalize()} of it is")
    return q, c.sub(t, u, "Left are")


@template
def percent_of_group(d: Dice, c: Chain) -> tuple[str, int]:
    who = d.pick("students", "workers", "members", "guests", "players")
    tens = d.n(1, 9)
    n = 10 * d.n(2, 60)
    act = d.pick("walk", "sing", "play chess", "wear glasses", "have a pet")
    rest = d.chance(0.5)
    q = d.pick(
        f"A club has {n} {who}. {tens * 10}% of them {act}. How many {who} {'do not ' if rest else ''}{act}?",
        f"{tens * 10}% of {n} {who} {act}. How many {'do not' if rest else 'do'}?",
    )
    s = c.div(n, 10, "10% is")
    t = c.mul(s, tens, f"{tens * 10}% is") if tens > 1 else s
    return q, c.sub(n, t, "The rest is") if rest else t


@template
def ratio_split(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    a, b, e = d.n(1, 7), d.n(1, 5), d.n(2, 30)
    n = (a + b) * e
    q = d.pick(
        f"{p} and {w} share ${n} in the ratio {a}:{b}. How many dollars does {p} get?",
        f"${n} is split between {p} and {w} as {a} to {b}. How much does {p} receive?",
    )
    s = c.add(a, b, "The parts are")
    t = c.div(n, s, "One part is")
    return q, c.mul(t, a, f"{p} gets")


@template
def ratio_other(d: Dice, c: Chain) -> tuple[str, int]:
    a, b, e = d.n(2, 9), d.n(2, 9), d.n(2, 20)
    x, y = d.pick(("boys", "girls"), ("cats", "dogs"), ("red beads", "blue beads"), ("cups of flour", "cups of milk"))
    total = d.chance(0.4)
    q = d.pick(
        f"The ratio of {x} to {y} is {a}:{b}. There are {a * e} {x}. How many {x + ' and ' + y if total else y} are there?",
        f"For every {a} {x} there are {b} {y}. With {a * e} {x}, how many {x + ' and ' + y if total else y} are there?",
    )
    s = c.div(a * e, a, "One part is")
    t = c.mul(s, b, f"The {y} are")
    return q, c.add(a * e, t, "In all") if total else t


@template
def recipe(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    what = d.pick("cups of flour", "spoons of sugar", "eggs", "grams of butter", "cups of rice")
    base, amount, k = d.n(2, 12), d.n(2, 30), d.n(2, 9)
    q = d.pick(
        f"A recipe for {base} people needs {amount} {what}. {p} cooks for {base * k} people. How many {what} does {p.he} need?",
        f"{p} uses {amount} {what} to serve {base}. How many {what} are needed to serve {base * k}?",
    )
    s = c.div(base * k, base, "The recipe is made")
    return q, c.mul(amount, s, "Needed are")


@template
def tank_fraction(d: Dice, c: Chain) -> tuple[str, int]:
    a, b = d.choice(FRACTION_PAIRS)
    size = b * d.n(2, 40)
    used = d.n(1, 9)
    what = d.pick("tank", "barrel", "pool", "bucket")
    q = d.pick(
        f"A {what} holds {size} liters and is {a}/{b} full. {used} liters are taken out. How many liters are in it now?",
        f"A {what} of {size} liters is filled to {a}/{b}. Then {used} liters are used. How much is left?",
    )
    s = c.div(size, b, f"1/{b} is")
    t = c.mul(s, a, f"{a}/{b} is") if a > 1 else s
    return q, c.sub(t, used, "Left are")


@template
def fraction_then_spend(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.good()
    k = d.pick(2, 3, 4, 5, 10)
    m = k * d.n(4, 60)
    u = d.n(2, m // 3)
    q = d.pick(
        f"{p} has ${m}. {p.he.capitalize()} saves {FRACTIONS[k]} of it and buys a {x} for ${u}. How much is left?",
        f"{p} spends {FRACTIONS[k]} of ${m} on food and ${u} on a {x}. How many dollars are left?",
    )
    s = c.div(m, k, f"{FRACTIONS[k].capitalize()} is")
    t = c.sub(m, s, "The rest is")
    return q, c.sub(t, u, "Left are")


@template
def percent_growth(d: Dice, c: Chain) -> tuple[str, int]:
    percent, part = d.pick((10, 10), (20, 5), (25, 4), (50, 2))
    n = part * d.n(2, 60)
    extra = d.n(2, 50)
    what = d.pick("town has", "school has", "club has", "farm has")
    who = d.pick("people", "members", "trees", "animals")
    q = f"A {what} {n} {who}. The number grows by {percent}% and then by {extra} more. How many {who} are there now?"
    c.note(f"{percent}% is 1/{part}.")
    s = c.div(n, part, "The growth is")
    t = c.add(n, s, "That makes")
    return q, c.add(t, extra, "Now")


@template
def part_to_whole(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    a, b = d.choice(FRACTION_PAIRS)
    e = d.n(2, 40)
    q = d.pick(
        f"{a}/{b} of the {x} of {p} are {a * e}. How many {x} does {p.he} have?",
        f"{p} ate {a * e} {x}, which is {a}/{b} of all. How many {x} were there?",
    )
    s = c.div(a * e, a, f"1/{b} is") if a > 1 else a * e
    return q, c.mul(s, b, "All are")


@template
def rectangle_fence(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, b, u = d.n(2, 60), d.n(2, 60), d.n(2, 9)
    what = d.pick("garden", "yard", "field", "pool")
    cost = d.chance(0.5)
    end = (
        f"A fence costs ${u} per meter. How much does the fence around it cost?"
        if cost
        else "How long is a fence around it?"
    )
    q = d.pick(
        f"A {what} is {a} meters long and {b} meters wide. {end}",
        f"{p} has a {what} of {a} by {b} meters. {end}",
    )
    s = c.add(a, b, "Two sides are")
    t = c.mul(s, 2, "The fence is")
    return q, c.mul(t, u, "It costs") if cost else t


@template
def floor_tiles(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, b, hole = d.n(3, 12), d.n(3, 40), d.n(2, 20)
    what = d.pick("floor", "wall", "terrace")
    q = d.pick(
        f"A {what} is {a} meters by {b} meters. {hole} square meters stay free. How many square meters does {p} tile?",
        f"{p} paints a {what} of {b} by {a} meters but leaves out {hole} square meters. How many square meters are painted?",
    )
    s = c.mul(a, b, "The area is")
    return q, c.sub(s, hole, "Without the rest")


@template
def square_side(d: Dice, c: Chain) -> tuple[str, int]:
    a, b = d.n(2, 40), d.n(2, 12)
    q = d.pick(
        f"A square has a perimeter of {4 * a} cm. A rectangle is as long as the side of the square and {b} cm wide. What is the area of the rectangle?",
        f"The four equal sides of a field are {4 * a} meters in total. A path of width {b} meters runs along one side. What is the area of the path?",
    )
    s = c.div(4 * a, 4, "The side is")
    return q, c.mul(s, b, "The area is")
