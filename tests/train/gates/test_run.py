"""`looped train-gate`: a gate learns its teacher's exits, its checkpoint runs, mistakes end in one sentence."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from looped.config import ModelConfig
from looped.decode import generate
from looped.errors import LoopedError
from looped.files import shipped
from looped.gates import LookaheadGate, PreLoopGate, get_gate
from looped.gates.calibration import GRID
from looped.gates.card import GateCard
from looped.gates.checkpoint import save_gate
from looped.kv import get_layout
from looped.model import LoopedLM, load, save
from looped.model.loading import ASSETS, HUB_IDS
from looped.options import parse
from looped.train.gates import fit, teaching
from looped.train.gates.batches import Document, batches, padded
from looped.train.gates.documents import Corpus
from looped.train.gates.leaving import ExitPolicy
from looped.train.gates.options import Options, check
from looped.train.gates.run import run
from looped.train.gates.spec import parse_specs
from looped.train.gates.students import new_students
from looped.train.gates.teaching import Deployment, Features, Plan, Teaching
from looped.train.gates.walk import walk

QUICK = ("--tokens", 6000, "--eval-tokens", 3000, "--device", "cpu", "--seed", 1)


def make_teacher(folder: Path, max_loops: int = 4, seed: int = 0) -> Path:
    """A random Ouro with the shipped tokenizer, whose gate leaves at every depth."""
    torch.manual_seed(seed)
    config = ModelConfig(
        family="ouro",
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        num_prelude_layers=0,
        num_core_layers=1,
        num_coda_layers=0,
        max_loops=max_loops,
        trained_loops=max_loops,
        max_positions=256,
        rope_theta=10000.0,
        exit_gate=True,
        exit_threshold=0.5,
        eos_ids=(0,),
        pad_id=1,
    )
    model = LoopedLM(config)
    assert model.exit_gate is not None
    model.exit_gate.weight.normal_(0, 0.35)
    model.exit_gate.bias.fill_(0.1)
    save(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "tokenizer" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def trained(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both gates, trained once for all tests of this file."""
    out = tmp_path_factory.mktemp("gates") / "out"
    size = {"tokens": 12000, "eval_tokens": 5000}
    assert run(Options(teacher=str(teacher), gate=("all",), output=out, device="cpu", **size)) == 0
    return out


def card(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "gate.json").read_text())
    return loaded


def test_gates_agree_with_the_teacher_far_above_the_baselines(trained: Path) -> None:
    lookahead, pre_loop = (card(trained / kind)["metrics"] for kind in ("lookahead", "pre-loop"))
    assert lookahead["baselines"]["constant depth"]["agreement"] < 0.7, (
        "the teacher's exits must differ for this test to mean something"
    )
    assert (
        lookahead["agreement"]
        > max(
            lookahead["baselines"]["constant depth"]["agreement"],
            lookahead["baselines"]["previous token's depth"]["agreement"],
        )
        + 0.15
    )
    assert lookahead["agreement"] > 0.8
    assert lookahead["kappa"] > 0.75
    assert (
        pre_loop["agreement"]
        > max(
            pre_loop["baselines"]["constant depth"]["agreement"],
            pre_loop["baselines"]["previous token's depth"]["agreement"],
        )
        + 0.05
    )
    for metrics in (lookahead, pre_loop):
        assert metrics["mean_depth"] == pytest.approx(metrics["teacher_mean_depth"], abs=0.01)
        assert metrics["deployed_mean_depth"] == pytest.approx(metrics["mean_depth"], abs=0.15)


def test_the_checkpoint_says_what_it_is(trained: Path, teacher: Path) -> None:
    model = load(teacher, device="cpu")
    for kind, min_depth in (("lookahead", 2), ("pre-loop", 1)):
        stored = card(trained / kind)
        assert (stored["kind"], stored["min_depth"], stored["latency"]) == (kind, min_depth, 1)
        assert (stored["layout"], stored["prefill"]) == ("ragged", "dense")
        assert stored["teacher_revision"] == model.revision
        rows = stored["thresholds"]
        assert [row["threshold"] for row in rows] == [*GRID]
        depths = [row["mean_depth"] for row in rows]
        assert depths == sorted(depths)
        gate = get_gate(trained / kind, model)
        assert gate.threshold == stored["threshold"]
    assert load_file(trained / "lookahead" / "gate.safetensors")["weight"].shape == (2, 32)
    assert load_file(trained / "pre-loop" / "gate.safetensors")["weight"].shape == (3, 67)


