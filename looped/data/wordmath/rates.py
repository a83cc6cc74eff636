"""Speeds, wages, machines and changes of unit."""
# ruff: noqa: E501 - a question reads best on one line, as the model sees it

from __future__ import annotations

from looped.data.wordmath.problem import Chain
from looped.data.wordmath.registry import template
from looped.data.wordmath.words import Dice

VEHICLES = ("car", "bus", "train", "truck", "boat")


@template
def distance(d: Dice, c: Chain) -> tuple[str, int]:
    v, speed, hours = d.pick(*VEHICLES), d.n(5, 90), d.n(2, 9)
    q = d.pick(
        f"A {v} travels at {speed} miles per hour for {hours} hours. How far does it go?",
        f"How many miles does a {v} cover in {hours} hours at {speed} miles an hour?",
        f"A {v} goes {speed} km each hour. How many km does it go in {hours} hours?",
    )
    return q, c.mul(speed, hours, "It goes")


@template
def two_legs(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, s, b, t = d.n(2, 6), d.n(5, 60), d.n(2, 6), d.n(5, 60)
    q = d.pick(
        f"{p} drives {a} hours at {s} miles per hour and then {b} hours at {t} miles per hour. How far does {p.he} drive?",
        f"For {a} hours {p} travels at {s} km per hour, then for {b} hours at {t} km per hour. How many km is that in all?",
    )
    x = c.mul(a, s, "First")
    y = c.mul(b, t, "Then")
    return q, c.add(x, y, "In all")


@template
def travel_time(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    speed, hours, stop = d.n(3, 12), d.n(2, 12), d.n(1, 5)
    q = d.pick(
        f"{p} bikes {speed * hours} miles at {speed} miles per hour and rests for {stop} hours. How many hours does the trip take?",
        f"A trip is {speed * hours} km. {p} goes {speed} km per hour and stops for {stop} hours on the way. How long is the trip in hours?",
    )
    t = c.div(speed * hours, speed, "Moving takes")
    return q, c.add(t, stop, "With the rest")


@template
def pages_left(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, days = d.n(5, 40), d.n(2, 9)
    pages = a * days + d.n(5, 200)
    q = d.pick(
        f"A book has {pages} pages. {p} reads {a} pages a day for {days} days. How many pages are left?",
        f"{p} reads {a} pages every day. After {days} days, how many of the {pages} pages of {p.his} book are left to read?",
    )
    s = c.mul(a, days, f"{p} reads")
    return q, c.sub(pages, s, "Left are")


@template
def days_to_finish(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, days, done = d.n(3, 12), d.n(2, 15), d.n(5, 80)
    work = d.pick("pages", "problems", "letters", "bricks", "words")
    q = d.pick(
        f"{p} has {a * days + done} {work} to do and has done {done}. {p.he.capitalize()} does {a} a day. How many more days are needed?",
        f"Of {a * days + done} {work}, {p} finished {done}. At {a} per day, in how many days will {p.he} finish the rest?",
    )
    s = c.sub(a * days + done, done, "Left are")
    return q, c.div(s, a, "The days are")


@template
def wage_week(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    wage, hours, days = d.n(6, 20), d.n(2, 9), d.n(2, 6)
    q = d.pick(
        f"{p} earns ${wage} an hour. {p.he.capitalize()} works {hours} hours a day for {days} days. How much does {p.he} earn?",
        f"Working {hours} hours a day at ${wage} per hour, how much does {p} make in {days} days?",
    )
    s = c.mul(hours, days, "The hours are")
    return q, c.mul(s, wage, f"{p} earns")


@template
def overtime(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    wage, extra, a, b = d.n(6, 20), d.n(2, 9), d.n(4, 12), d.n(2, 8)
    q = d.pick(
        f"{p} earns ${wage} per hour and ${extra} more per hour for overtime. {p.he.capitalize()} works {a} normal hours and {b} hours of overtime. How much does {p.he} earn?",
        f"A normal hour pays {p} ${wage}; an overtime hour pays ${extra} more. What does {p.he} get for {a} normal and {b} overtime hours?",
    )
    x = c.mul(a, wage, "Normal pay is")
    rate = c.add(wage, extra, "Overtime pays")
    y = c.mul(b, rate, "Overtime is")
    return q, c.add(x, y, "In total")


@template
def machine_output(d: Dice, c: Chain) -> tuple[str, int]:
    x = d.thing()
    rate, run, broken = d.n(3, 12), d.n(10, 60), d.n(2, 9)
    q = d.pick(
        f"A machine makes {rate} {x} per minute. In {run} minutes it stands still for {broken} minutes. How many {x} does it make?",
        f"A machine runs for {run} minutes but is off for {broken} of them. It makes {rate} {x} a minute. How many {x} are made?",
    )
    s = c.sub(run, broken, "It works")
    return q, c.mul(s, rate, "It makes")


@template
def two_workers(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, hours = d.n(2, 20), d.n(2, 20), d.n(2, 12)
    q = d.pick(
        f"{p} packs {a} {x} an hour and {w} packs {b} an hour. How many {x} do they pack together in {hours} hours?",
        f"In one hour {p} sorts {a} {x} and {w} sorts {b}. How many {x} do both sort in {hours} hours?",
    )
    s = c.add(a, b, "Together per hour")
    return q, c.mul(s, hours, f"In {hours} hours")


@template
def job_time(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    x = d.thing()
    a, b, hours = d.n(1, 6), d.n(1, 6), d.n(2, 15)
    q = d.pick(
        f"{p} paints {a} {x} an hour and {w} paints {b} an hour. How many hours do they need for {(a + b) * hours} {x}?",
        f"There are {(a + b) * hours} {x} to wash. Each hour {p} washes {a} and {w} washes {b}. How many hours does it take?",
    )
    s = c.add(a, b, "Together per hour")
    return q, c.div((a + b) * hours, s, "The hours are")


@template
def tank_fill(d: Dice, c: Chain) -> tuple[str, int]:
    out, net, minutes = d.n(1, 9), d.n(2, 12), d.n(2, 12)
    inflow = out + net
    q = d.pick(
        f"A pipe fills a tank with {inflow} liters a minute while {out} liters a minute leak out. How many minutes until it holds {net * minutes} liters?",
        f"Water runs into a tank at {inflow} liters per minute and out at {out} liters per minute. In how many minutes are there {net * minutes} liters?",
    )
    s = c.sub(inflow, out, "Each minute adds")
    return q, c.div(net * minutes, s, "The minutes are")


@template
def hours_to_minutes(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    h, m = d.n(1, 8), d.n(1, 59)
    q = d.pick(
        f"A film lasts {h} hours and {m} minutes. How many minutes is that?",
        f"{p} worked for {h} hours and {m} minutes. How many minutes did {p.he} work?",
        f"How many minutes are {h} hours and {m} minutes?",
    )
    s = c.mul(h, 60, "The hours are")
    return q, c.add(s, m, "In total")


@template
def minutes_daily(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    hours, days = d.n(1, 6), d.n(2, 12)
    per = 60 * hours // days
    if 60 * hours % days:
        per, days = 30, 2 * hours
    act = d.pick("practices piano", "runs", "reads", "draws", "swims")
    q = d.pick(
        f"{p} {act} {per} minutes a day. How many hours is that in {days} days?",
        f"Each day {p} {act} for {per} minutes. How many hours does {p.he} spend on it in {days} days?",
    )
    s = c.mul(per, days, "The minutes are")
    return q, c.div(s, 60, "The hours are")


@template
def weeks_and_days(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    w, k, a = d.n(1, 9), d.n(1, 6), d.n(2, 9)
    q = d.pick(
        f"{p} drinks {a} glasses of water a day. How many glasses does {p.he} drink in {w} weeks and {k} days?",
        f"A hen eats {a} spoons of corn a day. How many spoons does it eat in {w} weeks and {k} days?",
    )
    s = c.mul(w, 7, "The weeks have")
    t = c.add(s, k, "The days are")
    return q, c.mul(t, a, "In total")


@template
def dozens(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    a, used = d.n(2, 12), d.n(1, 20)
    thing = d.pick("eggs", "roses", "donuts", "rolls", "pencils")
    q = d.pick(
        f"{p} buys {a} dozen {thing} and uses {used}. How many {thing} are left?",
        f"There are {a} dozen {thing}. {p} takes {used} of them. How many remain?",
    )
    s = c.mul(a, 12, f"The {thing} are")
    return q, c.sub(s, used, "Left are")


@template
def feet_and_inches(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    f, i, cut = d.n(2, 12), d.n(1, 11), d.n(2, 20)
    q = d.pick(
        f"A board is {f} feet and {i} inches long. {p} cuts off {cut} inches. How many inches are left?",
        f"A rope of {f} feet and {i} inches is made {cut} inches shorter. How long is it in inches?",
    )
    s = c.mul(f, 12, "The feet are")
    t = c.add(s, i, "The length is")
    return q, c.sub(t, cut, "Left are")


@template
def coin_value(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    kinds = d.sample([("nickels", 5), ("dimes", 10), ("quarters", 25), ("pennies", 1)], 2)
    (x, u), (y, v) = kinds
    a, b = d.n(2, 12), d.n(2, 12)
    q = d.pick(
        f"{p} has {a} {x} and {b} {y}. How many cents does {p.he} have?",
        f"In a jar are {a} {x} and {b} {y}. How many cents is that?",
    )
    s = c.mul(a, u, f"The {x} are")
    t = c.mul(b, v, f"The {y} are")
    return q, c.add(s, t, "In total")


@template
def fuel_used(d: Dice, c: Chain) -> tuple[str, int]:
    p = d.person()
    per, liters, price = d.n(5, 12), d.n(2, 12), d.n(2, 6)
    q = d.pick(
        f"A car goes {per} km on a liter of fuel. A liter costs ${price}. What does the fuel for {per * liters} km cost?",
        f"{p} drives {per * liters} km. The car needs one liter for {per} km, and a liter costs ${price}. How much does the fuel cost?",
    )
    s = c.div(per * liters, per, "The liters are")
    return q, c.mul(s, price, "They cost")


@template
def catch_up(d: Dice, c: Chain) -> tuple[str, int]:
    p, w = d.people(2)
    slow, diff, hours = d.n(2, 30), d.n(2, 12), d.n(2, 9)
    q = d.pick(
        f"{p} is {diff * hours} km ahead of {w}. {p} goes {slow} km per hour and {w} goes {slow + diff} km per hour. After how many hours does {w} catch up?",
        f"{w} drives {slow + diff} miles per hour and follows {p}, who drives {slow} miles per hour and is {diff * hours} miles ahead. In how many hours does {w} reach {p}?",
    )
    s = c.sub(slow + diff, slow, "The gap shrinks by")
    return q, c.div(diff * hours, s, "The hours are")


@template
def round_trips(d: Dice, c: Chain) -> tuple[str, int]:
    p, place = d.person(), d.pick("school", "work", "the park", "the pool", "the library")
    km, days = d.n(2, 30), d.n(2, 12)
    q = d.pick(
        f"It is {km} km from home to {place}. {p} goes there and back on {days} days. How many km is that?",
        f"{p} lives {km} miles from {place} and goes there and back every day. How many miles is that in {days} days?",
    )
    s = c.mul(km, 2, "Each day is")
    return q, c.mul(s, days, "In total")
