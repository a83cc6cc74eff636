"""Groups, rows, boxes, sharing and remainders."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import CONTAINERS, Dice, plural


@template
def share_equally(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    k, each, keep = d.n(2, 12), d.n(2, 15), d.n(1, 30)
    q = d.pick(
        f"{p} has {k * each + keep} {x}. {p.he.capitalize()} keeps {keep} and shares the rest equally among {k} friends. How many does each friend get?",
        f"After keeping {keep} of {k * each + keep} {x}, {p} splits the rest among {k} friends. How many {x} does each get?",
    )
    s = c.sub(k * each + keep, keep, "The rest is")
    return q, c.div(s, k, "Each gets")


@template
def share_leftover(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    k, each = d.n(3, 9), d.n(2, 12)
    left = d.n(1, k - 1)
    n = k * each + left
    q = d.pick(
        f"{p} shares {n} {x} among {k} children so that each gets as many as possible. How many {x} are left over?",
        f"{n} {x} are put into bags of {k}. How many {x} remain when no more bag can be filled?",
        f"{p} packs {n} {x} in boxes of {k}. How many {x} do not fit in a full box?",
    )
    s = c.mul(k, each, "Used are")
    return q, c.sub(n, s, "Left are")


@template
def trips_needed(d: Dice, c: Chain) -> tuple[str, int]:
    who = d.pick("students", "people", "guests", "workers", "players")
    what = d.pick("van", "boat", "car", "cabin", "table")
    k, full = d.n(3, 9), d.n(2, 11)
    rest = d.n(1, k - 1)
    n = k * full + rest
    q = d.pick(
        f"A {what} holds {k} {who}. How many {plural(what)} are needed for {n} {who}?",
        f"There are {n} {who}. Each {what} has room for {k}. How many {plural(what)} do they need?",
    )
    s = c.mul(k, full, f"{full} {plural(what)} hold")
    c.sub(n, s, "Left are")
    return q, c.add(full, 1, "One more is needed:")


@template
def full_groups(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    box = d.choice(CONTAINERS)
    a, b, k, groups = d.n(5, 60), d.n(5, 60), d.n(2, 12), d.n(2, 12)
    b = k * groups - a if k * groups - a > 0 else b
    q = d.pick(
        f"{p} has {a} red and {b} blue {x}. A {box} holds {k}. How many {plural(box)} can {p.he} fill?",
        f"{p} puts {a} small and {b} large {x} into {plural(box)} of {k}. How many {plural(box)} does {p.he} need?",
    )
    s = c.add(a, b, f"The {x} are")
    return q, c.div(s, k, f"The {plural(box)} are")


@template
def rows_missing(d: Dice, c: Chain) -> tuple[str, int]:
    place, x = d.pick(("hall", "chairs"), ("garden", "roses"), ("theater", "seats"), ("field", "trees"))
    rows, per = d.n(3, 12), d.n(4, 30)
    gone = d.n(1, 20)
    verb = d.pick("broken", "missing", "old")
    q = d.pick(
        f"A {place} has {rows} rows of {per} {x}. {gone} {x} are {verb}. How many {x} are not {verb}?",
        f"In a {place} there are {rows} rows with {per} {x} each, but {gone} of them are {verb}. How many are fine?",
    )
    s = c.mul(rows, per, "In all")
    return q, c.sub(s, gone, "Fine are")


@template
def boxes_in_boxes(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    a, b, e = d.n(2, 9), d.n(2, 9), d.n(2, 12)
    q = d.pick(
        f"A crate has {a} boxes. Each box has {b} bags with {e} {x} each. How many {x} are in the crate?",
        f"{p} has {a} shelves with {b} jars on each. Every jar holds {e} {x}. How many {x} does {p} have?",
        f"There are {a} rooms with {b} tables each, and on every table lie {e} {x}. How many {x} are there?",
    )
    s = c.mul(a, b, "First")
    return q, c.mul(s, e, f"The {x} are")


@template
def empty_seats(d: Dice, c: Chain) -> tuple[str, int]:
    rows, per = d.n(3, 12), d.n(4, 20)
    n, m = d.n(5, 60), d.n(5, 60)
    what = d.pick("bus", "plane", "theater", "hall")
    q = d.pick(
        f"A {what} has {rows} rows of {per} seats. {n} women and {m} men sit down. How many seats stay empty?",
        f"{n} adults and {m} children sit in a {what} with {rows} rows of {per} seats. How many seats are free?",
    )
    s = c.mul(rows, per, "The seats are")
    t = c.add(n, m, "The people are")
    return q, c.sub(s, t, "Empty are")


@template
def teams(d: Dice, c: Chain) -> tuple[str, int]:
    k, count, absent = d.n(2, 12), d.n(2, 12), d.n(1, 9)
    who = d.pick("students", "children", "players", "campers")
    q = d.pick(
        f"There are {k * count + absent} {who}, but {absent} are ill. The others form teams of {k}. How many teams are there?",
        f"Of {k * count + absent} {who}, {absent} only watch. The rest play in teams of {k}. How many teams play?",
    )
    s = c.sub(k * count + absent, absent, "Playing are")
    return q, c.div(s, k, "The teams are")


@template
def collect_and_share(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, k = d.n(3, 80), d.n(3, 80), d.n(2, 9)
    b = b - (a + b) % k + k
    q = d.pick(
        f"{p} finds {a} {x} and {w} finds {b}. They share all of them equally among {k} people. How many does each get?",
        f"{p} and {w} put {a} and {b} {x} together and divide them into {k} equal piles. How many {x} are in a pile?",
    )
    s = c.add(a, b, "Together")
    return q, c.div(s, k, "Each gets")


@template
def bags_plus_loose(d: Dice, c: Chain) -> tuple[str, int]:
    p, x, box = d.person(), d.thing(), d.choice(CONTAINERS)
    a, b, e = d.n(2, 12), d.n(2, 20), d.n(1, 40)
    q = d.pick(
        f"{p} has {a} {plural(box)} of {b} {x} and {e} loose {x}. How many {x} does {p.he} have?",
        f"Each {box} holds {b} {x}. {p} fills {a} {plural(box)} and has {e} {x} left. How many {x} were there?",
    )
    s = c.mul(a, b, f"The {plural(box)} hold")
    return q, c.add(s, e, "In all")


@template
def more_per_box(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    a, k, new = d.n(2, 12), d.n(2, 9), d.n(2, 9)
    total = new * k * d.n(1, 4)
    if total % a or total // a < 2:
        a = k
    q = d.pick(
        f"{p} has {a} bags with {total // a} {x} each. {p.he.capitalize()} packs all of them again into bags of {new}. How many bags does {p.he} fill now?",
        f"{a} boxes hold {total // a} {x} each. If each box held {new} {x}, how many boxes would be needed?",
    )
    s = c.mul(a, total // a, f"The {x} are")
    return q, c.div(s, new, "The new count is")
