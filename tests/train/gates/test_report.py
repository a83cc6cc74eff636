"""What a report says: metrics by hand, baselines, thresholds for wishes, the plot, and gates calibrated anew."""

from __future__ import annotations

import errno
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from looped.gates.calibration import exit_depths
from looped.gates.dial import Curve
from looped.train.gates import output, teaching
from looped.train.gates.calibrate import Wanted, calibrate
from looped.train.gates.metrics import (
    area,
    auroc,
    brier,
    calibration_error,
    depth_curve,
    judge,
    random_exits,
    reliability,
    settled,
)
from looped.train.gates.observed import Held, Said
from looped.train.gates.options import Options
from looped.train.gates.plot import _look
from looped.train.gates.run import run
from looped.train.gates.saved_state import Keeper
from looped.train.gates.teaching import Features, Teaching
from looped.train.gates.token_table import TokenTable
from tests.train.gates.test_run import make_teacher

LOSSES = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
RIGHT = torch.tensor(
    [[False, False, True, True], [True, True, True, True], [True, False, True, True], [False, False, False, True]]
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def trained(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gates") / "out"
    options = Options(
        teacher=str(teacher), gate=("lookahead", "stage2"), output=out, device="cpu", tokens=3000, eval_tokens=1500
    )
    assert run(options) == 0
    return out


def report(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "report.json").read_text())[name]
    return loaded


def test_settled_is_the_first_depth_from_which_all_loops_agree() -> None:
    assert settled(RIGHT).tolist() == [3, 1, 3, 4]


def test_exits_are_judged_against_teacher_and_last_loop() -> None:
    depths, wanted = torch.tensor([1, 2, 4, 4]), torch.tensor([3, 2, 3, 4])
    exits = judge(depths, wanted, LOSSES, RIGHT)
    assert exits.agreement == 0.5
    assert exits.within_one == 0.75
    assert exits.ce == (4 + 3 + 1 + 1) / 4
    assert exits.ce_regret == pytest.approx(exits.ce - (2 + 3 + 2 + 1) / 4)
    assert exits.same_token == 0.75 and exits.underthinking == 0.25
    assert exits.overthinking == 0.5  # 2 > 1 and 4 > 3


def test_random_exits_are_what_a_shuffle_gives_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randint(1, 5, (300,), generator=generator)
    losses = torch.rand(300, 4, generator=generator)
    right = torch.rand(300, 4, generator=generator) < 0.7
    right[:, -1] = True
    expected = random_exits(wanted, losses, right)
    drawn = [judge(wanted[torch.randperm(300, generator=generator)], wanted, losses, right) for _ in range(200)]
    for name in ("agreement", "within_one", "mean_depth", "ce", "same_token", "overthinking", "kappa"):
        mean = sum(getattr(each, name) for each in drawn) / len(drawn)
        assert mean == pytest.approx(getattr(expected, name), abs=0.01)


def test_auroc_is_the_chance_to_rank_a_pair_right() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (60,), generator=generator).double()
    labels = torch.rand(60, generator=generator) < 0.4
    pairs = scores[labels][:, None] - scores[~labels][None]
    expected = float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())
    assert auroc(scores, labels) == pytest.approx(expected)
    assert auroc(scores, torch.ones_like(labels)) is None


