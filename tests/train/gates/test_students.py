"""Students of every kind: what their words mean, what they learn, that they run as they were scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from looped.decode import generate
from looped.errors import LoopedError
from looped.gates import ConvergenceGate, ForeseenConvergenceGate, Stage2Gate, get_gate
from looped.gates.losses import improvement_weights
from looped.kv import get_layout
from looped.model import load
from looped.train.gates.batches import Document, batches, padded
from looped.train.gates.documents import Corpus
from looped.train.gates.leaving import ExitPolicy
from looped.train.gates.options import Options
from looped.train.gates.run import run
from looped.train.gates.sights import Sights
from looped.train.gates.spec import parse_specs
from looped.train.gates.students import new_students
from looped.train.gates.teaching import Deployment, Plan, Teaching
from looped.train.gates.walk import walk
from tests.models import micro_huginn, micro_ouro
from tests.train.gates.test_run import make_teacher

GATES = (
    "lookahead:shared:change:mlp=4",
    "lookahead:single:bce",
    "lookahead:prospective",
    "pre-loop:embedding:softmax",
    "pre-loop:embedding+depth:cdf",
    "hybrid:shared:ordinal",
    "stage2",
    "stage2:per-step:prospective",
    "same-step:hard",
    "delayed-convergence",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def trained(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, on one forward of the teacher."""
    out = tmp_path_factory.mktemp("gates") / "out"
    size: dict[str, Any] = {"tokens": 1500, "eval_tokens": 500, "steps": 20}
    asked: dict[str, Any] = {"mean_depths": (2.5,), "max_lost": (0.9,), "lost_unit": "token"}
    assert run(Options(teacher=str(teacher), gate=GATES, output=out, device="cpu", **size, **asked)) == 0
    return out


def card(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / name.replace(":", "-").replace("=", "") / "gate.json").read_text())
    return loaded


def test_words() -> None:
    plain, mlp, shared, before = parse_specs(
        ("lookahead", "lookahead:mlp", "lookahead:shared:change:bce:mlp=7", "pre-loop:depth+embedding"), 0, "cdf"
    )
    assert (plain.hidden, plain.loss, plain.sharing, plain.change) == (0, "cdf", "per-step", False)
    assert mlp.hidden == 256
    assert (shared.hidden, shared.loss, shared.sharing, shared.change) == (7, "bce", "shared", True)
    assert shared.name == "lookahead-shared-change-bce-mlp7"
    assert before.inputs == ("embedding", "depth") and before.needs_token_before
    assert not parse_specs(("pre-loop:embedding",))[0].needs_token_before
    assert [spec.hidden for spec in parse_specs(("lookahead:linear", "hybrid"), 5)] == [0, 5]
    stage2 = parse_specs(("stage2", "stage2:per-step:prospective"))
    assert [(spec.sharing, spec.target) for spec in stage2] == [
        ("single", "retrospective"),
        ("per-step", "prospective"),
    ]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("lookahead:softmax", "option of a lookahead gate 'softmax'"),
        ("lookahead:embedding", "known: linear, mlp"),
        ("pre-loop:shared", "unknown pre-loop:shared"),
        ("pre-loop:depht", "did you mean 'depth'"),
        ("lookahead:mlp=0", "takes a number of hidden units"),
        ("convergence:mlp", "option of a convergence gate"),
        ("stage2:kl", "option of a stage2 gate"),
    ],
)
def test_words_that_do_not_suit(word: str, sentence: str) -> None:
    with pytest.raises(LoopedError, match=sentence):
        parse_specs((word,))


def test_one_asked_for_twice_is_trained_once() -> None:
    assert [spec.name for spec in parse_specs(("lookahead", "all", "lookahead"))] == ["lookahead", "pre-loop"]


@pytest.mark.parametrize("name", GATES)
def test_scored_exits_are_those_of_the_decoder(trained: Path, teacher: Path, name: str) -> None:
    """Teacher-forced with its own tokens, a gate's exits in the evaluation are those it takes when it generates."""
    model = load(teacher, device="cpu", dtype="float64")
    gate = get_gate(trained / name.replace(":", "-").replace("=", ""), model)
    assert model.tokenizer is not None and gate.threshold is not None
    prompt = model.tokenizer.encode("Q: Tom has 3 pens and buys 4 more. How many pens?\nA:")
    done = generate(model, prompt, gate=gate, temperature=1.0, seed=1, ignore_eos=True, max_new_tokens=20)
    batch = padded([Document(prompt + done.token_ids, len(prompt))])
    limits = torch.tensor([gate.threshold]), torch.tensor([gate.min_depth])
    policy = ExitPolicy(get_layout("ragged"), False, gate, *limits)
    assert walk(model, batch, policy).depths[batch.decode].tolist() == done.depths[1:]


