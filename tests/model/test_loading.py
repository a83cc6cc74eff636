"""Checkpoints: round trips, shards, dtypes, and every way a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from looped.errors import LoopedError
from looped.model import LoopedLM, load, save
from tests.models import micro_huginn, micro_ouro

IDS = torch.tensor([[5, 7, 11, 13, 2]])


def micro(family: str) -> LoopedLM:
    return micro_ouro(dtype=torch.float32) if family == "ouro" else micro_huginn(dtype=torch.float32)


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_round_trip(family: str, tmp_path: Path) -> None:
    model = micro(family)
    save(model, tmp_path)
    again = load(tmp_path, device="cpu")
    assert again.config == model.config
    torch.testing.assert_close(again.logits(IDS), model.logits(IDS), atol=0, rtol=0)
    assert again.tokenizer is None
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" in set(file.keys())  # a tied head is stored twice, as the official files do


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_shards_without_metadata_in_bfloat16(family: str, tmp_path: Path) -> None:
    model = micro(family)
    save(model, tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    again = load(tmp_path, device="cpu", dtype="bfloat16")
    torch.testing.assert_close(again.embed.weight, model.embed.weight.bfloat16(), atol=0, rtol=0)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(LoopedError, match=r"lacks the shard b\.safetensors"):
        load(tmp_path)


def test_revision_does_not_depend_on_the_dtype(tmp_path: Path) -> None:
    model = micro("ouro")
    save(model, tmp_path / "a", dtype="bfloat16")
    save(model, tmp_path / "b")
    stored = load(tmp_path / "a", dtype="float32")
    save(stored, tmp_path / "c", dtype="float32")
    revisions = {load(tmp_path / folder, dtype=dtype).revision for folder in "abc" for dtype in ("float32", "bfloat16")}
    assert revisions == {model.revision}
    save(micro_ouro(seed=1), tmp_path / "b")
    assert load(tmp_path / "b").revision not in revisions


def test_max_loops(tmp_path: Path) -> None:
    save(micro("ouro"), tmp_path)
    assert load(tmp_path, max_loops=2).config.max_loops == 2
    with pytest.warns(UserWarning, match="above the 4 loops"):
        assert load(tmp_path, max_loops=6).config.max_loops == 6
    with pytest.raises(LoopedError, match="at least 1"):
        load(tmp_path, max_loops=0)


def test_unknown_names() -> None:
    with pytest.raises(LoopedError, match="did you mean 'tiny-ouro'"):
        load("tiny-our")
    for device, message in (("tpu", "unknown device 'tpu'"), ("cuda:99", "no device 'cuda:99' here")):
        with pytest.raises(LoopedError, match=message):
            load("tiny-ouro", device=device)
    with pytest.raises(LoopedError, match="unknown dtype"):
        load("tiny-ouro", dtype="float16")
    with pytest.raises(LoopedError, match="could not be reached"):
        load("ouro-1.4b")
    with pytest.raises(LoopedError, match="could not be reached"):
        load("somebody/some-model")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_look_alikes_are_refused_by_name(tmp_path: Path) -> None:
    save(micro("huginn"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "norm_3" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(LoopedError, match="retrofitted-recurrence Llama"):
        load(tmp_path)
    tensors["transformer.core_block.0.attn.q_norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoopedError, match="retrofitted-recurrence OLMo-2"):
        load(tmp_path)
    edit_config(tmp_path, model_type="nanbeige")
    with pytest.raises(LoopedError, match="Nanbeige"):
        load(tmp_path)
    edit_config(tmp_path, model_type="llama")
    with pytest.raises(LoopedError, match="'llama'"):
        load(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(LoopedError, match=r"no config\.json"):
        load(tmp_path)
    save(micro("ouro"), tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(LoopedError, match="truncated or not a safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(LoopedError, match="truncated or not a safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoopedError, match="safetensors only"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    edit_config(tmp_path, hidden_size=32)
    with pytest.raises(LoopedError, match="has shape"):
        load(tmp_path)
    edit_config(tmp_path, hidden_size=24, num_hidden_layers=3)
    with pytest.raises(LoopedError, match="lacks 11 tensors"):
        load(tmp_path)
    for index in ("[]", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(LoopedError, match=r"index\.json"):
            load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoopedError, match="not valid JSON"):
        load(tmp_path)
