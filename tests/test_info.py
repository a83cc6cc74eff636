"""`looped info`: the card's numbers against the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from looped.gates.card import GateCard
from looped.gates.checkpoint import save_gate
from looped.model import save
from tests.conftest import Ran
from tests.models import micro_huginn, micro_ouro, random_lookahead

Cli = Callable[..., Ran]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A micro Ouro checkpoint with a lookahead gate beside it."""
    model = micro_ouro(dtype=torch.float32)
    save(model, tmp_path)
    config = model.config
    card = GateCard(
        "lookahead",
        "micro",
        model.revision,
        config.hidden_size,
        config.max_loops,
        1,
        2,
        "ragged",
        "dense",
        threshold=0.4,
    )
    save_gate(random_lookahead(model), card, tmp_path / "gates" / "lookahead")
    return tmp_path


def test_card_of_a_fully_looped_model(cli: Cli, folder: Path) -> None:
    model = micro_ouro(dtype=torch.float32)
    config = model.config
    ran = cli("info", folder, "--json")
    assert ran.code == 0 and ran.err == ""
    card = json.loads(ran.out.splitlines()[-1])
    assert card["num_params"] == sum(weight.numel() for weight in model.parameters())
    costs = {cost["name"]: cost["bytes"] for cost in card["layouts"]}
    row = 2 * config.num_core_layers * config.num_kv_heads * config.head_dim * 2
    assert costs["shared"] == row and costs["first-shared"] == 2 * row
    assert costs["ragged"] == costs["depth"] == config.max_loops * row
    assert f"{costs['shared']:,} bytes per token, 1 plane\n" in ran.out
    assert "gate lookahead" in ran.out and "threshold 0.4" in ran.out
    assert [gate["kind"] for gate in card["gates"]] == ["lookahead"]


def test_loops_change_the_planes_and_layers_outside_the_core_do_not(cli: Cli, tmp_path: Path) -> None:
    model = micro_huginn(dtype=torch.float32)
    save(model, tmp_path)
    config = model.config
    ran = cli("info", tmp_path, "--max-loops", 3, "--dtype", "float32", "--json")
    costs = {cost["name"]: cost for cost in json.loads(ran.out.splitlines()[-1])["layouts"]}
    assert costs["last-exited"]["num_planes"] == 3
    assert costs["last-exited"]["bytes"] == replace(config, max_loops=3).kv_bytes_per_token(3, 4)
    layer = 2 * config.num_kv_heads * config.head_dim * 4
    assert costs["last-exited"]["bytes"] - costs["shared"]["bytes"] == 2 * config.num_core_layers * layer


def test_unknown_model(cli: Cli) -> None:
    assert "did you mean 'tiny-ouro'?" in cli("info", "tiny-oro").refusal