def test_calibration_error_and_brier() -> None:
    predicted, found = torch.tensor([[0.11, 0.19], [0.85, 0.85]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    bins = reliability(predicted, found)
    assert [(round(b.predicted, 3), b.found, b.share) for b in bins] == [(0.15, 0.5, 0.5), (0.85, 0.5, 0.5)]
    assert calibration_error(bins) == pytest.approx(0.35)
    weighted = reliability(predicted, found, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert calibration_error(weighted) == pytest.approx(0.11 / 3 + 0.35 * 2 / 3)
    curve = Curve(torch.tensor([[0.5, 1.0]]).double(), 2)
    assert brier(curve, torch.tensor([3])) == pytest.approx(0.125)  # left by 2: 0; by 3: 1


def test_points_by_depth_and_their_area() -> None:
    generator = torch.Generator().manual_seed(0)
    curve = Curve(torch.rand(500, 3, generator=generator).double().cummax(-1).values, 1)
    right = torch.ones(500, 4, dtype=torch.bool)
    points = depth_curve(curve, torch.zeros(500, 4), right)
    assert area(points, 4) == pytest.approx(1.0)
    means = [point.mean_depth for point in points]
    assert means == sorted(means) and means[0] == 1 and means[-1] == 4
    right[:, 0] = False
    worse = depth_curve(curve, torch.zeros(500, 4), right)
    assert worse[0].same_token == 0 and 0.3 < area(worse, 4) < 0.9


def held(curve: Curve, right: torch.Tensor, document: torch.Tensor) -> Held:
    num, loops = right.shape
    firsts = torch.where(right, 0, 1)
    losses = torch.where(right, 0.0, 0.4)
    said = Said(curve, None)
    zero = torch.zeros(num, dtype=torch.long)
    return Held(1, said, {}, losses, firsts, torch.ones(num, loops), zero, zero + loops, document)


@pytest.mark.parametrize("below", [False, True])
def test_a_bound_holds_on_fresh_positions(below: bool) -> None:
    """Exits that are wrong where the gate is unsure: the threshold found keeps the bound on positions it never saw,
    and a laxer one would not."""
    generator = torch.Generator().manual_seed(1)

    def positions(num: int) -> Held:
        sure = torch.rand(num, generator=generator, dtype=torch.float64)
        right = torch.rand(num, 2, generator=generator, dtype=torch.float64) < sure[:, None]
        right[:, -1] = True
        value = (1 - sure if below else sure)[:, None]
        return held(Curve(value, 1, below), right, torch.arange(num) // 2)

    first, fresh = positions(4000), positions(4000)
    (found,) = calibrate(first.teacher.curve, first, Wanted(bounds=(0.1,)))
    assert found["shown"] and found["units"] == 2000 and found["unit"] == "document"

    def lost(threshold: float) -> float:
        at = exit_depths(fresh.teacher.curve, threshold)[:, None] - 1
        return float((~fresh.right.gather(1, at)).double().mean())

    assert 0.05 < lost(found["threshold"]) <= 0.1
    laxer = found["threshold"] * 2 if below else found["threshold"] / 2
    assert lost(laxer) > 0.1
    (in_nats,) = calibrate(first.teacher.curve, first, Wanted(bounds=(0.1,), lost="ce"))
    assert in_nats["mean_depth"] < found["mean_depth"]  # 0.4 nats a wrong token
    (none,) = calibrate(first.teacher.curve, first, Wanted(bounds=(0.0005,)))
    assert not none["shown"] and none["mean_depth"] == 2 and none["lost"] == 0


def test_a_table_of_tokens_knows_the_mean_of_each() -> None:
    table = TokenTable()
    assert table.curve(torch.tensor([1]), 1) is None
    tokens = torch.tensor([1, 7]).repeat(500)
    table.add(tokens, Curve(torch.tensor([[0.1, 0.2, 0.9], [0.7, 0.8, 0.9]]).repeat(500, 1), 1))
    curve = table.curve(torch.tensor([1, 7, 3, 99]), 2)
    assert curve is not None and curve.min_depth == 2
    assert curve.cumulative[0].tolist() == pytest.approx([0.2, 0.9], abs=0.01)
    assert curve.cumulative[1].tolist() == pytest.approx([0.8, 0.9], abs=0.01)
    for unseen in (2, 3):
        assert curve.cumulative[unseen].tolist() == pytest.approx([0.5, 0.9], abs=0.01)


def test_reports_have_every_metric_and_baseline(trained: Path) -> None:
    for name in ("lookahead", "stage2"):
        found = report(trained, name)
        assert set(found["baselines"]) == {
            "constant depth", "previous token's depth", "per-token table", "hidden-state change", "random exits",
            "linear on embedding",
        }  # fmt: skip
        mean = found["teacher_mean_depth"]
        for baseline in ("per-token table", "hidden-state change", "random exits", "linear on embedding"):
            assert found["baselines"][baseline]["mean_depth"] == pytest.approx(mean, abs=0.12)
        total = sum(map(sum, found["confusion"]))
        assert total == found["positions"]
        right = sum(found["confusion"][d][d] for d in range(4))
        assert right / total == pytest.approx(found["agreement"], abs=1e-5)
        assert set(found["auroc"]) == {"2", "3"}
        assert found["prompt"]["positions"] > 0
    lookahead = report(trained, "lookahead")
    assert lookahead["agreement"] > max(exits["agreement"] for exits in lookahead["baselines"].values())
    assert lookahead["ece_teacher"] < report(trained, "stage2")["ece_teacher"]
    assert lookahead["kl"] < report(trained, "stage2")["kl"]
    assert 0 <= lookahead["ece_oracle"] <= 1 and 0 <= lookahead["brier"] < 0.2


def test_the_plot_is_an_image_of_both_gates(trained: Path) -> None:
    root = ElementTree.parse(trained / "report.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"lookahead", "stage2", "teacher", "mean depth by threshold"} <= set(texts)
    drawn = [node for node in root.iter("{http://www.w3.org/2000/svg}path")]
    assert len(drawn) >= 8
    assert len({_look(index) for index in range(16)}) == 16


def test_a_gate_is_calibrated_anew(cli: Any, trained: Path, teacher: Path) -> None:
    folder = trained / "lookahead"
    before = json.loads((folder / "gate.json").read_text())
    heads = (folder / "gate.safetensors").read_bytes()
    words = ("train-gate", "--calibrate", folder, "--teacher", teacher, "--device", "cpu", "--eval-tokens", 1200)
    done = cli(*words, "--mean-depths", "2.3,3", "--threshold-from", "mean-depth", "--seed", 4, "--json")
    assert done.code == 0, done
    after = json.loads((folder / "gate.json").read_text())
    assert [entry["wanted"] for entry in after["calibration"]] == [2.3, 3.0]
    assert after["threshold"] == after["calibration"][0]["threshold"] != before["threshold"]
    assert after["calibration"][0]["mean_depth"] == pytest.approx(2.3, abs=0.1)
    assert (folder / "gate.safetensors").read_bytes() == heads
    assert json.loads(done.out.splitlines()[-1])["output"] == str(folder)
    assert "leave --output" in cli(*words, "--output", trained / "other").refusal
    assert "is not a gate checkpoint" in cli("train-gate", "--calibrate", teacher, "--teacher", teacher).refusal


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-lost", "1.5"), "--max-lost must be between 0 and 1"),
        (("--mean-depths", "0.5"), "--mean-depths must be between 1"),
        (("--mean-depths", "7"), "--mean-depths must be between 1 and the model's loops"),
        (("--confidence", "1"), "--confidence must be between 0 and 1"),
        (("--threshold-from", "max-lost"), "needs --max-lost"),
        (("--clip", "0"), "--clip must be above 0"),
        (("--final-lr", "2"), "a share of the peak"),
        (("--pack", "on", "--kv", "shared"), "takes documents token by token"),
    ],
)
def test_mistakes_are_refused(cli: Any, teacher: Path, tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    out = tmp_path / "out"
    done = cli("train-gate", "--teacher", teacher, "--output", out, "--device", "cpu", *words)
    assert sentence in done.refusal
    assert not out.exists()


def ended(done: Any) -> str:
    """The sentence behind the progress of a command that ends with code 2."""
    assert done.code == 2, done
    sentence: str = done.err.splitlines()[-1]
    assert sentence.startswith("looped: error: ") and "Traceback" not in done.err
    return sentence


LONG = ("--tokens", 3000, "--eval-tokens", 300, "--batch-tokens", 500, "--device", "cpu", "--save-minutes", 1e-6)


def test_a_loss_that_is_not_finite_keeps_the_state_before(
    cli: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with step and batch; what was learnt before goes on with --resume to the gate of an undisturbed run."""
    monkeypatch.setattr(teaching, "_CACHE_BYTES", 0)
    words = ("train-gate", "--teacher", teacher, *LONG, "--save-minutes", 100)
    assert cli(*words, "--output", tmp_path / "whole").code == 0
    features = Teaching.features

    def poisoned(self: Teaching, batch: Any, index: int) -> Features:
        made = features(self, batch, index)
        if index == 3:
            made.targets["hazards"][0] = torch.nan
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Teaching, "features", poisoned)
        done = cli(*words, "--output", tmp_path / "cut")
    assert "the loss of lookahead is nan at step 4, on batch 3" in ended(done)
    assert cli(*words, "--output", tmp_path / "cut", "--resume").code == 0
    heads = [(tmp_path / run / "gate.safetensors").read_bytes() for run in ("whole", "cut")]
    assert heads[0] == heads[1]


def test_resuming_with_another_recipe_lists_what_differs(
    cli: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teaching, "_CACHE_BYTES", 0)
    words = ("train-gate", "--teacher", teacher, *LONG, "--output", tmp_path / "cut")

    def stops(self: Keeper, trainer: Any) -> None:
        save(self, trainer)
        raise KeyboardInterrupt

    save = Keeper.save
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "save", stops)
        assert cli(*words).code == 130
    refusal = cli(*words, "--resume", "--lr", "0.5", "--gate", "hybrid,stage2").refusal
    assert "--lr 0.003, now 0.5" in refusal and "--gate lookahead, now hybrid,stage2" in refusal


def test_a_full_disk(cli: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, nothing half-written, and what was there before is as it was."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("train-gate", "--teacher", teacher, *LONG)
    out = tmp_path / "gate"
    assert cli(*words, "--output", out).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("looped.gates.checkpoint.save_file", full)
        assert "No space left on device" in ended(cli(*words, "--output", out, "--overwrite"))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["gate"]
    monkeypatch.setattr(teaching, "_CACHE_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr("looped.train.gates.saved_state.save_file", full)
        assert "cannot write" in ended(cli(*words, "--output", tmp_path / "long"))
    with monkeypatch.context() as patch:
        patch.setattr(output, "write_text", full)
        assert "No space left" in ended(cli(*words, "--output", tmp_path / "other"))
