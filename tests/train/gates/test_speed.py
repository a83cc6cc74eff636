"""What the teacher costs and how fast it runs: FLOPs counted by PyTorch, a dry run, random teachers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from looped.analysis.shapes import random_model, shape
from looped.kv import get_layout
from looped.train.gates.batches import packed
from looped.train.gates.documents import RandomTokens
from looped.train.gates.spec import parse_specs
from looped.train.gates.speed import Meter, teacher_flops
from looped.train.gates.students import new_students
from looped.train.gates.teaching import Deployment, Plan, Teaching
from looped.train.gates.walk import walk

DRY = ("train-gate", "--teacher", "random:micro-ouro", "--dry-run", "--device", "cpu", "--batch-tokens", 96)


@pytest.mark.parametrize("name", ["micro-ouro", "micro-huginn"])
def test_flops_are_those_of_the_products(name: str) -> None:
    config = shape(name, max_loops=3)
    model = random_model(config, name, "cpu", "float32")
    documents = RandomTokens(model, 0, 40)
    batch = packed([[documents.document(i)] for i in range(2)], 40)
    teacher = Deployment.of(model, get_layout("ragged"))
    thresholds, floors = torch.full((batch.num_sequences,), 0.5), torch.ones(batch.num_sequences, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        walk(model, batch, teacher.policy(batch, thresholds, floors))
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    attention = 4 * config.num_heads * config.head_dim * sum(
        n * (n + 1) / 2 for n in (b - a for a, b in zip(batch.cuts, batch.cuts[1:], strict=False))
    ) * (config.num_prelude_layers + 3 * config.num_core_layers)  # fmt: skip
    # norms are parameters too, of which nobody multiplies a matrix
    assert teacher_flops(config, batch.cuts, 0) - attention == pytest.approx(products, rel=0.02)
    head = 2 * config.hidden_size * config.vocab_size
    assert teacher_flops(config, batch.cuts, 7) - teacher_flops(config, batch.cuts, 0) == 7 * head


def test_the_meter_counts_what_the_teacher_and_its_head_read() -> None:
    model = random_model(shape("micro-ouro"), "micro-ouro", "cpu", "float32")
    documents = RandomTokens(model, 0, 64)
    expected = {"lookahead": 0, "pre-loop": 1, "pre-loop:embedding": 0, "stage2": 4}
    for text, readings in expected.items():
        students = new_students(parse_specs((text,)), model)
        teaching = Teaching(model, students, Deployment.of(model, get_layout("depth")), Plan(batch_tokens=64, width=64))
        batch, index = next(iter(teaching.feed(documents)))
        teaching.features(batch, index)
        assert teaching.meter.tokens == batch.num_tokens
        head = readings * int(batch.decode.sum())
        assert teaching.meter.flops == teacher_flops(model.config, batch.bounds.cuts, head)
    meter = Meter(model.config, model.device)
    meter.count(10, (0, 10), 0)
    assert meter.look().endswith("tok/s") and meter.look() == ""


@pytest.mark.parametrize("more", [("--pack", "on", "--kv", "depth", "--dtype", "bfloat16"), ("--kv", "shared")])
def test_a_dry_run_measures_and_writes_nothing(cli, tmp_path: Path, monkeypatch, more: tuple[str, ...]) -> None:
    monkeypatch.setattr("looped.train.gates.speed._MOST_STEPS", 2)
    out = tmp_path / "out"
    done = cli(*DRY, "--max-length", 48, "--gate", "all", "--tokens", 123_456, "--output", out, "--json", *more)
    assert done.code == 0, done
    result = json.loads(done.out.splitlines()[-1])
    assert result["teacher"] == "random:micro-ouro" and result["planned_tokens"] == 123_456
    assert result["steps"] == 2 and 0 < result["filled"] <= 1 and 0 < result["mfu"] < 1
    assert result["teacher_seconds"] < result["seconds_per_step"]
    hours = 123_456 / result["tokens_per_second"] / 3600
    assert result["planned_hours"] == pytest.approx(hours, abs=2e-4)
    assert "tokens/s" in done.out and not out.exists()


def test_random_teachers_and_their_data(cli, tmp_path: Path) -> None:
    assert "did you mean 'micro-ouro'" in cli(*DRY[:2], "random:micro-our", *DRY[3:]).refusal
    assert "reads random tokens" in cli(*DRY, "--data", "x.jsonl").refusal
