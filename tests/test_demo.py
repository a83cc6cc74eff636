"""`looped demo`: once from end to end on a micro model; the output folder in all its cases; failing steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import looped.demo as demo
from looped.analysis import asking, scoring, steps
from looped.model import save
from tests.analysis.results import made_up
from tests.conftest import Ran
from tests.models import micro_huginn, micro_ouro
from tests.server.conftest import write_tokenizer


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro Ouro over bytes whose context holds a word problem."""
    folder = tmp_path_factory.mktemp("demo") / "micro"
    save(micro_ouro(vocab_size=259, max_positions=1024, exit_threshold=0.6), folder, "float32")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step gives made-up results at once."""
    results = made_up()
    monkeypatch.setattr(demo, "load", lambda name: micro_ouro())
    monkeypatch.setattr(steps, "distil", lambda model, name, folder, effort: results.gates)
    monkeypatch.setattr(scoring, "grid", lambda *args: [])
    monkeypatch.setattr(scoring, "own_layout", lambda *args: [])
    monkeypatch.setattr(scoring, "score", lambda *args: results.scores)
    monkeypatch.setattr(steps, "bench", lambda *args: results.bench)
    monkeypatch.setattr(asking, "ask", lambda *args: results.answers)


def test_end_to_end(cli: Callable[..., Ran], speaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = steps.Effort(600, 4, 200, 2, 60.0, 2, 60.0, False, 3, 4, 1, 25.0, 1)
    monkeypatch.setattr(steps, "QUICK", small)
    ran = cli("demo", "--model", speaking, "--output", tmp_path / "out", "--quick")
    assert ran.code == 0, ran.err
    assert [line for line in ran.err.splitlines() if line.startswith("step ")] == [
        "step 1/5: gates",
        "step 2/5: scores",
        "step 3/5: bench",
        "step 4/5: server",
        "step 5/5: report",
    ]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [gate["gate"] for gate in found["gates"]] == ["lookahead", "pre-loop"]
    assert (tmp_path / "out" / "gates" / "pre-loop" / "gate.json").is_file()
    assert {row["layout"] for row in found["scores"]["rows"]} == {"ragged", "shared"}
    assert {row["gate"] for row in found["scores"]["rows"]} == {"fixed depth", "native", "lookahead", "pre-loop"}
    assert all(row["n"] == 2 for row in found["scores"]["rows"] + found["drills"]["rows"])
    assert list(found["bench"]["modes"]) == ["cb", "no-refill", "refill"]
    pieces = found["answers"][0]["pieces"]
    assert pieces[0]["depth"] == 4
    assert {piece["depth"] for piece in pieces} <= {1, 2, 3, 4}
    assert "| measured" in ran.out
    assert "</html>" in (tmp_path / "out" / "report.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_it_replaces_its_own_folder(cli: Callable[..., Ran], tmp_path: Path, faked: None) -> None:
    out = tmp_path / "out"
    out.mkdir()  # empty: may be taken
    assert cli("demo", "--output", out).code == 0
    (out / "old.txt").write_text("of the last run")
    assert cli("demo", "--output", out).code == 0
    assert sorted(path.name for path in out.iterdir()) == [demo.MARKER, "report.html", "results.json"]


def test_it_refuses_what_it_did_not_make(cli: Callable[..., Ran], tmp_path: Path, faked: None) -> None:
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("years of work")
    assert "no demo made" in cli("demo", "--output", foreign).refusal
    assert (foreign / "chapter.txt").read_text() == "years of work"
    assert "is no folder" in cli("demo", "--output", foreign / "chapter.txt").refusal
    (tmp_path / "link").symlink_to(foreign)
    assert "is no folder" in cli("demo", "--output", tmp_path / "link").refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "thesis"]


def test_a_folder_that_fills_up_meanwhile_is_kept(
    cli: Callable[..., Ran], tmp_path: Path, faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*args: object) -> object:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return made_up().bench

    monkeypatch.setattr(steps, "bench", meanwhile)
    ran = cli("demo", "--output", tmp_path / "out")
    assert ran.code == 2
    assert "no demo made" in ran.err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_failing_step_is_named_and_leaves_nothing(
    cli: Callable[..., Ran],
    tmp_path: Path,
    faked: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*args: object) -> object:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(asking, "ask", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        cli("demo", "--output", tmp_path / "out")
    assert "demo step 4, server, failed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", [False, True])
def test_an_interrupted_demo_leaves_what_was_there(
    cli: Callable[..., Ran], tmp_path: Path, faked: None, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    out = tmp_path / "out"
    if old:
        assert cli("demo", "--output", out).code == 0
        (out / "report.html").write_text("the last run's")

    def interrupted(*args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "bench", interrupted)
    assert cli("demo", "--output", out).code == 130
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if old else [])
    if old:
        assert (out / "report.html").read_text() == "the last run's"


def test_models_that_it_cannot_show(cli: Callable[..., Ran], tmp_path: Path) -> None:
    save(micro_ouro(), tmp_path / "mute", "float32")
    assert "needs a tokenizer" in cli("demo", "--model", tmp_path / "mute", "--output", tmp_path / "out").refusal
    save(micro_huginn(), tmp_path / "gateless", "float32")
    assert "exit gate of its own" in cli("demo", "--model", tmp_path / "gateless", "--output", tmp_path / "o").refusal
    assert "at least 2" in cli("demo", "--num-problems", "1", "--output", tmp_path / "o").refusal
    assert not (tmp_path / "out").exists()


def test_the_grid_scores_every_gate_and_layout(tmp_path: Path, speaking: Path) -> None:
    from looped.model import load

    model = load(speaking)
    cells = scoring.grid(model, made_up().gates, tmp_path, full=True)
    policies = [cell.setting for cell in cells]
    assert len(set(policies)) == len(policies)
    assert {cell.setting.kv for cell in cells} == {"ragged", "last-exited", "shared", "first-shared", "depth"}
    assert {cell.gate for cell in cells} == {"fixed depth", "native", "lookahead", "convergence"}
    own = [cell.setting.depth for cell in cells if cell.setting.kv == "ragged" and cell.gate == "fixed depth"]
    assert own == [1, 2, 3, 4]
    assert len([cell for cell in cells if cell.setting.kv == "ragged" and cell.gate == "native"]) == 3


def test_time_leaves_settings_out_and_says_so(speaking: Path) -> None:
    from looped.eval import Setting
    from looped.model import load

    cells = [scoring.Cell("native", Setting("ragged", "ouro", q)) for q in (0.3, 0.6)]
    scores = scoring.score(load(speaking), cells, steps.DRILLS, 2, seconds=0.0)
    assert (len(scores.rows), scores.left_out, scores.n) == (1, 1, 2)
