"""The benches on a GPU: device times, energy, idle share, and engines that fit beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Ran

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("shape", ["micro-ouro", "micro-huginn"])
@pytest.mark.parametrize("words", [(), ("--kv", "ragged"), ("--exits", "device")])
def test_step(cli: Callable[..., Ran], shape: str, words: tuple[str, ...]) -> None:
    small = ("--batch", "1,8", "--context", "64,256", "--prefill", "64", "--repeats", "4", "--max-loops", "4")
    ran = cli("bench", "step", "--random", shape, *small, *words, "--kernels")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert not result["left_out"]
    assert all(point["ratio"] > 0.9 for point in result["points"] if point["stage"] == "core")
    assert result["settings"]["capture_seconds"] > 0
    assert result["kernels"]


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_offline(cli: Callable[..., Ran], tmp_path: Path, exits: str) -> None:
    words = ("--num-requests", 40, "--max-num-seqs", 4, "--prompts", "alpaca", "--output-len", 40, "--max-len", "1024")
    ran = cli(
        *("bench", "offline", "--random", "micro-ouro", *words, "--exits", exits, "--repeats", 2, "--json"),
        *("--replay-depths", "2:0.6,3:0.35,4:0.05", "--profile", tmp_path / "trace.json"),
    )
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert 0 < result["prefill_share"] < 1
    for mode in result["modes"].values():
        assert 0 <= mode["gpu_idle"] < 1
        assert mode["steady"]["tok_s"] > 0
        assert 0 < mode["steady"]["prefill_share"] < 1
        assert mode["joules_per_token"] is None or mode["joules_per_token"] >= 0
    assert "the given exit depths in all of them" in result["agreement"]
