"""Runs that end badly: killed between checkpoints, numbers that break, a full disk, data that is not there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from looped.errors import LoopedError
from looped.model import load
from looped.train.pretrain import checkpoint
from looped.train.pretrain.corpus import Corpus
from looped.train.pretrain.folder import prepare_folder
from looped.train.pretrain.objective import Loss
from looped.train.pretrain.ouro_loss import OuroLoss
from looped.train.pretrain.recipe import Data, Init, Objective, Optim, Options, Shape
from looped.train.pretrain.run import train
from looped.train.pretrain.windows import Windows
from tests.conftest import REPOSITORY, Ran

pytest.importorskip("lightning")

VOCAB, LENGTH = 12, 24
RECIPE = """
model: {family: ouro, width: 32, ffn: 48, heads: 2, layers: [0, 1, 0], loops: 3}
init: {embed_std: 0.5, branch_gain: 0.3}
objective: {ragged_from: 0.0}
optim: {lr: 2.0e-3, rows: 4, tokens: 100_000_000}
data: {tokens: 20000, window: 64, workers: 1, text: []}
device: cpu
log_every: 3
eval_rows: 0
check_rows: 2
checkpoint_steps: 20
keep: 1
"""


def windows() -> Windows:
    tokens = torch.randint(2, VOCAB, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Windows(tokens, None, seed=0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(windows(), windows(), VOCAB, 0, 1, Path("no-tokenizer-here"))


def options(folder: Path, **changes: Any) -> Options:
    base = Options(
        output=folder,
        model=Shape("ouro", 16, 24, 2, (0, 1, 0), 2),
        init=Init(embed_std=0.5, branch_gain=0.3),
        objective=Objective(ragged_from=1.0),
        optim=Optim(lr=1e-2, rows=4, accumulate=2, tokens=40 * 8 * LENGTH),
        data=Data(window=LENGTH),
        device="cpu",
        eval_rows=0,
        checkpoint_steps=4,
        check_rows=2,
        log_every=100,
    )
    return replace(base, **changes)


def go(choices: Options, corpus: Corpus) -> dict[str, Any]:
    summary = train(choices, prepare_folder(choices), corpus, time.monotonic())
    assert summary is not None
    return summary


def state_of(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.find(folder)[-1].folder
    return load_file(newest / "model.safetensors") | load_file(newest / "trainer.safetensors")


def test_a_run_killed_between_checkpoints_goes_on_bit_by_bit(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    common = ["train", "--config", tmp_path / "recipe.yaml", "--data.folder", tmp_path / "data"]
    killed = [sys.executable, "-m", "looped", *common, "--output", tmp_path / "killed"]
    log = tmp_path / "killed" / "metrics.jsonl"
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen([str(word) for word in killed], cwd=REPOSITORY, stdout=output, stderr=output)
        for _ in range(1200):
            found = checkpoint.find(tmp_path / "killed")
            # not right after a checkpoint: steps that nobody will have saved are logged
            if found and found[-1].step >= 20 and json.loads(log.read_text().splitlines()[-1])["step"] > found[-1].step:
                break
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.kill()
        process.wait()
    left = checkpoint.find(tmp_path / "killed")[-1].step
    last = left + 13
    resumed = cli(*common, "--output", tmp_path / "killed", "--resume", "--max-steps", last)
    assert resumed.code == 0, resumed.err
    whole = cli(*common, "--output", tmp_path / "whole", "--max-steps", last)
    assert whole.code == 0, whole.err
    one, other = state_of(tmp_path / "whole"), state_of(tmp_path / "killed")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == last


class BreaksAt:
    """The loss, which is no number in one micro-batch."""

    def __init__(self, inner: OuroLoss, micro: int) -> None:
        self.inner, self.micro, self.calls = inner, micro, 0

    def __call__(self, *arguments: Any) -> Loss:
        loss = self.inner(*arguments)
        self.calls += 1
        return loss._replace(value=loss.value * float("nan")) if self.calls == self.micro + 1 else loss


def test_a_loss_that_breaks_ends_the_run_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from looped.train.pretrain import run as pretrain

    choices = options(tmp_path / "run")
    real = pretrain.new_loss
    monkeypatch.setattr(pretrain, "new_loss", lambda *arguments: BreaksAt(real(*arguments), 13))
    ids = corpus.train.indices(13 * 4, 4).tolist()
    with pytest.raises(LoopedError, match=f"step 7, micro-batch 2, windows {', '.join(map(str, ids))};"):
        go(choices, corpus)
    assert [saved.step for saved in checkpoint.find(tmp_path / "run")] == [4]
    assert all(
        bool(value.isfinite().all()) for value in state_of(tmp_path / "run").values() if value.is_floating_point()
    )
    monkeypatch.setattr(pretrain, "new_loss", real)
    gentler = replace(choices, resume=True, optim=replace(choices.optim, lr=5e-3))
    assert go(gentler, corpus)["steps"] == 40


def test_a_full_disk_ends_in_a_sentence_and_costs_nothing_saved(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save_file

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        if "step-8" in str(path):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(LoopedError, match=r"disk of .* is full, so the checkpoint of step 8 .*step-4 is whole"):
        go(options(tmp_path / "run"), corpus)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-4"]
    assert load(tmp_path / "run" / "step-4", device="cpu").config.max_loops == 2
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert go(options(tmp_path / "run", resume=True), corpus)["steps"] == 40


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, score in ((4, 2.0), (8, 1.0), (12, 1.5), (16, None), (20, 1.2)):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        (folder / checkpoint.STATE).write_text(json.dumps({"score": score}))
    (tmp_path / "step-24.partial").mkdir()
    checkpoint.prune(tmp_path, 2)
    assert [saved.step for saved in checkpoint.find(tmp_path)] == [8, 16, 20]


def test_a_checkpoint_is_a_model_the_engine_loads(tmp_path: Path, corpus: Corpus) -> None:
    from looped.decode import generate

    summary = go(options(tmp_path / "run", max_steps=2), corpus)
    model = load(summary["checkpoint"], device="cpu")
    assert len(generate(model, [3, 4, 5], max_new_tokens=4, ignore_eos=True).token_ids) == 4
    state = json.loads((Path(summary["checkpoint"]) / checkpoint.STATE).read_text())
    assert state["windows"] == 2 * 8 and state["score"] == pytest.approx(summary["best"]["held_out_loss"])


def test_a_logger_that_is_not_installed_is_refused(
    tmp_path: Path, cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("looped.train.pretrain.loggers.find_spec", lambda name: None)
    common = ["train", "--output", tmp_path / "run", "--device", "cpu", "--data.folder", tmp_path / "data"]
    assert "pip install wandb" in cli(*common, "--logger", "wandb").refusal
    assert not (tmp_path / "run").exists()
