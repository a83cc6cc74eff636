"""The generator is right by independent arithmetic, and its two halves never meet."""

import itertools
import re

import pytest

from looped.data.drills import DRILLS, SINGLE_DIGIT, draw_drill, drill_problems
from looped.data.evalsets import EVAL_SETS, eval_file, eval_items, eval_problems
from looped.data.wordmath.generate import unseen_problems, word_problems
from looped.data.wordmath.problem import LARGEST, held_out
from looped.data.wordmath.registry import HELD_OUT, TRAINED, draw
from looped.data.wordmath.words import Dice
from looped.errors import LoopedError

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def check_chain(chain: str) -> list[int]:
    """Asserts that every written equation is true, and returns the results in order."""
    results = []
    for a, op, b, c in EQUATION.findall(chain):
        x, y = int(a), int(b)
        if op == "/":
            assert x % y == 0, chain
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else -1}[op]
        assert value == int(c), chain
        results.append(value)
    return results


@pytest.mark.parametrize("name", [*TRAINED, *HELD_OUT])
def test_every_template_computes_what_it_writes(name):
    dice = Dice(f"test/{name}")
    questions = set()
    for _ in range(100):
        problem = draw(name, (TRAINED | HELD_OUT)[name], dice)
        results = check_chain(problem.chain)
        assert len(results) == problem.steps >= 1
        assert results[-1] == problem.answer
        assert 0 <= problem.answer <= LARGEST
        assert "\n" not in problem.question
        assert problem.question.rstrip()[-1] in "?."
        assert "{" not in problem.question + problem.chain
        questions.add(problem.question)
    assert len(questions) > 60


def test_every_operand_comes_from_the_question_or_an_earlier_step():
    words = {"half": 2, "twice": 2, "double": 2, "third": 3, "quarter": 4, "fifth": 5, "tenth": 10, "dozen": 12}
    implied = {1, 2, 3, 4, 7, 10, 12, 25, 60, 5} | set(words.values())
    for problem in itertools.islice(word_problems(Dice(5)), 3000):
        known = {int(n) for n in re.findall(r"\d+", problem.question)} | implied
        for a, op, b, c in EQUATION.findall(problem.chain):
            fractions = {int(n) for n in re.findall(r"(\d+)%? is", problem.chain)}
            known |= fractions
            for operand in (int(a), int(b)):
                assert (
                    operand in known
                    or operand * 10 in known
                    or problem.template
                    in {
                        "range_of_scores",
                        "trips_needed",
                        "share_leftover",
                    }
                ), (problem, operand, op)
            known.add(int(c))


def test_size_of_the_template_table():
    assert len(TRAINED) >= 60
    assert len(HELD_OUT) >= 10
    assert not TRAINED.keys() & HELD_OUT.keys()


def test_steps_cover_one_to_six():
    steps = {p.steps for p in itertools.islice(word_problems(Dice(0)), 5000)}
    assert steps == {1, 2, 3, 4, 5, 6}


def sum_of_terms(text: str) -> int:
    total = 0
    for sign, digits in re.findall(r"([-+]?) ?(\d+)", text):
        total += -int(digits) if sign == "-" else int(digits)
    return total


def solve_variables(text: str) -> dict[str, int]:
    pending = [line.strip() for line in text.split(",")]
    known: dict[str, int] = {}
    while pending:
        line = pending.pop(0)
        name, _, right = line.partition(" = ")
        parts = right.split()
        if parts[0].isdigit():
            known[name] = int(parts[0])
        elif parts[0] in known:
            known[name] = known[parts[0]] + (int(parts[2]) if parts[1] == "+" else -int(parts[2]))
        else:
            pending.append(line)
    return known


