"""`looped bench step` on micro shapes: what it reports, and what other commands read of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looped.analysis import latency
from looped.analysis.modelled import mean_context, modelled
from looped.analysis.simulate import Workload
from looped.analysis.stepper import Stepper
from looped.errors import LoopedError
from looped.infer.options import EngineOptions
from looped.infer.scheduler import Limits
from tests.conftest import Ran
from tests.models import micro_huginn, micro_ouro

SMALL = ("--batch", "1,3", "--context", "16,32", "--prefill", "8,24", "--repeats", "2", "--device", "cpu")


def test_the_json_object_and_the_files(cli: Callable[..., Ran], tmp_path: Path) -> None:
    out, drawn = tmp_path / "step.json", tmp_path / "step.svg"
    ran = cli("bench", "step", "--random", "micro-ouro", *SMALL, "--out", out, "--plot", drawn)
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert result == json.loads(out.read_text())
    stages = [(p["stage"], p["batch"], p["context"], p["depth"]) for p in result["points"]]
    assert len(stages) == len(set(stages)) == 2 * 2 * (4 + 3) + 2  # four depths, three stages, two prefills
    for point in result["points"]:
        assert point["seconds"] > 0
        assert point["ratio"] == pytest.approx(point["seconds"] / point["floor"])
    assert len(result["depth_fits"]) == 4
    assert set(result["step_fit"]["saturation"]) == {"16", "32"}
    assert result["bytes_s"] > 0 and result["flops_s"] > 0
    for word in ("core step", "whole decode step", "prelude", "coda", "prefill", "ceilings", "tau_0", "B*"):
        assert word in ran.out
    root = ET.fromstring(drawn.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    latencies = latency.read(out)
    core = {(p["batch"], p["context"]): p["seconds"] for p in result["points"] if p["stage"] == "core"}
    assert latencies("core", 3, 32) == pytest.approx(core[3, 32])
    assert latencies("core", 2, 32) == pytest.approx((core[1, 32] + core[3, 32]) / 2)


def test_kernels(cli: Callable[..., Ran]) -> None:
    ran = cli("bench", "step", "--random", "micro-ouro", *SMALL[2:], "--batch", "2", "--kernels")
    kernels = json.loads(ran.out.splitlines()[-1])["kernels"]
    assert {(kernel["batch"], kernel["context"]) for kernel in kernels} == {(2, 16), (2, 32)}
    assert any("linear" in kernel["name"] or "mm" in kernel["name"] for kernel in kernels)
    assert "kernels of a whole decode step" in ran.out


@pytest.mark.parametrize("words", [("--kv", "ragged"), ("--kv", "last-exited"), ("--exits", "device")])
def test_other_layouts_and_the_fused_step(cli: Callable[..., Ran], words: tuple[str, ...]) -> None:
    shape = "micro-ouro" if "--exits" in words else "micro-huginn"
    ran = cli("bench", "step", "--random", shape, "--max-loops", "3", *SMALL, *words)
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    stages = {point["stage"] for point in result["points"]}
    assert stages == ({"core", "decode", "prefill"} if result["fused"] else set(latency.STAGES))


@pytest.mark.parametrize(("make", "exits"), [(micro_ouro, "sync"), (micro_ouro, "device"), (micro_huginn, "sync")])
def test_every_pass_is_a_token_of_every_row(make: Callable[[], Any], exits: str) -> None:
    options = EngineOptions(exits=exits, max_num_seqs=3, min_coda_batch=1, preemption="off")
    stepper = Stepper(make(), options, repeats=4)
    for depth in (1, 2, stepper.max_loops):
        assert stepper.settle(3, 20)
        took = stepper.measure(20, depth)
        state = stepper.engine.runner.state
        start = max(1, 19 - stepper.passes // 2)
        assert state.position[1:4].tolist() == [start + stepper.passes] * 3
        assert state.index[1:4].tolist() == [1 + stepper.passes] * 3
        assert 0 < took.core.seconds < took.decode.seconds
    stepper.clear()
    assert stepper.engine.kv.usage().pages_in_use == 0


def test_what_does_not_fit_is_left_out(cli: Callable[..., Ran]) -> None:
    words = ("--batch", "1,2", "--context", "16,90", "--prefill", "8,200", "--repeats", "2", "--max-len", "64")
    ran = cli("bench", "step", "--random", "micro-ouro", "--device", "cpu", *words)
    result = json.loads(ran.out.splitlines()[-1])
    assert result["left_out"] == ["batch 1 at context 90", "batch 2 at context 90", "prefill of 200"]
    assert {point["context"] for point in result["points"]} == {0, 16}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--random", "ouro-1.4"), "did you mean 'ouro-1.4b'"),
        (("--random", "micro-ouro", "--model", "tiny-ouro"), "one of the two"),
        (("--random", "micro-ouro", "--batch", "0"), "--batch"),
        (("--random", "micro-ouro", "--depth", "5"), "between 1 and 4"),
        (("--random", "micro-ouro", "--repeats", "0"), "--repeats"),
        (("--random", "micro-ouro", "--max-len", "1"), "--max-len"),
        (("--random", "micro-ouro", "--max-len", "5000"), "context of 4096"),
        (("--random", "micro-ouro", "--kv", "raged"), "did you mean 'ragged'"),
        (("--out", "nowhere/x.json"), "there is no folder"),
    ],
)
def test_mistakes(cli: Callable[..., Ran], words: tuple[str, ...], complaint: str) -> None:
    small = ("--context", "8", "--prefill", "8", "--device", "cpu")
    assert complaint in cli("bench", "step", *small, *words).refusal


def test_latencies_between_and_beyond() -> None:
    found = latency.Latencies({"core": {100: {1: 1.0, 4: 2.5, 8: 4.5}, 200: {1: 2.0, 4: 5.0, 8: 9.0}}})
    assert found("core", 4, 100) == 2.5
    assert found("core", 6, 100) == 3.5
    assert found("core", 16, 100) == 8.5
    assert found("core", 4, 150) == 3.75
    assert found("core", 4, 300) == 7.5
    assert found("core", 4, 50) == 2.5
    assert latency.Latencies({"coda": {128: {4: 2.0}}})("coda", 9, 1000) == 2.0


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}'])
def test_files_that_hold_no_latencies(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(LoopedError, match="latencies"):
        latency.read(tmp_path / "x.json")


def test_a_schedule_with_given_latencies() -> None:
    """Two requests, W = 2, cb at R = 2: one prefill of 6 tokens, then two cohorts of prelude, two steps and coda."""
    work = Workload((4, 2), ((1, 1), (2, 1)))
    assert mean_context(work) == (5 + 6 + 3 + 4) / 4
    flat = {"prelude": {1: {1: 0.5}}, "core": {1: {1: 3.0, 2: 4.0}}, "coda": {1: {1: 0.25}}, "prefill": {0: {6: 7.0}}}
    limits = Limits.of(max_num_seqs=2)
    found = modelled("cb", limits, work, 2, latency.Latencies(flat))
    assert found.stage_seconds == {"prefill": 7.0, "prelude": 1.0, "core": 16.0, "coda": 0.5}
    refill = modelled("refill", limits, work, 2, latency.Latencies(flat))
    assert refill.stage_seconds["core"] < 16.0


def test_random_weights_are_of_the_shape() -> None:
    from looped.analysis.shapes import random_model, shape

    model = random_model(shape("micro-huginn", max_loops=4, max_len=64), "micro-huginn", "cpu", "bfloat16")
    assert (model.config.max_loops, model.config.max_positions) == (4, 64)
    assert model.head.weight is model.embed.weight
    spread = model.core_blocks[0].mlp.down.weight.float().numpy().std()
    assert np.isclose(spread, 0.02, rtol=0.1)
