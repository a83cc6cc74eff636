"""The vocabulary of the templates, and the dice that draw from it."""

from __future__ import annotations

import random
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Person(NamedTuple):
    name: str
    he: str
    his: str

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return self.name


_SHE = (
    "Anna Maria Emma Olivia Sofia Mia Lily Grace Nora Julia Sara Tina Rosa Alice Clara Diana Elena Fatima Hana Ines "
    "Jane Kate Laura Mei Nina Priya Ruth Wendy Yara Zoe Betty Carla Dora Eva"
).split()
_HE = (
    "Tom Ben Sam Jack Leo Max Omar Paul Carlos David Eric Felix George Henry Ivan James Kevin Liam Mark Noah Oscar "
    "Peter Raj Steve Tim Victor Will Adam Bob Chen Dan Ali Hugo Luis"
).split()
PEOPLE = tuple([Person(n, "she", "her") for n in _SHE] + [Person(n, "he", "his") for n in _HE])

THINGS = (
    "apples oranges marbles stickers books pencils pens cards coins shells stamps balloons cookies cupcakes candies "
    "eggs toys beads buttons bottles erasers notebooks flowers peaches lemons muffins crayons rocks "
    "plums pears grapes nuts"
).split()
GOODS = (
    "book pen shirt hat cup plate toy lamp notebook ball puzzle cap mug scarf poster plant bag basket towel candle "
    "bowl brush kite doll clock"
).split()
FOODS = "sandwich muffin pie cake bagel burger salad soup pizza donut cookie juice coffee tea taco".split()
CROPS = "tomatoes carrots onions potatoes melons pumpkins beans peppers cabbages beets".split()
ANIMALS = "cows sheep goats chickens ducks horses pigs rabbits geese turkeys".split()
CONTAINERS = "box bag basket jar crate tray drawer shelf".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 10: "a tenth"}


def plural(noun: str) -> str:
    """English plural of the nouns above."""
    if noun.endswith(("s", "sh", "ch", "x")):
        return noun + "es"
    if noun.endswith("f"):
        return noun[:-1] + "ves"
    return noun + "s"


class Dice:
    """Draws people, words and numbers from one seeded stream."""

    __slots__ = ("choice", "random", "sample")

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.choice = self.random.choice
        self.sample = self.random.sample

    def n(self, low: int, high: int) -> int:
        """An integer in low..high, both included."""
        return low + int(self.random.random() * (high - low + 1))

    def pick(self, *options: Value) -> Value:
        return options[int(self.random.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def person(self) -> Person:
        return self.choice(PEOPLE)

    def people(self, count: int) -> list[Person]:
        return self.sample(PEOPLE, count)

    def thing(self) -> str:
        return self.choice(THINGS)

    def good(self) -> str:
        return self.choice(GOODS)

    def goods(self, count: int) -> list[str]:
        return self.sample(GOODS, count)

    def food(self) -> str:
        return self.choice(FOODS)

    def foods(self, count: int) -> list[str]:
        return self.sample(FOODS, count)
