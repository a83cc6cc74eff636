"""Training on a GPU: the same bits after a resume, with compiled blocks and half precision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looped.train.pretrain.checkpoint import find
from tests.conftest import Ran

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
pytest.importorskip("lightning")

RECIPE = """
model: {family: ouro, width: 128, ffn: 256, heads: 2, layers: [0, 2, 0], loops: 4}
init: {embed_std: 0.5, branch_gain: 0.3}
objective: {ragged_from: 0.3, kl_tokens: groups}
optim: {lr: 2.0e-3, rows: 8, accumulate: 2, tokens: 81920}
data: {tokens: 200000, window: 256, text: []}
device: cuda
log_every: 5
eval_rows: 0
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def trained(folder: Path) -> dict[str, torch.Tensor]:
    newest = find(folder)[-1].folder
    return load_file(newest / "model.safetensors") | load_file(newest / "trainer.safetensors")


def test_a_resumed_run_has_the_bits_of_the_whole_one(
    recipe: Path, cli_process: Callable[..., Ran], tmp_path: Path
) -> None:
    common = ["train", "--config", recipe, "--data.folder", recipe.parent / "data", "--deterministic"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for words in (
        ["--output", whole],
        ["--output", halves, "--max-steps", 9],
        ["--output", halves, "--resume"],
    ):
        done = cli_process(*common, *words, timeout=280)
        assert done.code == 0, done.err
    one, other = trained(whole), trained(halves)
    assert json.loads((whole / "summary.json").read_text())["steps"] == 20
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_gpus_train_what_one_trains(
    strategy: str, recipe: Path, cli_process: Callable[..., Ran], tmp_path: Path
) -> None:
    common = ["train", "--config", recipe, "--data.folder", recipe.parent / "data", "--precision", "32-true"]
    for words in (
        ["--output", tmp_path / "one"],
        ["--output", tmp_path / "two", "--devices", 2, "--strategy", strategy],
    ):
        done = cli_process(*common, *words, "--max-steps", 8, timeout=280)
        assert done.code == 0, done.err
    one, two = trained(tmp_path / "one"), trained(tmp_path / "two")
    for name, value in one.items():
        if not name.startswith("random/"):
            torch.testing.assert_close(two[name], value, atol=2e-4, rtol=1e-3)
