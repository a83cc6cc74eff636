"""Gate checkpoints: what is written is read, and damage is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from looped.errors import LoopedError
from looped.gates import get_gate, load_gate
from looped.gates.checkpoint import GateCard, save_gate
from looped.gates.hazard import TrainedGate
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
