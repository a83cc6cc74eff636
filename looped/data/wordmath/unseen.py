"""Templates held out of training: their accuracy tells how far the skill carries to new wordings and plots."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import unseen
from looped.data.wordmath.words import Dice, plural


@unseen
def concert_tickets(d: Dice, c: Chain) -> tuple[str, int]:
    a, b, u, off = d.n(2, 9), d.n(2, 9), d.n(8, 30), d.n(2, 7)
    q = d.pick(
        f"Concert tickets cost ${u} for adults and ${off} less for children. What do {a} adults and {b} children pay together?",
        f"A family of {a} adults and {b} children visits a concert. Adults pay ${u}; children pay ${off} less. What is the total?",
    )
    x = c.mul(a, u, "The adults pay")
    child = c.sub(u, off, "A child pays")
    y = c.mul(b, child, "The children pay")
    return q, c.add(x, y, "Together")


@unseen
def plumber(d: Dice, c: Chain) -> tuple[str, int]:
    fee, rate, hours, parts = d.n(10, 60), d.n(10, 50), d.n(2, 6), d.n(5, 60)
    job = d.pick("plumber", "electrician", "gardener")
    q = f"A {job} charges ${fee} to come and ${rate} per hour, and used parts for ${parts}. What is the bill after {hours} hours?"
    s = c.mul(rate, hours, "The hours cost")
    t = c.add(s, fee, "With the visit")
    return q, c.add(t, parts, "With the parts")


@unseen
def library_fine(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    books, days, cents = d.n(2, 6), d.n(2, 9), d.pick(2, 3, 4, 5, 10)
    q = d.pick(
        f"The library fine is {cents} cents per book per day. {p} returns {books} books {days} days late. How many cents is the fine?",
        f"{p} kept {books} library books {days} days too long. Every day costs {cents} cents for each book. How many cents must {p.he} pay?",
    )
    s = c.mul(books, days, "The book days are")
    return q, c.mul(s, cents, "The fine is")


@unseen
def candles(d: Dice, c: Chain) -> tuple[str, int]:
    long, burn, hours, count = d.n(20, 60), d.n(1, 3), d.n(2, 9), d.n(2, 6)
    q = f"A candle is {long} cm long and burns {burn} cm an hour. {count} such candles burn for {hours} hours. How many cm of candle are left in total?"
    s = c.mul(burn, hours, "Each burns")
    t = c.sub(long, s, "Each has left")
    return q, c.mul(t, count, "In total")


@unseen
def stamp_album(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    pages, per, more = d.n(3, 12), d.n(4, 12), d.n(1, 30)
    have = d.n(2, pages * per - 1)
    q = f"An album has {pages} pages with space for {per} stamps each. {p} has {have} stamps and gets {more}. How many spaces stay empty?"
    s = c.mul(pages, per, "The spaces are")
    t = c.add(have, more, "The stamps are")
    return q, c.sub(s, t, "Empty are")


@unseen
def trains_meet(d: Dice, c: Chain) -> tuple[str, int]:
    a, b, hours = d.n(10, 60), d.n(10, 60), d.n(2, 6)
    q = d.pick(
        f"Two trains start at the same time from two towns and drive towards each other at {a} and {b} km per hour. They meet after {hours} hours. How far apart are the towns?",
        f"From one point two cyclists ride in opposite directions, one at {a} and one at {b} km per hour. How far apart are they after {hours} hours?",
    )
    s = c.add(a, b, "Together per hour")
    return q, c.mul(s, hours, f"In {hours} hours")


@unseen
def aquarium(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    tanks, fish, price, food = d.n(2, 6), d.n(3, 12), d.n(2, 6), d.n(5, 40)
    q = f"{p} sets up {tanks} tanks with {fish} fish in each. A fish costs ${price}, and the food for all costs ${food}. How much does {p.he} spend?"
    s = c.mul(tanks, fish, "The fish are")
    t = c.mul(s, price, "They cost")
    return q, c.add(t, food, "With the food")


@unseen
def pizza_slices(d: Dice, c: Chain) -> tuple[str, int]:
    pizzas, slices, people = d.n(2, 9), d.pick(6, 8, 10, 12), d.n(2, 9)
    each = d.n(1, max(1, pizzas * slices // people))
    q = f"{people} friends order {pizzas} pizzas, each cut in {slices} slices. Everyone eats {each} slices. How many slices are left?"
    s = c.mul(pizzas, slices, "The slices are")
    t = c.mul(people, each, "Eaten are")
    return q, c.sub(s, t, "Left are")


@unseen
def photos(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, b, k = d.n(10, 90), d.n(10, 90), d.n(5, 60)
    q = f"{p} takes {a} photos in the morning and {b} in the evening, deletes {k} blurry ones and sends half of the rest home. How many photos does {p.he} send?"
    s = c.add(a, b, f"{p} takes")
    t = c.sub(s, k, "The rest is")
    return q, c.div(t, 2, "Half is")


@unseen
def parking(d: Dice, c: Chain) -> tuple[str, int]:
    first, more, hours = d.n(2, 9), d.n(1, 6), d.n(3, 12)
    q = f"Parking costs ${first} for the first hour and ${more} for every further hour. What does it cost to park for {hours} hours?"
    s = c.sub(hours, 1, "Further hours are")
    t = c.mul(s, more, "They cost")
    return q, c.add(first, t, "In total")


@unseen
def bouquet(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    x, y = d.pick(("roses", "tulips"), ("lilies", "daisies"), ("tulips", "irises"))
    a, b, count = d.n(2, 9), d.n(2, 9), d.n(2, 12)
    q = f"{p} makes {count} bouquets. Each has {a} {x} and {b} {y}. How many flowers does {p.he} use?"
    s = c.add(a, b, "Each bouquet has")
    return q, c.mul(s, count, "In total")


@unseen
def refill(d: Dice, c: Chain) -> tuple[str, int]:
    x = d.good()
    start, sold, days, more = d.n(60, 200), d.n(2, 9), d.n(2, 9), d.n(10, 60)
    q = f"A store has {start} {plural(x)}. It sells {sold} a day for {days} days and then receives {more} new ones. How many {plural(x)} does it have?"
    s = c.mul(sold, days, "Sold are")
    t = c.sub(start, s, "Left are")
    return q, c.add(t, more, "With the new ones")
