"""Progress: a bar on a terminal, lines elsewhere; the last line of JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from looped.progress import Progress, clock, last_json, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress((), 25, "train", stream=stream) as bar:
        for step in range(25):
            bar.advance(note=f"loss {step}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 9  # every 3 steps, and the last one
    assert lines[0].startswith("train 3/25 12% ") and lines[0].endswith(", loss 2")
    assert lines[-1].startswith("train 25/25 100% ")


def test_every_and_large_steps() -> None:
    stream = io.StringIO()
    with Progress((), 10, "x", every=4, stream=stream) as bar:
        bar.advance(9)
        bar.advance()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["9/10", "10/10"]


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looped.progress.REDRAW_SECONDS", 0.0)
    stream = Terminal()
    assert list(Progress("abcd", 4, "score", stream=stream)) == list("abcd")
    frames = stream.getvalue().split("\r")
    assert len(frames) == 6  # nothing, four steps, the end
    assert "█" * 10 + "░" * 10 + " 2/4 50%" in frames[2]
    assert frames[-1].endswith("\n") and "4/4 100%" in frames[-1]


def test_iterables_of_known_and_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress([1, 2], "a")) == [1, 2]
    assert list(progress(iter(range(150)), "b")) == list(range(150))
    captured = capsys.readouterr()
    assert captured.out == ""
    heads = [" ".join(line.split()[:2]) for line in captured.err.splitlines()]
    assert heads == ["a 1/2", "a 2/2", "b 100", "b 150"]


def test_an_error_in_the_loop_passes_and_leaves_the_state() -> None:
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress((), 100, "x", stream=stream) as bar:
        bar.advance(7)
        raise ZeroDivisionError
    assert stream.getvalue().startswith("x 7/100 7% ")


def test_clock() -> None:
    assert [clock(seconds) for seconds in (7, 750.2, 3723)] == ["0:07", "12:30", "1:02:03"]


class Pair(NamedTuple):
    left: float
    right: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    pair: Pair
    path: Path


def test_last_json_is_one_strict_line(capsys: pytest.CaptureFixture[str]) -> None:
    numpy = pytest.importorskip("numpy")
    last_json({"a": Result(Pair(math.inf, (1, 2)), Path("x/y")), 3: numpy.float32("nan"), "z": numpy.arange(2)})
    line = capsys.readouterr().out
    assert line.endswith("\n") and line.count("\n") == 1
    assert json.loads(line) == {"a": {"pair": {"left": None, "right": [1, 2]}, "path": "x/y"}, "3": None, "z": [0, 1]}