@pytest.mark.parametrize("kind", ["lookahead", "pre-loop"])
@pytest.mark.parametrize("layout", ["ragged", "shared"])
def test_scored_exits_are_those_of_the_decoder(trained: Path, teacher: Path, kind: str, layout: str) -> None:
    """Teacher-forced with its own tokens, a gate's exits in the evaluation are those it takes when it generates."""
    model = load(teacher, device="cpu", dtype="float64")
    gate = get_gate(trained / kind, model)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for seed in range(3):
        prompt = tokenizer.encode(f"Q: Tom has {seed} pens and buys {seed + 3} more. How many pens?\nA:")
        sampled = {"temperature": 1.0, "seed": seed, "ignore_eos": True, "max_new_tokens": 20}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the .* gate was trained under layout ragged")
            done = generate(model, prompt, gate=gate, layout=layout, **sampled)
        assert len(set(done.depths[1:])) > 1
        assert min(done.depths[1:]) >= gate.min_depth
        batch = padded([Document(prompt + done.token_ids, len(prompt))])
        threshold = torch.tensor([gate.threshold])
        policy = ExitPolicy(get_layout(layout), False, gate, threshold, torch.tensor([gate.min_depth]))
        assert walk(model, batch, policy).depths[batch.decode].tolist() == done.depths[1:]


def test_another_teacher_is_refused(trained: Path, tmp_path: Path) -> None:
    other = load(make_teacher(tmp_path, seed=5), device="cpu")
    with pytest.raises(LoopedError, match="was made for"):
        get_gate(trained / "lookahead", other)


def test_json_is_the_last_line(cli: Callable[..., Any], teacher: Path, tmp_path: Path) -> None:
    words = ("train-gate", "--teacher", teacher, "--output", tmp_path / "gate", *QUICK)
    done = cli(*words, "--kv", "last-exited", "--prefill", "ragged", "--threshold-target", 0.4, "--json")
    assert done.code == 0, done
    result = json.loads(done.out.splitlines()[-1])
    assert 0 < result["agreement"] <= 1
    assert 2 <= result["mean_depth"] <= 4
    assert result["teacher_threshold"] == 0.4
    stored = card(tmp_path / "gate")
    assert (stored["layout"], stored["prefill"]) == ("ragged", "ragged")
    assert stored["threshold"] == result["threshold"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again = cli(*words)
    assert "already holds a run" in again.refusal
    assert "--overwrite" in again.refusal
    assert card(tmp_path / "gate") == stored
    assert cli(*words, "--overwrite", "--loss", "paper", "--steps", 50).code == 0
    assert card(tmp_path / "gate") != stored


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gate", "lookahed"), "did you mean 'lookahead'"),
        (("--gate", "none"), "known: lookahead, pre-loop, hybrid, stage2"),
        (("--kv", "raged"), "did you mean 'ragged'"),
        (("--gate", "pre-loop", "--prefill", "ragged"), "cannot run in a ragged prefill"),
        (("--tokens", "0"), "--tokens must be at least 1"),
        (("--steps", "0"), "--steps must be at least 1"),
        (("--lr", "-1"), "--lr must be above 0"),
        (("--threshold-target", "1.5"), "between 0 and 1"),
        (("--context-thresholds", "0.9,0.1"), "two numbers in order"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--device", "abacus"), "unknown device"),
        (("--resume",), "no unfinished run"),
    ],
)
def test_mistakes_are_refused(cli: Callable[..., Any], teacher: Path, tmp_path: Path, words, sentence: str) -> None:
    out = tmp_path / "out"
    done = cli("train-gate", "--teacher", teacher, "--output", out, "--device", "cpu", *words)
    assert sentence in done.refusal
    assert not out.exists()


