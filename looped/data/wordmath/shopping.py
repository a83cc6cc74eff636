"""Buying, selling, saving."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import Dice, plural


@template
def buy_two_kinds(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y) = d.person(), d.goods(2)
    a, b, u, v = d.n(2, 9), d.n(2, 9), d.n(2, 20), d.n(2, 20)
    q = d.pick(
        f"{p} buys {a} {plural(x)} for ${u} each and {b} {plural(y)} for ${v} each. How much does {p.he} spend in total?",
        f"A {x} costs ${u} and a {y} costs ${v}. {p} buys {a} {plural(x)} and {b} {plural(y)}. How many dollars does {p.he} pay?",
        f"{p} needs {a} {plural(x)} at ${u} apiece and {b} {plural(y)} at ${v} apiece. What is the total cost?",
    )
    s = c.mul(a, u, f"The {plural(x)} cost")
    t = c.mul(b, v, f"The {plural(y)} cost")
    return q, c.add(s, t, "In total")


@template
def change_from_bill(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.food()
    a, u, bill = d.n(2, 9), d.n(2, 12), d.pick(20, 50, 100)
    q = d.pick(
        f"{p} buys {a} {plural(x)} for ${u} each and pays with a ${bill} bill. How much change does {p.he} get?",
        f"One {x} costs ${u}. {p} pays ${bill} for {a} of them. How many dollars does {p.he} get back?",
        f"{p} has ${bill}. After buying {a} {plural(x)} at ${u} each, how much money is left?",
    )
    s = c.mul(a, u, f"The {plural(x)} cost")
    return q, c.sub(bill, s, "The change is")


@template
def discount_each(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.good()
    a, u = d.n(2, 12), d.n(6, 40)
    off = d.n(1, u // 2)
    q = d.pick(
        f"A {x} normally costs ${u}. Today each one is ${off} cheaper. {p} buys {a}. How much does {p.he} pay?",
        f"{p} buys {a} {plural(x)}. Each costs ${u}, but there is a discount of ${off} on every {x}. What does {p.he} pay?",
    )
    s = c.sub(u, off, f"Each {x} costs")
    return q, c.mul(s, a, "The total is")


@template
def unit_price(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.food()
    a, u, b = d.n(2, 9), d.n(2, 15), d.n(2, 12)
    q = d.pick(
        f"{a} {plural(x)} cost ${a * u}. How much do {b} {plural(x)} cost?",
        f"{p} paid ${a * u} for {a} {plural(x)}. At the same price, how many dollars would {b} {plural(x)} cost?",
        f"If {a} {plural(x)} cost ${a * u}, what is the price of {b} {plural(x)}?",
    )
    s = c.div(a * u, a, f"One {x} costs")
    return q, c.mul(s, b, f"{b} cost")


@template
def budget_left(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y) = d.person(), d.goods(2)
    u, v = d.n(5, 90), d.n(5, 90)
    m = u + v + d.n(1, 150)
    q = d.pick(
        f"{p} has ${m}. {p.he.capitalize()} buys a {x} for ${u} and a {y} for ${v}. How much money does {p.he} have left?",
        f"{p} takes ${m} to the shop and spends ${u} on a {x} and ${v} on a {y}. How many dollars are left?",
    )
    s = c.add(u, v, f"{p} spends")
    return q, c.sub(m, s, f"{p.he.capitalize()} has left")


@template
def afford_count(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y) = d.person(), d.goods(2)
    u, v, k = d.n(3, 40), d.n(2, 12), d.n(2, 12)
    m = u + v * k
    q = d.pick(
        f"{p} has ${m}. {p.he.capitalize()} buys a {x} for ${u} and spends the rest on {plural(y)} at ${v} each. How many {plural(y)} does {p.he} buy?",
        f"With ${m}, {p} first buys a {x} for ${u}. Each {y} costs ${v}. How many {plural(y)} can {p.he} buy with the rest?",
    )
    s = c.sub(m, u, "The rest is")
    return q, c.div(s, v, f"{p} buys")


@template
def packs_needed(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.thing()
    k, packs, u = d.n(3, 12), d.n(2, 12), d.n(2, 15)
    q = d.pick(
        f"{p} needs {k * packs} {x}. They come in packs of {k}, and a pack costs ${u}. How much does {p.he} spend?",
        f"{x.capitalize()} are sold in packs of {k} for ${u} a pack. How much do {k * packs} {x} cost?",
    )
    s = c.div(k * packs, k, "The packs needed are")
    return q, c.mul(s, u, "They cost")


@template
def profit(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.good()
    a, u = d.n(3, 12), d.n(2, 20)
    v = u + d.n(1, 20)
    q = d.pick(
        f"{p} makes {a} {plural(x)}. Each costs ${u} to make and sells for ${v}. What is the profit?",
        f"{p} buys {a} {plural(x)} for ${u} each and sells all of them for ${v} each. How much profit does {p.he} make?",
    )
    s = c.sub(v, u, "The profit on each is")
    return q, c.mul(s, a, "The total profit is")


@template
def stand_income(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.food()
    a, days, u = d.n(4, 25), d.n(2, 7), d.n(1, 6)
    cost = d.n(5, 60)
    q = d.pick(
        f"{p} sells {a} {plural(x)} a day for {days} days at ${u} each. The ingredients cost ${cost}. How much does {p.he} earn after costs?",
        f"At a stand {p} sells {a} {plural(x)} every day. Each costs ${u}. After {days} days {p.he} pays ${cost} for ingredients. How much money is left?",
    )
    s = c.mul(a, days, f"{p} sells")
    t = c.mul(s, u, "The income is")
    return q, c.sub(t, cost, "After costs")


@template
def percent_off(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.good()
    percent, part = d.pick((10, 10), (20, 5), (25, 4), (50, 2))
    u = part * d.n(2, 40)
    q = d.pick(
        f"A {x} costs ${u}. It is on sale for {percent}% off. What is the sale price?",
        f"{p} buys a {x} with a {percent}% discount. The normal price is ${u}. How much does {p.he} pay?",
        f"The price of a {x} was ${u} and then fell by {percent}%. What is the new price in dollars?",
    )
    c.note(f"{percent}% is 1/{part}.")
    s = c.div(u, part, "The discount is")
    return q, c.sub(u, s, "The price is")


@template
def tip_total(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    percent, part = d.pick((10, 10), (20, 5), (25, 4))
    x, y = d.foods(2)
    k = d.n(2, 25) * part
    u = d.n(1, k - 1)
    q = d.pick(
        f"{p} orders a {x} for ${u} and a {y} for ${k - u} and leaves a {percent}% tip. How much does {p.he} pay in all?",
        f"A {x} for ${u} and a {y} for ${k - u} are on the bill. {p} adds a tip of {percent}%. What is the total?",
    )
    s = c.add(u, k - u, "The bill is")
    c.note(f"{percent}% is 1/{part}.")
    t = c.div(s, part, "The tip is")
    return q, c.add(s, t, "The total is")


@template
def coupon_total(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y, z) = d.person(), d.goods(3)
    u, v, w = d.n(3, 60), d.n(3, 60), d.n(3, 60)
    off = d.n(2, 9)
    q = d.pick(
        f"{p} buys a {x} for ${u}, a {y} for ${v} and a {z} for ${w}. {p.he.capitalize()} uses a coupon for ${off} off. How much does {p.he} pay?",
        f"A {x} costs ${u}, a {y} ${v} and a {z} ${w}. {p} buys all three and has a ${off} coupon. What does {p.he} pay in total?",
    )
    s = c.total([u, v, w], "All three cost")
    return q, c.sub(s, off, "With the coupon")


@template
def dearer_item(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y) = d.person(), d.goods(2)
    u, m = d.n(3, 90), d.n(2, 60)
    more = d.chance(0.6)
    if not more:
        m = min(m, u - 1)
    word = "more" if more else "less"
    q = d.pick(
        f"A {x} costs ${u}. A {y} costs ${m} {word} than the {x}. How much do both cost together?",
        f"{p} buys a {x} for ${u} and a {y} that costs ${m} {word}. How many dollars does {p.he} spend?",
    )
    v = c.add(u, m, f"The {y} costs") if more else c.sub(u, m, f"The {y} costs")
    return q, c.add(u, v, "Together")


@template
def times_price(d: Dice, c: Chain) -> tuple[str, int]:
    p, (x, y) = d.person(), d.goods(2)
    u, k, a = d.n(2, 30), d.n(2, 5), d.n(2, 6)
    times = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    q = d.pick(
        f"A {y} costs {times} as much as a {x}. A {x} costs ${u}. How much do one {x} and {a} {plural(y)} cost?",
        f"{p} buys a {x} for ${u} and {a} {plural(y)}. Each {y} costs {times} as much as the {x}. What does {p.he} pay?",
    )
    v = c.mul(u, k, f"A {y} costs")
    t = c.mul(v, a, f"The {plural(y)} cost")
    return q, c.add(u, t, "In total")


@template
def membership(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    place = d.pick("gym", "club", "pool", "music school")
    u, months, fee = d.n(5, 60), d.n(2, 12), d.n(5, 90)
    q = d.pick(
        f"A {place} charges ${fee} to join and ${u} a month. How much does {p} pay for {months} months?",
        f"{p} joins a {place}. The sign-up fee is ${fee} and each month costs ${u}. What is the cost of the first {months} months?",
    )
    s = c.mul(u, months, "The months cost")
    return q, c.add(s, fee, "With the fee")


@template
def weeks_to_save(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.pick("bike", "phone", "guitar", "camera", "tent", "skateboard", "watch")
    w, weeks, have = d.n(3, 12), d.n(2, 15), d.n(5, 90)
    price = w * weeks + have
    q = d.pick(
        f"{p} wants a {x} that costs ${price}. {p.he.capitalize()} has ${have} and saves ${w} a week. How many weeks does {p.he} need?",
        f"A {x} costs ${price}. {p} already has ${have}. If {p.he} saves ${w} every week, after how many weeks can {p.he} buy it?",
    )
    s = c.sub(price, have, f"{p} still needs")
    return q, c.div(s, w, "The weeks are")


@template
def saved_minus_spent(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    w, spend, weeks = d.n(10, 60), d.n(2, 9), d.n(2, 12)
    start = d.n(0, 1) * d.n(5, 90)
    unit = d.pick("week", "month")
    begin = f"{p} has ${start}. {p.he.capitalize()}" if start else f"{p}"
    q = (
        f"{begin} earns ${w} a {unit} and spends ${spend} a {unit}. "
        f"How much money does {p.he} have after {weeks} {unit}s?"
    )
    s = c.sub(w, spend, f"Each {unit} leaves")
    t = c.mul(s, weeks, f"{weeks} {unit}s give")
    return q, c.add(start, t, "With the start") if start else t


@template
def buy_and_return(d: Dice, c: Chain) -> tuple[str, int]:
    p, x = d.person(), d.good()
    a, u = d.n(4, 12), d.n(3, 30)
    r = d.n(1, a - 2)
    q = d.pick(
        f"{p} buys {a} {plural(x)} for ${u} each and later returns {r} of them. How much did {p.he} spend in the end?",
        f"After buying {a} {plural(x)} at ${u} each, {p} brings {r} back and gets the money for them. What did the others cost?",
    )
    s = c.sub(a, r, f"{p} keeps")
    return q, c.mul(s, u, "They cost")