def test_cards_say_what_was_learnt_and_thresholds_give_what_was_asked(trained: Path) -> None:
    shared = card(trained, GATES[0])
    assert (shared["inputs"], shared["loss"], shared["target"]) == (["state", "change"], "kl", "teacher")
    assert card(trained, "stage2")["target"] == "retrospective"
    hybrid = card(trained, "hybrid:shared:ordinal")
    assert hybrid["inputs"][0] == "embedding" and hybrid["inputs"][-1] == "lookahead.state"
    for name in GATES:
        depth, lost = card(trained, name)["calibration"]
        assert depth["wanted"] == 2.5
        if name != "delayed-convergence":
            assert depth["mean_depth"] == pytest.approx(2.5, abs=0.15)
        assert lost["shown"] and lost["lost"] < lost["wanted"] == 0.9
        assert lost["p_value"] <= 0.05 and lost["unit"] == "token"


def test_shapes(trained: Path) -> None:
    heads = load_file(trained / "lookahead-shared-change-mlp4" / "gate.safetensors")
    shapes = {name: tuple(x.shape) for name, x in heads.items()}
    assert shapes == {
        "weight": (1, 64), "bias": (2,), "hidden.weight": (1, 4, 64), "hidden.bias": (2, 4), "hidden.out": (1, 4)
    }  # fmt: skip
    single = load_file(trained / "lookahead-single-bce" / "gate.safetensors")
    assert single["bias"][0] == single["bias"][1]
    assert load_file(trained / "pre-loop-embedding-softmax" / "gate.safetensors")["weight"].shape == (4, 32)
    assert load_file(trained / "delayed-convergence" / "gate.safetensors") == {}


def test_stage_two_leaves_the_first_hazard_as_it_was(teacher: Path) -> None:
    """With a head a step the first has no label, so it stays the model's own; without one it never exits."""
    model = load(teacher, device="cpu")
    student = new_students(parse_specs(("stage2:per-step",)), model)[0]
    with torch.no_grad():
        for part in student.parts:
            part.weight.add_(1.0)
    gate = student.gate(model)
    assert isinstance(gate, Stage2Gate) and gate.min_depth == 2 and model.exit_gate is not None
    torch.testing.assert_close(gate.weight_NF[0], model.exit_gate.weight[0])
    none = new_students(parse_specs(("stage2",)), micro_huginn(dtype=torch.float32))[0].gate(micro_huginn())
    z = torch.randn(5, 24, dtype=torch.float64)
    assert float(none.hazard(z, torch.ones(5, dtype=torch.long)).max()) < 1e-20


