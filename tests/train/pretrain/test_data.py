"""From texts to a trained model, what a dry run says, and tables of tokens beyond two bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from looped.files import shipped
from looped.model import load
from looped.options import parse
from looped.train.pretrain.build import new_model
from looped.train.pretrain.plan import make_plan
from looped.train.pretrain.recipe import Options, model_config
from looped.train.pretrain.windows import Windows
from tests.conftest import Ran

pytest.importorskip("lightning")


@pytest.mark.parametrize("largest", [100, 40_000, 70_000, (1 << 32) - 1])
def test_token_ids_of_any_width_come_back(largest: int, tmp_path: Path) -> None:
    ids = torch.randint(0, largest, (6, 9), generator=torch.Generator().manual_seed(0))
    ids[0, 3] = largest
    batch = Windows(ids, None, seed=0).rows(torch.arange(6))
    assert torch.equal(batch.inputs, ids[:, :-1]) and torch.equal(batch.targets, ids[:, 1:])
    assert not batch.answer.any() and batch.marks.shape == batch.targets.shape
    np.save(tmp_path / "tokens.npy", ids.numpy().astype(np.uint16 if largest < 1 << 16 else np.uint32))
    (tmp_path / "manifest.json").write_text("{}")
    read = Windows.read(tmp_path, torch.device("cpu"), seed=0)
    assert torch.equal(read.rows(torch.arange(6)).targets, ids[:, 1:]) and read.length == 8


def test_parts_of_a_micro_batch_make_the_whole() -> None:
    data = Windows(torch.arange(70).view(10, 7), None, seed=3)
    whole = data.take(25, 8).inputs
    parts = torch.cat([data.take(25 + rank * 2, 2).inputs for rank in range(4)])
    assert torch.equal(whole, parts) and torch.equal(data.rows(data.indices(25, 8)).inputs, whole)


def test_a_model_is_trained_on_texts(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"body": f"The number {i} follows {i - 1}."}) + "\n" for i in range(600)))
    run = ["train", "--output", tmp_path / "run", "--data.folder", tmp_path / "data", "--data.source", corpus]
    run += ["--data.tokens", 8000, "--data.held-out", 600, "--data.window", 32, "--data.column", "body"]
    run += ["--device", "cpu", "--model.width", 16, "--model.ffn", 24, "--model.heads", 2, "--model.layers", "0,1,0"]
    run += ["--model.loops", 2, "--model.vocab", 2100, "--no-model.loop-norm", "--optim.rows", 4, "--max-steps", 6]
    run += ["--eval-rows", 4, "--log-every", 2]
    done = cli(*run)
    assert done.code == 0, done.err
    summary = json.loads(done.out.splitlines()[-1])
    assert summary["steps"] == 6 and set(summary["scores"]["ce"]) == {"all", "question"}
    assert "| ce " in done.err and "answer" not in done.err
    model = load(tmp_path / "run" / "model", device="cpu")
    assert model.config.vocab_size == 2100 and not model.config.loop_norm
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert "less than the tokenizer's" in cli(*run, "--overwrite", "--model.vocab", 100).refusal
    assert (tmp_path / "run" / "model").is_dir()
    assert "no column 'text'" in cli(*run[:-4], "--overwrite", "--data.column", "text", "--dry-run").refusal


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    run = ["train", "--config", shipped("recipes/ouro-160m.yaml"), "--data.tokenizer", "embedded"]
    run += ["--data.source", "embedded", "--output", tmp_path / "run", "--data.folder", tmp_path / "data", "--dry-run"]
    done = cli(*run)
    assert done.code == 0 and not list(tmp_path.iterdir())
    plan = json.loads(done.out.splitlines()[-1])
    # the paper's table, and twice the parameters of a layer for each of 48 uses, thrice for the backward pass
    assert plan["parameters"] == 160_470_529
    assert plan["tokens_per_step"] == 524_288 and plan["steps"] == round(20e9 / 524_288)
    by_hand = 6 * (48 * (4 * 768**2 + 3 * 768 * 2048 + 4 * 768 + 768 * 2048) + 4 * 49_152 * 768)
    assert plan["flops_per_token"] == pytest.approx(by_hand)
    assert plan["seconds"] == pytest.approx(20e9 * by_hand / (0.3 * plan["peak_flops"]))
    assert "160.47M" in done.out and "hours" in done.out
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    assert "already holds a run" in cli(*run).refusal


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn", "ouro-160m", "ouro-160m-smoke"])
def test_shipped_recipes_count_what_their_models_have(name: str, tmp_path: Path) -> None:
    words = ["--config", str(shipped(f"recipes/{name}.yaml")), "--data.source", "embedded"]
    words += ["--data.tokenizer", "embedded", "--output", str(tmp_path / "run")]
    options = parse(Options, words, "looped train")
    plan = make_plan(options, torch.device("cpu"))
    if name.startswith("tiny"):
        config = model_config(options.model, 2048, options.data.window, 0, 1)
        assert plan.parameters == sum(value.numel() for value in new_model(config, options.init, 0).parameters())
    assert plan.memory.total < 141e9


def test_two_devices_halve_what_they_share(tmp_path: Path) -> None:
    words = ["--config", str(shipped("recipes/tiny-ouro.yaml")), "--output", str(tmp_path / "run")]
    one, copies, parts = (
        make_plan(parse(Options, [*words, *more], "looped train"), torch.device("cpu"))
        for more in ([], ["--devices", "2"], ["--devices", "2", "--strategy", "fsdp"])
    )
    assert one.seconds == pytest.approx(2 * copies.seconds)
    assert copies.memory.optimizer == one.memory.optimizer == 2 * parts.memory.optimizer
    assert copies.memory.activations == pytest.approx(one.memory.activations / 2, rel=0.01)


def test_a_checkpoint_is_trained_further(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    run = ["train", "--output", tmp_path / "run", "--data.folder", tmp_path / "data", "--data.tokens", 4000]
    run += ["--data.window", 64, "--data.workers", 1, "--init.checkpoint", "tiny-ouro", "--device", "cpu"]
    run += ["--optim.rows", 2, "--optim.lr", 1e-5, "--max-steps", 2, "--eval-rows", 0, "--log-every", 1]
    planned = cli(*run, "--dry-run")
    assert json.loads(planned.out.splitlines()[-1])["parameters"] == 7_573_889
    done = cli(*run)
    assert done.code == 0, done.err
    summary = json.loads(done.out.splitlines()[-1])
    begun, ended = load("tiny-ouro", device="cpu"), load(summary["checkpoint"], device="cpu")
    moved = (ended.embed.weight - begun.embed.weight).abs().max()
    assert 0 < moved < 1e-4 and ended.config.max_loops == 4
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["answer_ce_4"] < 2.0  # a random model is at log 2048 = 7.6
    texts = tmp_path / "a.jsonl"
    texts.write_text('{"text": "Some text."}\n' * 1500)
    longer = ["--data.source", texts, "--data.folder", tmp_path / "long", "--data.window", 1600, "--overwrite"]
    refused = cli(*run, *longer, "--data.held-out", 100)
    assert refused.code == 2 and "exceed the 1536 of tiny-ouro" in refused.err
    assert (tmp_path / "run" / "model").is_dir()
