"""`looped train-gate --gate hybrid`: both parts learn their hazards, and the checkpoint says what it decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looped.decode import generate
from looped.gates import HybridGate, get_gate
from looped.gates.calibration import GRID
from looped.gates.card import GateCard
from looped.gates.checkpoint import save_gate
from looped.kv import get_layout
from looped.model import load
from looped.options import parse
from looped.train.gates.batches import Document, batches, padded
from looped.train.gates.documents import Corpus
from looped.train.gates.leaving import ExitPolicy
from looped.train.gates.options import Options, check
from looped.train.gates.run import run
from looped.train.gates.spec import parse_specs
from looped.train.gates.students import HybridStudent, new_students
from looped.train.gates.teaching import Deployment, Plan, Teaching
from looped.train.gates.walk import walk
from tests.train.gates.test_run import make_teacher

QUICK = ("--tokens", 2000, "--eval-tokens", 800, "--device", "cpu", "--seed", 1)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def trained(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gates") / "out"
    options = Options(teacher=str(teacher), gate=("hybrid",), output=out, device="cpu", tokens=10000, eval_tokens=4000)
    assert run(options) == 0
    return out


def test_it_agrees_with_the_unfolded_teacher(trained: Path, teacher: Path) -> None:
    card = json.loads((trained / "gate.json").read_text())
    assert (card["kind"], card["min_depth"], card["latency"]) == ("hybrid", 1, 1)
    assert (card["layout"], card["prefill"]) == ("ragged", "dense")
    metrics = card["metrics"]
    assert metrics["agreement"] == metrics["raw_agreement"], "min_depth is 1: nothing is folded"
    assert (
        metrics["agreement"]
        > max(
            metrics["baselines"]["constant depth"]["agreement"],
            metrics["baselines"]["previous token's depth"]["agreement"],
        )
        + 0.1
    )
    assert metrics["mean_depth"] == pytest.approx(metrics["teacher_mean_depth"], abs=0.01)
    assert metrics["deployed_mean_depth"] == pytest.approx(metrics["mean_depth"], abs=0.15)
    rows = card["thresholds"]
    assert [row["threshold"] for row in rows] == [*GRID]
    assert [row["mean_depth"] for row in rows] == sorted(row["mean_depth"] for row in rows)
    for row in rows:
        assert row["matched_mean_depth"] == pytest.approx(row["teacher_mean_depth"], abs=0.02)
    gate = get_gate(trained, load(teacher, device="cpu"))
    assert isinstance(gate, HybridGate) and gate.threshold == card["threshold"]
    tensors = load_file(trained / "gate.safetensors")
    assert tensors["pre-loop.weight"].shape == (1, 67) and tensors["lookahead.weight"].shape == (2, 32)


def test_scored_exits_are_those_of_the_decoder(trained: Path, teacher: Path) -> None:
    """Teacher-forced with its own tokens, its exits in the evaluation are those it takes when it generates."""
    model = load(teacher, device="cpu", dtype="float64")
    gate = get_gate(trained, model)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("Q: Tom has 3 pens and buys 4 more. How many pens?\nA:")
    done = generate(model, prompt, gate=gate, temperature=1.0, seed=1, ignore_eos=True, max_new_tokens=24)
    assert {1, 2, 3} <= set(done.depths[1:])
    batch = padded([Document(prompt + done.token_ids, len(prompt))])
    policy = ExitPolicy(get_layout("ragged"), False, gate, torch.tensor([gate.threshold]), torch.tensor([1]))
    assert walk(model, batch, policy).depths[batch.decode].tolist() == done.depths[1:]


def test_a_saved_gate_predicts_what_its_student_did(teacher: Path, tmp_path: Path) -> None:
    """Both parts, standardisation folded in, hidden layers included, through a checkpoint and back."""
    model = load(teacher, device="cpu", dtype="float64")
    student = new_students(parse_specs(("hybrid",), hidden=5), model)[0]
    assert isinstance(student, HybridStudent)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = 3 + 2 * torch.randn(40, 67 + 2 * 32, generator=generator)
    blocks = {"embedding": inputs[:, :32], "state": inputs[:, 32:64], "z1": inputs[:, 67:99], "z2": inputs[:, 99:]}
    blocks |= {name: inputs[:, 64 + i] for i, name in enumerate(("entropy", "surprisal", "depth"))}
    student.prepare(blocks, torch.rand(40, 3, generator=generator))
    student.eval()
    for part in student.parts:
        part.linear = False
    expected = torch.sigmoid(student(blocks)).double()
    save_gate(
        student.gate(model),
        GateCard("hybrid", model.name, model.revision, 32, 4, 1, 1, "ragged", "dense", 0.5),
        tmp_path,
    )
    gate = get_gate(tmp_path, model)
    assert isinstance(gate, HybridGate)
    before, states = inputs[:, :67].double(), inputs[:, 67:].double().view(40, 2, 32)
    steps = [gate.lookahead.hazard(states[:, r], torch.full((40,), r + 1)) for r in range(2)]
    found = torch.stack([gate.pre_loop.hazards(before)[:, 0], *steps], -1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_its_contexts_leave_at_every_depth(teacher: Path) -> None:
    model = load(teacher, device="cpu")
    students = new_students(parse_specs(("hybrid",)), model)
    teaching = Teaching(model, students, Deployment.of(model, get_layout("ragged")), Plan(batch_tokens=2000))
    batch = next(batches(Corpus("embedded", model, 0, 256).training(), 2000))
    features = teaching.features(batch, 0)
    assert set(features.blocks) == {"embedding", "state", "entropy", "surprisal", "depth", "z1", "z2"}
    assert set(features.blocks["depth"].tolist()) == {1.0, 2.0, 3.0, 4.0}  # of the token before


def test_the_verb(cli, teacher: Path, tmp_path: Path) -> None:
    """Beside another gate, with a hidden layer."""
    words = ("train-gate", "--teacher", teacher, "--output", tmp_path / "out", *QUICK)
    done = cli(*words, "--gate", "lookahead,hybrid", "--hidden", 4, "--optimizer", "adamw", "--steps", 40, "--json")
    assert done.code == 0, done
    assert list(json.loads(done.out.splitlines()[-1])["gates"]) == ["lookahead", "hybrid"]
    tensors = load_file(tmp_path / "out" / "hybrid" / "gate.safetensors")
    assert tensors["pre-loop.hidden.weight"].shape == (1, 4, 67)
    assert tensors["lookahead.hidden.weight"].shape == (2, 4, 32)
    assert min(float(tensors[f"{part}.hidden.out"].abs().max()) for part in ("pre-loop", "lookahead")) > 0


def test_mistakes(cli, teacher: Path, tmp_path: Path) -> None:
    def refusal(folder: Path, *words: str) -> str:
        return cli("train-gate", "--teacher", folder, "--output", tmp_path / "out", "--device", "cpu", *words).refusal

    assert "the hybrid gate needs the token before" in refusal(teacher, "--gate", "hybrid", "--prefill", "ragged")
    assert "did you mean 'hybrid'" in refusal(teacher, "--gate", "hibrid")
    assert "a hybrid gate needs 3" in refusal(make_teacher(tmp_path / "short", max_loops=2), "--gate", "hybrid")
    assert not (tmp_path / "out").exists()
    assert [spec.kind for spec in parse_specs(("all",))] == ["lookahead", "pre-loop"]


def test_the_recipe_is_valid() -> None:
    options = parse(Options, ["--config", "recipes/gate-tiny-ouro-hybrid.yaml"], "looped train-gate")
    check(options)
    assert options.gate == ("hybrid",)
