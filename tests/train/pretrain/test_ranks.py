"""Several processes train what one trains: whole commands on two CPU processes, compared by their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looped.model import load
from looped.train.pretrain.checkpoint import find
from tests.conftest import Ran

pytest.importorskip("lightning")

RECIPE = """
model: {family: ouro, width: 32, ffn: 48, heads: 2, layers: [0, 1, 0], loops: 3}
init: {embed_std: 0.5, branch_gain: 0.3}
objective: {ragged_from: 0.4, kl_tokens: groups, question_weight: 0.5}
optim: {lr: 2.0e-3, rows: 4, accumulate: 2, tokens: 3072}
data: {tokens: 20000, window: 64, workers: 1, text: []}
device: cpu
log_every: 1
eval_rows: 0
check_rows: 4
"""


def trained(folder: Path) -> dict[str, torch.Tensor]:
    newest = find(folder)[-1].folder
    tensors = load_file(newest / "model.safetensors") | load_file(newest / "trainer.safetensors")
    return {name: value for name, value in tensors.items() if not name.startswith("random/")}


def curve(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("tok_s", "mfu")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, in this one; half of its steps are ragged."""
    from looped.cli import main

    folder = tmp_path_factory.mktemp("alone")
    (folder / "recipe.yaml").write_text(RECIPE)
    places = ["--data.folder", folder / "data", "--output", folder / "run"]
    assert main([str(word) for word in ["train", "--config", folder / "recipe.yaml", *places]]) == 0
    return folder


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_what_one_trains(
    strategy: str, alone: Path, cli_process: Callable[..., Ran], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    common = ["--config", alone / "recipe.yaml", "--data.folder", alone / "data", "--output", run]
    done = cli_process("train", *common, "--devices", 2, "--strategy", strategy, "--max-steps", 4, timeout=250)
    assert done.code == 0, done.err
    # the second half on one device: nothing in a checkpoint depends on how many there were
    from looped.cli import main

    assert main([str(word) for word in ["train", *common, "--resume"]]) == 0
    one, two = trained(alone / "run"), trained(run)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    for left, right in zip(curve(alone / "run"), curve(run), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            tolerance = 1e-4 if "gain" in name or "drift" in name else 1e-5
            assert "drift" in name or right[name] == pytest.approx(value, abs=tolerance), name
    assert load(run / "model", device="cpu").config.max_loops == 3


def test_uneven_rows_and_lone_strategies_are_refused(cli: Callable[..., Ran], tmp_path: Path) -> None:
    common = ["train", "--output", tmp_path / "run", "--device", "cpu", "--data.folder", tmp_path / "data"]
    assert "cannot be dealt to 3 devices" in cli(*common, "--devices", 3, "--optim.rows", 4).refusal
    assert "needs several devices" in cli(*common, "--strategy", "fsdp").refusal
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
