"""Gate checkpoints: what is written is read, and damage is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from looped.decode import generate
from looped.errors import LoopedError
from looped.gates import get_gate, load_gate
from looped.gates.card import GateCard
from looped.gates.checkpoint import inputs_of, save_gate
from looped.gates.trained import TrainedGate
from tests import trained
from tests.models import micro_ouro, random_lookahead, random_pre_loop


def write(gate: TrainedGate, folder: Path) -> None:
    card = GateCard(
        kind=gate.kind,
        teacher=gate.teacher,
        teacher_revision=gate.revision,
        hidden_size=gate.hidden_size,
        max_loops=gate.max_loops,
        latency=gate.latency,
        min_depth=2,
        layout="last-exited",
        prefill="dense",
        threshold=0.37,
    )
    save_gate(gate, card, folder)


def test_round_trip(tmp_path: Path) -> None:
    model = micro_ouro()
    for gate in (random_lookahead(model), random_pre_loop(model)):
        write(gate, tmp_path / gate.kind)
        again = get_gate(tmp_path / gate.kind, model)
        assert isinstance(again, TrainedGate) and type(again) is type(gate)
        assert (again.threshold, again.min_depth, again.layout, again.prefill) == (0.37, 2, "ragged", "dense")
        torch.testing.assert_close(again.weight_NF.float(), gate.weight_NF.float(), atol=0, rtol=0)
        assert again.default_threshold(model.config) == 0.37


def test_damage(tmp_path: Path) -> None:
    with pytest.raises(LoopedError, match=r"holds no gate\.json"):
        load_gate(tmp_path)
    write(random_lookahead(micro_ouro()), tmp_path)
    data = (tmp_path / "gate.safetensors").read_bytes()
    (tmp_path / "gate.safetensors").write_bytes(data[:40])
    with pytest.raises(LoopedError, match="missing or damaged"):
        load_gate(tmp_path)
    (tmp_path / "gate.safetensors").write_bytes(data)
    card = json.loads((tmp_path / "gate.json").read_text())
    (tmp_path / "gate.json").write_text(json.dumps(card | {"kind": "oracle"}))
    with pytest.raises(LoopedError, match="kind 'oracle'"):
        load_gate(tmp_path)
    for name, value in (("max_loops", "4"), ("min_depth", None), ("min_depth", 10**30), ("teacher_revision", 3)):
        (tmp_path / "gate.json").write_text(json.dumps(card | {name: value}))
        with pytest.raises(LoopedError, match=f"not a readable gate description.*{name}"):
            load_gate(tmp_path)
    (tmp_path / "gate.json").write_text("[")
    with pytest.raises(LoopedError, match=r"gate\.json is not valid JSON"):
        load_gate(tmp_path)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_heads_that_do_not_fit_their_card(tmp_path: Path, name: str) -> None:
    for gate in (random_lookahead(micro_ouro()), random_pre_loop(micro_ouro())):
        write(gate, tmp_path)
        tensors = load_file(tmp_path / "gate.safetensors")
        for value in (tensors[name][..., :1].clone(), torch.zeros(3, 3), tensors[name] * torch.nan):
            save_file(tensors | {name: value}, tmp_path / "gate.safetensors")
            with pytest.raises(LoopedError, match="do not fit"):
                load_gate(tmp_path)


@pytest.mark.parametrize("name", trained.ALL)
def test_every_form_comes_back(tmp_path: Path, name: str) -> None:
    """Kind, inputs, shared heads, hidden layer and softmax: the same exits from the folder as before."""
    model = micro_ouro()
    gate = trained.ALL[name][0](model)
    card = GateCard(
        gate.kind, model.name, model.revision, 24, 4, gate.latency, gate.min_depth, "ragged", "dense", 0.5,
        inputs=inputs_of(gate),
    )  # fmt: skip
    save_gate(gate, card, tmp_path)
    again = get_gate(tmp_path, model)
    assert type(again) is type(gate) and again.uses_carry == gate.uses_carry
    threshold = trained.ALL[name][1]
    options = {"max_new_tokens": 12, "ignore_eos": True, "layout": "ragged", "threshold": threshold}
    made, read = (generate(model, [3, 14, 15], gate=each, **options).depths for each in (gate, again))
    assert made == read
    with pytest.raises(LoopedError, match="was made for"):
        get_gate(tmp_path, micro_ouro(seed=5))


def test_criteria_keep_their_threshold(tmp_path: Path) -> None:
    for kind, floor in (("convergence", 2), ("delayed-convergence", 3)):
        gate = load_gate(kind)
        save_gate(gate, GateCard(kind, "t", "r", 24, 4, gate.latency, floor, "shared", "dense", 0.07), tmp_path / kind)
        again = get_gate(tmp_path / kind, micro_ouro())
        assert (again.name, again.threshold, again.min_depth, again.latency) == (kind, 0.07, floor, gate.latency)
        assert again.layout == "shared"


def test_inputs_that_no_such_gate_has(tmp_path: Path) -> None:
    gate = random_pre_loop(micro_ouro())
    write(gate, tmp_path)
    card = json.loads((tmp_path / "gate.json").read_text())
    for inputs in (["embedding", "weather"], ["depth", "embedding"]):
        (tmp_path / "gate.json").write_text(json.dumps(card | {"inputs": inputs}))
        with pytest.raises(LoopedError, match="may look at embedding, state"):
            load_gate(tmp_path)
    (tmp_path / "gate.json").write_text(json.dumps(card | {"inputs": "embedding"}))
    with pytest.raises(LoopedError, match="inputs must be a list"):
        load_gate(tmp_path)