def test_stage_two_learns_whether_loops_help() -> None:
    """Positions whose loops help are told from those where they do not, by a number that says so."""
    model = micro_ouro(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    helps = torch.rand(400, 4, generator=generator) < 0.5  # whether loop t helps
    losses = torch.zeros(400, 4)
    losses[:, 0] = 5.0
    for t in range(1, 4):
        losses[:, t] = losses[:, t - 1] - helps[:, t].float()
    for target, shift in (("retrospective", 0), ("prospective", 1)):
        blocks = {f"z{r}": torch.randn(400, 24, generator=generator) * 0.1 for r in range(1, 5)}
        for r in range(1, 5):
            if r - 1 + shift < 4:
                blocks[f"z{r}"][:, 0] = helps[:, r - 1 + shift].float() * 2 - 1
        student = new_students(parse_specs((f"stage2:{target}",)), model)[0]
        for parameter in student.parameters():
            parameter.requires_grad_()
        optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
        for _ in range(150):
            optimizer.zero_grad()
            student.objective(blocks, losses).backward()
            optimizer.step()
        gate = student.gate(model)
        for r in (2, 3):
            hazard = gate.hazard(blocks[f"z{r}"], torch.full((400,), r))
            on = helps[:, r - 1 + shift]
            assert float(hazard[on].max()) < 0.2
            assert float(hazard[~on].mean()) == pytest.approx(1 - float(improvement_weights(torch.zeros(2))), abs=0.08)


def test_models_without_a_gate(tmp_path: Path) -> None:
    model = micro_huginn(dtype=torch.float32)
    foreseen = new_students(parse_specs(("lookahead", "delayed-convergence", "stage2:prospective")), model)
    assert isinstance(foreseen[0].gate(model), ForeseenConvergenceGate)
    for word in ("pre-loop", "hybrid", "same-step", "lookahead:change"):
        with pytest.raises(LoopedError, match=r"no exit gate of its own, so .* has no teacher"):
            new_students(parse_specs((word,)), model)
    new_students(parse_specs(("pre-loop:prospective", "lookahead:prospective")), model)


def test_the_change_that_is_foreseen_is_that_of_the_next_step(teacher: Path) -> None:
    """A linear map of the state explains the next change, so the regression finds it."""
    model = micro_huginn(dtype=torch.float32)
    student = new_students(parse_specs(("lookahead",)), model)[0]
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(200, 24, generator=generator)]
    changes = []
    for _ in range(model.config.max_loops):
        growth = 0.3 * torch.exp(0.4 * states[-1][:, :1])
        step = torch.nn.functional.normalize(torch.randn(200, 24, generator=generator), dim=-1)
        step = step * states[-1].norm(dim=-1, keepdim=True)
        states.append(states[-1] + growth * step)
        changes.append(((states[-1] - states[-2]).norm(dim=-1) / states[-1].norm(dim=-1)).log())
    blocks = {f"z{r}": z for r, z in enumerate(states)}
    target = torch.stack(changes, -1)
    student.prepare(blocks, target)
    before = float(student.objective(blocks, target).detach())
    optimizer = torch.optim.LBFGS(student.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = student.objective(blocks, target)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(student.objective(blocks, target).detach()) < 0.25 * before
    gate = student.gate(model)
    found = gate.expected(states[2], states[1], torch.full((200,), 2))
    assert float((found - changes[2]).square().mean()) < 0.25 * float(changes[2].var())


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_what_layers_of_the_coda_read_is_what_tokens_left(threshold: float) -> None:
    """Teacher-forced with its own tokens, a model puts the same tokens first at their exits."""
    model, gate = micro_huginn(), ConvergenceGate()
    documents, wanted, depths = [], [], []
    for prompt in ([3, 14, 15, 9], [26, 5, 35]):
        options = {"threshold": threshold, "layout": "last-exited", "seed": 0, "ignore_eos": True}
        done = generate(model, prompt, gate=gate, max_new_tokens=12, **options)  # type: ignore[arg-type]
        documents.append(Document(prompt + done.token_ids, len(prompt)))
        wanted += done.token_ids[1:]
        depths += done.depths[1:]
    batch = padded(documents)
    assert batch.prompt_lens.tolist() == [4, 3]
    limits = torch.full((2,), threshold, dtype=torch.float64), torch.full((2,), 2)
    seen = walk(model, batch, ExitPolicy(get_layout("last-exited"), False, gate, *limits))
    exits = seen.depths[batch.decode]
    assert exits.tolist() == depths and len(set(depths)) > 1
    firsts = torch.stack([reading.first for reading in Sights(model, batch, seen, batch.decode).readings], -1)
    assert firsts.gather(1, exits[:, None] - 1)[:, 0].tolist() == wanted


def test_features_of_students_are_shared(teacher: Path) -> None:
    """One forward: what several students see is kept once, and losses are made only where a student needs them."""
    model = load(teacher, device="cpu")
    deployment = Deployment.of(model, get_layout("ragged"))
    batch = next(batches(Corpus("embedded", model, 0, 256).training(), 1000))
    first = Teaching(model, new_students(parse_specs(("lookahead", "lookahead:shared")), model), deployment, Plan())
    assert set(first.features(batch, 0).blocks) == {"z1", "z2"}
    assert set(first.features(batch, 0).targets) == {"hazards"}
    second = Teaching(model, new_students(parse_specs(("stage2", "lookahead")), model), deployment, Plan())
    features = second.features(batch, 0)
    assert set(features.blocks) == {"z1", "z2", "z3", "z4"}
    assert features.targets["losses"].shape == (features.num, 4)


def test_the_gate_that_ships_with_tiny_huginn() -> None:
    """It exits where the criterion does on most tokens, and knows a step ahead."""
    model = load("tiny-huginn", device="cpu")
    gate = get_gate("foreseen-convergence", model)
    assert isinstance(gate, ForeseenConvergenceGate) and gate.latency == 1 and model.tokenizer is not None
    prompt = model.tokenizer.encode("Q: Tom has 3 boxes of 12 eggs. He eats 4 eggs. How many eggs are left?\nA:")
    done = generate(model, prompt, gate=gate, max_new_tokens=32, ignore_eos=True)
    batch = padded([Document(prompt + done.token_ids, len(prompt))])
    limits = torch.tensor([0.03], dtype=torch.float64), torch.tensor([2])
    criterion = walk(model, batch, ExitPolicy(get_layout("shared"), False, ConvergenceGate(), *limits))
    same = [a == b for a, b in zip(criterion.depths[batch.decode].tolist(), done.depths[1:], strict=True)]
    assert set(done.depths[1:]) == {2, 3} and sum(same) / len(same) > 0.85


def test_gates_of_a_ragged_prefill_learn_from_prompts_too(teacher: Path, tmp_path: Path) -> None:
    """Gates that need no token before; what they do on prompts is told apart."""
    gates = ("pre-loop:embedding", "stage2", "lookahead:change")
    size: dict[str, Any] = {"tokens": 1500, "eval_tokens": 500, "steps": 20}
    options = Options(teacher=str(teacher), gate=gates, output=tmp_path / "out", device="cpu", prefill="ragged", **size)
    assert run(options) == 0
    for name in gates:
        stored = card(tmp_path / "out", name)
        assert stored["prefill"] == "ragged" and stored["metrics"]["prompt"]["positions"] > 0
    model = load(teacher, device="cpu")
    deployment = Deployment.of(model, get_layout("ragged"), ragged_prefill=True)
    batch = next(batches(Corpus("embedded", model, 0, 256).training(), 1000))
    features = Teaching(model, new_students(parse_specs(gates), model), deployment, Plan()).features(batch, 0)
    assert features.num == int((batch.decode | batch.prompt).sum())
