"""Gate checkpoints: what is written is read, and damage is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
    (tmp_path / "gate.json").write_text("[")
    with pytest.raises(LoopedError, match="not a readable gate description"):
        load_gate(tmp_path)