def solve_drill(name: str, question: str) -> int:
    """Solves a drill from its question alone, by other means than the generator's."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    if name == "chain_small" or name == "chain_steps":
        return sum_of_terms(re.search(r"\d+( [-+] \d+)+", question)[0])
    if name == "chain_last_digit":
        return sum_of_terms(re.search(r"\d+( [-+] \d+)+", question)[0]) % 10
    if name == "chain_times":
        value, *rest = re.search(r"right: (.*?)\. What", question)[1].split(", ")
        result = int(value)
        for step in rest:
            word, n = step.split()
            result = result + int(n) if word == "plus" else result * int(n)
        return result % 10
    if name.startswith("variables"):
        body = re.sub(r"^(Step by step: |Let )", "", question)
        text, asked = re.match(r"(.*)\. (?:What is )?([a-z])(?: = )?\?", body).groups()
        return solve_variables(text)[asked]
    if name == "cups":
        cups = [0, 0, 0, 0]
        cups[numbers[0] - 1] = 1
        for x, y in re.findall(r"(\d) and (\d)", question):
            i, j = int(x) - 1, int(y) - 1
            cups[i], cups[j] = cups[j], cups[i]
        return cups.index(1) + 1
    if name == "parity":
        return question.partition(":")[2].count("1") % 2
    if name == "count_digit":
        return numbers[1:].count(numbers[0])
    if name == "remainder":
        return numbers[0] - numbers[1] * (numbers[0] // numbers[1])
    if name == "last_digit_product":
        return int(str(numbers[0] * numbers[1] + numbers[2])[-1])
    if name == "digit_max":
        return max(sum(numbers[:2]), sum(numbers[2:]))
    if name == "digit_sum_mod":
        return sum(int(x) for x in str(numbers[0])) % numbers[1]
    if name in ("add", "add_steps"):
        return sum(numbers)
    if name == "subtract":
        return numbers[0] - numbers[1]
    if name in ("multiply", "multiply_steps"):
        return numbers[0] * numbers[1]
    if name == "divide":
        return numbers[0] // numbers[1]
    if name == "percent":
        assert numbers[0] * numbers[1] % 100 == 0
        return numbers[0] * numbers[1] // 100
    if name == "larger":
        return max(numbers) if "larger" in question else min(numbers)
    if name == "ranked":
        ordered = sorted(numbers)
        place = {"second": 1, "third": 2}.get(question.split()[3])
        return ordered[place] if place else ordered[-1 if "largest" in question else 0]
    if name == "sort_digits":
        return int("".join(sorted(str(numbers[0]))))
    raise AssertionError(f"no independent solution for the drill {name}")


@pytest.mark.parametrize("name", list(DRILLS))
def test_every_drill_is_right(name):
    dice = Dice(f"test/{name}")
    for _ in range(200):
        problem = draw_drill(name, dice)
        assert solve_drill(name, problem.question) == problem.answer, problem
        results = check_chain(problem.chain)
        assert bool(results) == name.endswith("_steps")
        if results:
            assert results[-1] == problem.answer
        if name in SINGLE_DIGIT:
            assert 0 <= problem.answer <= 9


def test_most_drills_answer_with_one_digit():
    drills = list(itertools.islice(drill_problems(Dice(3)), 2000))
    assert sum(p.answer <= 9 and not p.chain for p in drills) > 0.5 * len(drills)


def test_training_and_evaluation_never_meet():
    training = {p.key for p in itertools.islice(word_problems(Dice(1)), 20000)}
    training |= {p.key for p in itertools.islice(drill_problems(Dice(1)), 20000)}
    for name in EVAL_SETS:
        problems = list(itertools.islice(eval_problems(name), 500))
        assert not training & {p.key for p in problems}
        if name == "heldout":
            assert {p.template for p in problems} == set(HELD_OUT)
        else:
            assert all(held_out(p.key) for p in problems)
    assert not any(held_out(key) for key in training)
    assert not {p.template for p in itertools.islice(word_problems(Dice(2)), 3000)} & set(HELD_OUT)


def test_a_drill_is_held_out_in_every_wording():
    """The same expression asked in two ways falls on the same side of the split."""
    sides: dict[str, set[bool]] = {}
    wordings: dict[str, set[str]] = {}
    for evaluation in (True, False):
        for p in itertools.islice(drill_problems(Dice(4), evaluation, ("percent",)), 4000):
            sides.setdefault(p.key, set()).add(evaluation)
            wordings.setdefault(p.key, set()).add(p.question)
    assert max(len(w) for w in wordings.values()) == 2
    assert all(len(s) == 1 for s in sides.values())


def test_same_seed_same_problems():
    for make in (word_problems, drill_problems, unseen_problems):
        first = list(itertools.islice(make(Dice("a")), 50))
        assert first == list(itertools.islice(make(Dice("a")), 50))
        assert first != list(itertools.islice(make(Dice("b")), 50))


@pytest.mark.parametrize("name", EVAL_SETS)
def test_committed_evaluation_files_are_what_the_generator_writes(name, repository):
    path = repository / "eval" / "wordmath" / f"{name}.jsonl"
    assert path.read_text(encoding="utf-8") == eval_file(name)
    items = eval_items(name)
    assert len(items) == 500 == len({item.question for item in items})


def test_unknown_evaluation_set_is_named():
    with pytest.raises(LoopedError, match="did you mean 'heldout'"):
        next(eval_problems("held-out"))
