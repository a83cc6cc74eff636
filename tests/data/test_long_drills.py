"""Long drills: answers worked out again from the text, steps beyond those of short drills, their share of a set."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from looped.data.build import build_dataset
from looped.data.long_drills import LONG_DRILLS, long_problems
from looped.data.mixture import DataConfig, Mix
from looped.data.packed import read_packed
from looped.data.packing import ANSWER_NUMBER, DIRECT
from looped.data.wordmath.problem import Problem, held_out
from looped.data.wordmath.words import Dice


def _variables(text: str) -> int:
    rules = dict(re.findall(r"([a-z]) = ([^,.?]+)", text.replace("Let ", "")))
    wanted = re.search(r"What is ([a-z])\?|([a-z]) = \?", text)
    assert wanted is not None

    def value(name: str) -> int:
        rule = rules[name].split()
        if len(rule) == 1:
            return int(rule[0])
        return value(rule[0]) + int(rule[2]) * (1 if rule[1] == "+" else -1)

    return value(wanted[1] or wanted[2])


def _cups(text: str) -> int:
    start, *swaps = re.findall(r"cup (\d) of|(\d) and (\d)", text)
    at = int(start[0])
    for _, x, y in swaps:
        at = {int(x): int(y), int(y): int(x)}.get(at, at)
    return at


def _times(text: str) -> int:
    first, *rest = re.findall(r"(?:right: |, )(?:(plus|times) )?(\d)", text)
    value = int(first[1])
    for word, number in rest:
        value = (value + int(number) if word == "plus" else value * int(number)) % 10
    return value


def _arrows(text: str) -> int:
    targets = {int(a): int(b) for a, b in re.findall(r"(\d) to (\d)", text)}
    steps = re.search(r"do (\d) steps from (\d) end", text)
    assert steps is not None
    at = int(steps[2])
    for _ in range(int(steps[1])):
        at = targets[at]
    return at


SOLVERS = {"variables_long": _variables, "cups_long": _cups, "times_long": _times, "arrows": _arrows}


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(itertools.islice(long_problems(Dice("test")), 400))


def test_answers_are_right_and_take_one_token(problems: list[Problem]) -> None:
    assert {problem.template for problem in problems} == SOLVERS.keys() == LONG_DRILLS.keys()
    for problem in problems:
        assert SOLVERS[problem.template](problem.question) == problem.answer, problem.question
        assert 0 <= problem.answer <= 9 and not problem.chain


def test_steps_begin_behind_those_of_the_short_drills(problems: list[Problem]) -> None:
    least = {"variables_long": 5, "cups_long": 6, "times_long": 6, "arrows": 2}
    for name, steps in least.items():
        assert min(problem.steps for problem in problems if problem.template == name) == steps


def test_training_and_evaluation_share_no_expression(problems: list[Problem]) -> None:
    assert not any(held_out(problem.key) for problem in problems)
    others = itertools.islice(long_problems(Dice("test"), evaluation=True), 50)
    assert all(held_out(problem.key) for problem in others)


def test_a_packed_set_has_their_share(tmp_path: Path) -> None:
    mix = Mix(words=0.5, drills=0.2, gsm8k=0.0, text=0.0, long=0.3)
    folder = build_dataset(
        DataConfig(str(tmp_path / "set"), 150_000, seq_len=512, workers=1, exemplar_share=0.0, mix=mix)
    )
    shares = json.loads((folder / "manifest.json").read_text())["token_share"]
    assert abs(shares["long"] - 0.3) < 0.03
    marks = read_packed(folder).mask
    assert marks is not None
    direct = (marks & (ANSWER_NUMBER | DIRECT)) == (ANSWER_NUMBER | DIRECT)
    plain = build_dataset(DataConfig(str(tmp_path / "plain"), 150_000, seq_len=512, workers=1, exemplar_share=0.0))
    without = read_packed(plain).mask
    assert without is not None
    assert direct.mean() > ((without & (ANSWER_NUMBER | DIRECT)) == (ANSWER_NUMBER | DIRECT)).mean()
