"""Whole runs at micro size: learning, resuming, stopping, exporting, refusing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from looped.errors import LoopedError
from looped.model import load
from looped.train.pretrain.checkpoint import find
from looped.train.pretrain.corpus import Corpus
from looped.train.pretrain.folder import prepare_folder
from looped.train.pretrain.recipe import Data, Init, Objective, Optim, Options, Recurrence, Shape
from looped.train.pretrain.run import train
from looped.train.pretrain.schedule import Clock, beta, learning_rate
from looped.train.pretrain.windows import Windows
from tests.conftest import Ran

pytest.importorskip("lightning")

VOCAB, LENGTH = 12, 24


def windows(seed: int) -> Windows:
    """Rows that repeat four random tokens: predictable after the first four."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB, (64, 4), generator=generator).repeat(1, LENGTH // 4 + 1)[:, : LENGTH + 1]
    marks = torch.zeros_like(tokens, dtype=torch.uint8)
    marks[:, 5:] = 3
    return Windows(tokens, marks, seed=0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(windows(1), windows(2), VOCAB, 0, 1, Path("no-tokenizer-here"))


def options(folder: Path, family: str = "ouro", steps: int = 100, **changes: Any) -> Options:
    layers = (0, 1, 0) if family == "ouro" else (1, 1, 1)
    base = Options(
        output=folder,
        model=Shape(family, 32, 48, 2, layers, 3),  # type: ignore[arg-type]
        init=Init(embed_std=0.5, branch_gain=0.3),
        objective=Objective(ragged_from=0.5),
        recurrence=Recurrence(mean=2.5, kv_share=0.5, shallow_weight=0.3),
        optim=Optim(lr=1e-2, rows=8, tokens=steps * 8 * LENGTH),
        data=Data(window=LENGTH),
        device="cpu",
        eval_rows=8,
        log_every=20,
    )
    return replace(base, **changes)


def go(choices: Options, corpus: Corpus) -> dict[str, Any]:
    summary = train(choices, prepare_folder(choices), corpus, time.monotonic())
    assert summary is not None
    return summary


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights, moments of the optimiser, state of the random generator."""
    newest = find(folder)[-1].folder
    return load_file(newest / "model.safetensors") | load_file(newest / "trainer.safetensors")


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_loss_falls_and_the_export_is_the_model(family: str, tmp_path: Path, corpus: Corpus) -> None:
    summary = go(options(tmp_path / "run", family), corpus)
    log = log_of(tmp_path / "run")
    assert summary["steps"] == 100 and summary["progress"] == 1.0 and summary["stopped"] == "schedule"
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    assert all(len(curve) == 3 for curve in summary["scores"]["ce"].values())
    model = load(tmp_path / "run" / "model", dtype="bfloat16", device="cpu")
    trained = weights_of(tmp_path / "run")[
        "model.embed_tokens.weight" if family == "ouro" else "transformer.wte.weight"
    ]
    torch.testing.assert_close(model.embed.weight, trained.bfloat16())
    assert model.config.max_loops == 3 and model.config.default_layout == ("ragged" if family == "ouro" else "shared")


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_a_resumed_run_is_the_uninterrupted_run(family: str, tmp_path: Path, corpus: Corpus) -> None:
    whole = options(tmp_path / "whole", family, steps=14, eval_rows=0)
    go(whole, corpus)
    halves = replace(whole, output=tmp_path / "halves")
    first = go(replace(halves, max_steps=8), corpus)
    assert first["steps"] == 8 and first["stopped"] == "steps"
    second = go(replace(halves, resume=True), corpus)
    assert second["steps"] == 14
    one, other = weights_of(tmp_path / "whole"), weights_of(tmp_path / "halves")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sigterm_leaves_a_checkpoint_to_resume(tmp_path: Path, corpus: Corpus) -> None:
    endless = options(tmp_path / "run", steps=100_000)
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    summary = go(endless, corpus)
    timer.join()
    assert summary["stopped"] == "SIGTERM" and 0 < summary["steps"] < 100_000
    again = go(replace(endless, resume=True, max_steps=summary["steps"] + 2), corpus)
    assert again["steps"] == summary["steps"] + 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_time_limit_ends_the_schedule_in_time(tmp_path: Path, corpus: Corpus) -> None:
    begun = time.monotonic()
    limited = options(tmp_path / "run", steps=100_000, max_seconds=6.0, reserve=1.0, finish=True, eval_rows=0)
    summary = go(replace(limited, log_every=10), corpus)
    assert time.monotonic() - begun < 12
    assert summary["progress"] > 0.8
    assert log_of(tmp_path / "run")[-1]["lr"] < 0.5e-2


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    choices = options(tmp_path / "run")
    prepare_folder(choices)
    with pytest.raises(LoopedError, match="already holds a run"):
        prepare_folder(choices)
    prepare_folder(replace(choices, overwrite=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(LoopedError, match="holds no run of this program"):
        prepare_folder(replace(choices, output=tmp_path / "mine", overwrite=True))
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model.heads", "0"),
        ("--model.heads", "7"),
        ("--optim.lr", "-1"),
        ("--optim.rows", "0"),
        ("--objective.floor", "2"),
        ("--log-every", "0"),
        ("--max-steps", "0"),
        ("--eval-rows", "-1"),
        ("--seed", "-1"),
        ("--name", "../elsewhere"),
        ("--data.gsm8k", "nowhere.jsonl"),
    ],
)
def test_a_mistake_leaves_the_run_that_it_would_replace(
    cli: Callable[..., Ran], tmp_path: Path, flag: str, value: str
) -> None:
    folder = prepare_folder(options(tmp_path / "run"))
    before = (folder / "recipe.json").read_bytes()
    refused = cli("train", "--output", folder, "--overwrite", "--device", "cpu", flag, value)
    assert refused.code == 2, refused
    assert (folder / "recipe.json").read_bytes() == before
    assert cli("train", "--output", tmp_path / "new", "--device", "cpu", flag, value).code == 2
    assert not (tmp_path / "new").exists()


def test_resuming_another_recipe_names_the_difference(tmp_path: Path) -> None:
    choices = options(tmp_path / "run")
    folder = prepare_folder(choices)
    with pytest.raises(LoopedError, match="no checkpoint"):
        prepare_folder(replace(choices, resume=True))
    (folder / "step-3").mkdir()
    (folder / "step-3" / "trainer.json").write_text("{}")
    with pytest.raises(LoopedError, match=r"objective\.beta 0\.1 -> 0\.2; optim\.rows 8 -> 16\. Resume"):
        other = replace(choices.optim, rows=16)
        prepare_folder(replace(choices, resume=True, objective=Objective(beta=0.2), optim=other))
    assert prepare_folder(replace(choices, resume=True)) == folder


def test_learning_rate_and_beta_over_a_run() -> None:
    optim = Optim(lr=1.0, warmup=0.1, min_lr=0.1)
    assert learning_rate(optim, 0.05) == pytest.approx(0.5)
    assert learning_rate(optim, 0.1) == pytest.approx(1.0)
    assert learning_rate(optim, 0.55) == pytest.approx(0.55)
    assert learning_rate(optim, 1.0) == pytest.approx(0.1)
    held = replace(optim, decay_from=0.4)
    assert learning_rate(held, 0.4) == pytest.approx(1.0)
    assert learning_rate(held, 0.7) == pytest.approx(0.55)
    assert beta(Objective(beta=0.1), 0.0) == 0.0
    assert beta(Objective(beta=0.1), 0.5) == pytest.approx(0.1)
    paper = Objective(beta=0.05, beta_schedule="paper")
    assert [round(beta(paper, p), 4) for p in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.01, 0.02, 0.05]


def test_clock_ends_with_the_time_at_any_speed() -> None:
    clock = Clock(total_steps=10**6, total_seconds=100.0)
    seconds = 0.0
    while not clock.done:
        step = 0.2 if seconds < 50 else 0.4
        seconds += step
        clock.advance()
        clock.measure(seconds, step)
    assert 95 < seconds < 105


def test_windows_come_in_an_order_without_state() -> None:
    data = windows(1)
    once = torch.cat([data.take(i * 16, 16).inputs for i in range(5)])
    again = data.take(40, 16).inputs
    torch.testing.assert_close(again, once[40:56])
    seen = {tuple(row.tolist()) for row in once[:64]}
    assert len(seen) == len({tuple(row.tolist()) for row in data.rows(torch.arange(64)).inputs})
