"""Configurations of the public checkpoints, and what they cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.model import LoopedLM, huginn, ouro
from tests.models import huginn_config, ouro_config

HUGINN = {
    "model_type": "huginn_raven",
    "n_embd": 5280,
    "n_heads": 55,
    "num_key_value_heads": 55,
    "head_dim": 96,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "intermediate_size": 17920,
    "vocab_size": 65536,
    "block_size": 4096,
    "rope_base": 50000,
    "mean_recurrence": 32,
    "bias": False,
    "qk_bias": True,
    "tie_embeddings": True,
    "init_values": {"embed_scale": 72.6636084983398},
}


@pytest.mark.parametrize(("name", "layers", "eos"), [("1.4b", 24, 0), ("2.6b", 48, 0), ("2.6b_thinking", 48, 2)])
def test_public_ouro(shared: Callable[[str], Path], name: str, layers: int, eos: int) -> None:
    config = ouro.config_from_hf(json.loads(shared(f"fixtures/ouro_{name}.json").read_text()))
    assert (config.num_core_layers, config.eos_ids, config.max_loops) == (layers, (eos,), 4)
    assert config.fully_looped and config.loop_norm and config.default_layout == "ragged"
    # two bytes for K and V of every head, layer and loop
    assert config.kv_bytes_per_token(4, 2) == {24: 786_432, 48: 1_572_864}[layers]


def test_huginn_parameters_and_kv_bytes() -> None:
    config = huginn.config_from_hf(HUGINN)
    assert config.eos_ids == (65505, 65508)
    assert config.kv_bytes_per_token(32, 2) == 2_787_840
    assert config.kv_bytes_per_token(1, 2) == 168_960
    embedding = config.vocab_size * config.hidden_size
    total = config.core_params + config.boundary_params
    assert total == 3_564_976_800  # unique parameters: the head is the embedding
    assert embedding == 346_030_080


def test_ouro_parameters(shared: Callable[[str], Path]) -> None:
    config = ouro.config_from_hf(json.loads(shared("fixtures/ouro_1.4b.json").read_text()))
    gate = config.hidden_size + 1
    embedding = config.vocab_size * config.hidden_size
    assert config.core_params + config.boundary_params + embedding + gate == 1_434_652_673


@pytest.mark.parametrize("config", [ouro_config(), huginn_config(), huginn_config(num_prelude_layers=0)])
def test_cost_model_counts_the_parameters(config: ModelConfig) -> None:
    model = LoopedLM(config)
    counted = config.core_params + config.boundary_params
    if not config.tie_embeddings:
        counted += config.vocab_size * config.hidden_size
    if config.exit_gate:
        counted += config.hidden_size + 1
    assert counted == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", [ouro, huginn])
def test_config_round_trip(family: object) -> None:
    config = ouro_config(loop_norm=False) if family is ouro else huginn_config()
    assert family.config_from_hf(family.config_to_hf(config)) == config  # type: ignore[attr-defined]


def test_speedup_bound() -> None:
    config = ouro_config()
    f0, fr = config.boundary_params, config.core_params
    assert config.speedup_bound(2.0) == pytest.approx((f0 + 4 * fr) / (f0 + 2 * fr))
    assert config.speedup_bound(4.0) == 1


def test_refused_configs() -> None:
    with pytest.raises(LoopedError, match="lacks hidden_size"):
        ouro.config_from_hf({"vocab_size": 10, "intermediate_size": 4})
    with pytest.raises(LoopedError, match="cannot be shared"):
        ouro_config(num_kv_heads=3)
    with pytest.raises(LoopedError, match="at least 1"):
        ouro_config(max_loops=0)
    with pytest.raises(LoopedError, match="rope_scaling"):
        ouro.config_from_hf(ouro.config_to_hf(ouro_config()) | {"rope_scaling": {"type": "yarn"}})


WRONG_VALUES = ["12", -2, 1.5, [1], {}, True, 10**30]


@pytest.mark.parametrize("family", [ouro, huginn])
@pytest.mark.parametrize("value", WRONG_VALUES, ids=repr)
def test_a_value_of_the_wrong_type_is_refused_by_name(family: Any, value: Any) -> None:
    raw = family.config_to_hf(ouro_config() if family is ouro else huginn_config())
    sizes = {"hidden_size", "n_embd", "num_attention_heads", "n_heads", "num_hidden_layers", "n_layers_in_coda"}
    sizes |= {"vocab_size", "head_dim", "total_ut_steps", "mean_recurrence", "intermediate_size", "block_size"}
    for name in sizes & set(raw):
        with pytest.raises(LoopedError, match=f"config.json: {name} must be a whole number"):
            family.config_from_hf(raw | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("rope_theta", "x", "a number"),
        ("early_exit_threshold", math.nan, "a number"),
        ("rms_norm_eps", -1e-6, "a number"),
        ("tie_word_embeddings", "no", "true or false"),
        ("looped_layout", 3, "a text"),
        ("eos_token_id", [["a"]], "a token id"),
        ("bos_token_id", [1, 2], "one token id"),
    ],
)
def test_other_types(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(LoopedError, match=f"config.json: {name} must be {wanted}"):
        ouro.config_from_hf(ouro.config_to_hf(ouro_config()) | {name: value})


def test_null_is_a_key_left_out() -> None:
    raw = ouro.config_to_hf(ouro_config(head_dim=6))
    assert ouro.config_from_hf(raw | {"head_dim": None, "looped_layout": None}) == ouro_config(head_dim=6)