def test_teachers_without_a_gate_or_with_too_few_loops_are_refused(cli, tmp_path: Path, shared) -> None:
    short = make_teacher(tmp_path / "short", max_loops=2)
    assert "needs 3" in cli("train-gate", "--teacher", short, "--output", tmp_path / "out", "--device", "cpu").refusal
    huginn = tmp_path / "huginn"
    huginn.mkdir()
    fixture = json.loads(shared("fixtures/huginn_tiny.json").read_text())
    (huginn / "config.json").write_text(json.dumps(fixture["config"]))
    shutil.copyfile(shared("fixtures/huginn_tiny.safetensors"), huginn / "model.safetensors")
    words = ("--gate", "pre-loop", "--output", tmp_path / "out", "--device", "cpu")
    refused = cli("train-gate", "--teacher", huginn, *words)
    assert "no exit gate of its own" in refused.refusal
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(cli, teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = cli("train-gate", "--teacher", teacher, "--output", tmp_path, "--overwrite", *QUICK)
    assert "holds no gate" in done.refusal
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_ctrl_c_leaves_an_older_gate_as_it_was(
    cli, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gate"
    shutil.copytree(ASSETS / "tokenizer", out)
    (out / "gate.json").write_text("{}")
    before = sorted(path.name for path in out.iterdir())

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit.Distillation, "training_step", interrupted)
    done = cli("train-gate", "--teacher", teacher, "--output", out, "--overwrite", *QUICK)
    assert done.code == 130
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["gate"]


def test_a_long_run_resumes_where_it_was_saved(
    cli, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features made on the fly: killed in the middle and resumed, the gate is bit for bit that of a whole run."""
    monkeypatch.setattr(teaching, "_CACHE_BYTES", 0)
    words = ("train-gate", "--teacher", teacher, "--gate", "all", "--tokens", 8000, "--eval-tokens", 2000)
    words = (*words, "--batch-tokens", 1000, "--device", "cpu", "--save-minutes", 1e-6)
    assert cli(*words, "--output", tmp_path / "whole").code == 0

    features, calls = Teaching.features, 0

    def until_killed(self: Teaching, batch: Any, index: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return features(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(Teaching, "features", until_killed)
        assert cli(*words, "--output", tmp_path / "cut").code == 130
    assert not list((tmp_path / "cut").glob("**/gate.json"))
    assert "--resume" in cli(*words, "--output", tmp_path / "cut").refusal
    assert "--lr" in cli(*words, "--output", tmp_path / "cut", "--resume", "--lr", "0.5").refusal
    assert cli(*words, "--output", tmp_path / "cut", "--resume").code == 0
    for kind in ("lookahead", "pre-loop"):
        whole, cut = (load_file(tmp_path / run / kind / "gate.safetensors") for run in ("whole", "cut"))
        for name in ("weight", "bias"):
            assert torch.equal(whole[name], cut[name])
    found = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert found == ["lookahead", "pre-loop", "report.json", "report.svg"]


def test_one_forward_serves_students_with_different_floors(teacher: Path) -> None:
    """Contexts of both floors appear, and the features of a gate are what it sees when it runs."""
    model = load(teacher, device="cpu")
    students = new_students(parse_specs(("all",)), model)
    teaching = Teaching(model, students, Deployment.of(model, get_layout("ragged")), Plan(batch_tokens=2000))
    batch = next(batches(Corpus("embedded", model, 0, 256).training(), 2000))
    features = teaching.features(batch, 0)
    num = features.num
    assert num == int(batch.decode.sum())
    vectors, numbers = ("z1", "z2", "embedding", "state"), ("entropy", "surprisal", "depth")
    shapes = dict.fromkeys(vectors, (num, 32)) | dict.fromkeys(numbers, (num,))
    assert {name: tuple(x.shape) for name, x in features.blocks.items()} == shapes
    assert features.targets["hazards"].shape == (num, 3)
    assert set(features.blocks["depth"].tolist()) == {1.0, 2.0, 3.0, 4.0}


RECIPES = sorted(path.name for path in shipped("recipes").glob("gate-*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_valid(recipe: str) -> None:
    options = parse(Options, ["--config", f"recipes/{recipe}"], "looped train-gate")
    check(options)
    assert options.teacher in (*HUB_IDS, "tiny-ouro", "tiny-huginn")


def test_every_released_model_has_a_recipe() -> None:
    assert {f"gate-{name}.yaml" for name in HUB_IDS} <= set(RECIPES)


def test_the_authors_recipe_runs(cli: Callable[..., Any], teacher: Path, tmp_path: Path) -> None:
    """Their gates, loss and optimiser on a small teacher, for fewer steps: packed, with warm-up, decay and clipping."""
    words = ("train-gate", "--config", "recipes/gate-ouro-paper.yaml", "--teacher", teacher, "--data", "embedded")
    size = ("--tokens", 6000, "--steps", 80, "--warmup", 10, "--eval-tokens", 500, "--max-length", 128)
    done = cli(*words, *size, "--batch-tokens", 512, "--device", "cpu", "--output", tmp_path / "gate", "--json")
    assert done.code == 0, done
    gates = json.loads(done.out.splitlines()[-1])["gates"]
    assert list(gates) == ["lookahead-single", "pre-loop-embedding-softmax", "same-step"]
    assert (
        gates["lookahead-single"]["agreement"] > gates["lookahead-single"]["baselines"]["constant depth"]["agreement"]
    )
    stored = card(tmp_path / "gate" / "lookahead-single")
    assert (stored["layout"], stored["loss"], stored["min_depth"]) == ("depth", "paper", 2)
    heads = load_file(tmp_path / "gate" / "lookahead-single" / "gate.safetensors")
    assert heads["weight"].shape == (1, 32) and heads["bias"][0] == heads["bias"][1]


@pytest.mark.parametrize("kind", ["lookahead", "pre-loop"])
def test_a_saved_gate_predicts_what_its_student_did(teacher: Path, tmp_path: Path, kind: str) -> None:
    """Standardisation folded in, hidden layer included, through a checkpoint and back."""
    model = load(teacher, device="cpu", dtype="float64")
    student = new_students(parse_specs((kind,), hidden=5), model)[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    shape = (40, 2, 32) if kind == "lookahead" else (40, 67)
    inputs = 3 + 2 * torch.randn(shape, generator=generator)
    if kind == "lookahead":
        blocks = {"z1": inputs[:, 0], "z2": inputs[:, 1]}
    else:
        blocks = {"embedding": inputs[:, :32], "state": inputs[:, 32:64]}
        blocks |= {name: inputs[:, 64 + i] for i, name in enumerate(("entropy", "surprisal", "depth"))}
    student.prepare(blocks, torch.rand(40, 3, generator=generator))
    student.eval()
    for part in student.parts:
        part.linear = False
    expected = torch.sigmoid(student(blocks)).double()
    card = GateCard(kind, model.name, model.revision, 32, 4, 1, student.min_depth, "ragged", "dense", 0.5)
    save_gate(student.gate(model), card, tmp_path)
    gate = get_gate(tmp_path, model)
    if isinstance(gate, LookaheadGate):
        steps = torch.arange(40) % 2  # rows at different steps in one call
        found = gate.hazard(inputs[torch.arange(40), steps].double(), steps + 1)
        expected = expected[torch.arange(40), steps]
    else:
        assert isinstance(gate, PreLoopGate)
        found = gate.hazards(inputs.double())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    without = new_students(parse_specs((kind,)), model)[0].gate(model)
    assert isinstance(without, LookaheadGate | PreLoopGate) and without.hidden is None


def test_a_hidden_layer_learns_what_heads_cannot(teacher: Path) -> None:
    """Scored on positions it never saw."""
    model = load(teacher, device="cpu")
    student, linear = new_students(parse_specs(("lookahead:mlp=16", "lookahead")), model)
    generator = torch.Generator().manual_seed(0)
    blocks = {f"z{r}": torch.randn(3000, 32, generator=generator) for r in (1, 2)}
    logits = [4 * z[:, 0] * z[:, 1].sign() + 0.5 * z[:, 2] for z in blocks.values()]
    hazards = torch.sigmoid(torch.stack([torch.full((3000,), -9.0), *logits], -1))
    cut = Features({name: z[:2000] for name, z in blocks.items()}, {"hazards": hazards[:2000]})
    teaching = Teaching(model, [student, linear], Deployment.of(model, get_layout("ragged")), Plan(ridge=1.0))
    for each in (student, linear):
        fit.fit_cached(fit.Distillation(teaching, [each]), cut)
    fresh = {name: z[2000:] for name, z in blocks.items()}
    with torch.no_grad():
        losses = [float(each.objective(fresh, hazards[2000:])) for each in (student, linear)]
    assert losses[0] < 0.7 * losses[1]


def test_a_hidden_layer_comes_into_the_checkpoint(cli: Callable[..., Any], teacher: Path, tmp_path: Path) -> None:
    words = ("train-gate", "--teacher", teacher, "--output", tmp_path / "gate", *QUICK, "--hidden", 8)
    assert cli(*words, "--optimizer", "adamw", "--steps", 50).code == 0
    tensors = load_file(tmp_path / "gate" / "gate.safetensors")
    assert tensors["hidden.weight"].shape == (2, 8, 32)
    assert float(tensors["hidden.out"].abs().max()) > 0
