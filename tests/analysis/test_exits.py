"""Recorded exits: the same depths as a run decides, kept in a file, and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from looped.analysis import exit_files
from looped.analysis.exit_files import Meta, Recorded, exit_depths
from looped.analysis.recorder import record
from looped.analysis.replay import replayed
from looped.analysis.worklist import WorkItem, WorkList, build
from looped.errors import LoopedError
from looped.gates import ArgmaxStabilityGate, ConvergenceGate, CosineGate, DelayGate, Gate, KLGate, OuroGate, get_gate
from looped.infer import LLM, SamplingParams
from looped.model import LoopedLM
from tests.conftest import Ran
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

PROMPTS = [[5, 9, 3], [7, 1, 8, 2, 30]]


def dense_run(model: LoopedLM, gate: Gate, threshold: float) -> tuple[WorkList, list[list[int]]]:
    """Answers and depths of a run in which every token writes all planes, as in the recorder's pass."""
    engine = LLM(model, kv="depth", compute="dense", gate=gate, threshold=threshold)
    found = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    items = [WorkItem(tuple(p), 9, tuple(done.token_ids)) for p, done in zip(PROMPTS, found, strict=True)]
    return WorkList(tuple(items), "test"), [done.depths[1:] for done in found]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["ouro", "lookahead", "convergence", "delayed", "cosine", "kl"])
def test_recorded_depths_are_those_of_a_run(kind: str, threshold: float) -> None:
    model = micro_huginn(max_loops=6, trained_loops=6) if kind in ("convergence", "delayed") else micro_ouro()
    gates: dict[str, Callable[[], Gate]] = {
        "ouro": OuroGate,
        "lookahead": lambda: random_lookahead(model),
        "convergence": ConvergenceGate,
        "delayed": lambda: DelayGate(ConvergenceGate()),
        "cosine": CosineGate,
        "kl": KLGate,
    }
    gate = gates[kind]().bind(model)
    work, depths = dense_run(model, gate, threshold)
    recorded = record(model, gate, work)
    assert recorded.offsets_N.tolist() == [0, 8, 16]
    assert [list(exits) for exits in recorded.exits(threshold)] == depths
    assert recorded.meta.min_depth == gate.min_depth


def test_stable_predictions_are_counted() -> None:
    gate = ArgmaxStabilityGate()
    work, depths = dense_run(micro_ouro(), gate, 1)
    recorded = record(micro_ouro(), gate, work)
    assert recorded.meta.rule == "count" and recorded.meta.threshold == 5
    assert [list(exits) for exits in recorded.exits(1)] == depths
    assert len({depth for exits in depths for depth in exits}) > 1


def test_gates_that_look_back_are_refused() -> None:
    model = micro_ouro()
    work = WorkList((WorkItem((1, 2), 2, (3, 4)),), "test")
    with pytest.raises(LoopedError, match="--record-exits"):
        record(model, random_pre_loop(model).bind(model), work)
    with pytest.raises(LoopedError, match="--record-exits"):
        record(micro_huginn(), get_gate("kl", micro_huginn()), work)
    with pytest.raises(LoopedError, match="without a reference answer"):
        record(model, OuroGate().bind(model), WorkList((WorkItem((1, 2), 2),), "test"))


def test_rules() -> None:
    nan = np.nan
    rising = np.array([[nan, 0.2, 0.6, 0.9], [0.5, 0.6, 0.7, 0.8]], dtype=np.float32)
    assert exit_depths(rising, "at-least", 1, 0.5).tolist() == [3, 1]
    assert exit_depths(rising, "at-least", 2, 0.5).tolist() == [3, 2]
    assert exit_depths(rising, "at-least", 1, 1.0).tolist() == [4, 4]
    assert exit_depths(rising, "at-least", 1, 0.0).tolist() == [2, 1]
    falling = np.array([[nan, 0.4, 0.2, 0.1]], dtype=np.float32)
    assert exit_depths(falling, "below", 1, 0.3).tolist() == [3]
    assert exit_depths(falling, "below", 1, 0.0).tolist() == [4]
    assert exit_depths(np.array([[0.5, 0.1]], dtype=np.float32), "below", 1, 0.5).tolist() == [2]


def a_recording() -> Recorded:
    values = np.array([[0.1, 0.6, 0.7, 0.9], [0.7, 0.8, 0.8, 0.9], [0.1, 0.1, 0.1, 0.1]], dtype=np.float32)
    meta = Meta(exit_files.FORMAT, "m", "r", "ouro", "at-least", 1, 4, 0.5, "test")
    return Recorded(np.array([0, 2, 3]), values, meta)


def a_list(*output_lens: int) -> WorkList:
    return WorkList(tuple(WorkItem((1, 2), n) for n in output_lens), "test")


def test_a_file_is_read_back_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "exits.npz"
    exit_files.write(path, a_recording())
    again = exit_files.read(path)
    assert again.meta == a_recording().meta
    assert again.exits(0.5) == [(2, 1), (4,)]
    depths, note = replayed(str(path), a_list(3, 4, 2), 4, None, 0)
    assert depths == [[4, 2, 1], [4, 4, 4, 4], [4, 2]]  # past its end a list runs at full depth; then it starts again
    assert "0.5" in note
    assert replayed(str(path), a_list(3, 2), 4, 0.65, 0)[0] == [[4, 3, 1], [4, 4]]
    with pytest.raises(LoopedError, match="the model runs 3"):
        replayed(str(path), a_list(3), 3, None, 0)


def test_lists_and_distributions() -> None:
    assert replayed("[[2,3],[1]]", a_list(3, 3), 4, None, 0)[0] == [[4, 2, 3], [4, 1, 4]]
    drawn, note = replayed("2:0.5,4:0.5", a_list(*[40] * 50), 4, None, 3)
    assert drawn == replayed("2:0.5,4:0.5", a_list(*[40] * 50), 4, None, 3)[0]
    counts = np.bincount([depth for row in drawn for depth in row], minlength=5)
    assert counts[[0, 1, 3]].tolist() == [0, 0, 0]
    assert counts.sum() == 2000
    assert abs(counts[2] - 1000) < 5 * 22.4  # five standard deviations of 2,000 fair draws
    assert "seed 3" in note


@pytest.mark.parametrize("text", ["2:0.5", "5:1", "0:1", "two:1", "2:1.5,3:-0.5", "", "[[5]]", "[[0]]", "[2,"])
def test_impossible_depths_are_refused(text: str) -> None:
    with pytest.raises(LoopedError, match="--replay-depths"):
        replayed(text, a_list(3), 4, None, 0)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK")
    for name in ("x.npz", "nowhere.npz"):
        with pytest.raises(LoopedError, match="cannot be read"):
            replayed(str(tmp_path / name), a_list(3), 4, None, 0)
    exit_files.write(tmp_path / "y.npz", Recorded(np.array([0, 2]), a_recording().values_TR, a_recording().meta))
    with pytest.raises(LoopedError, match="damaged"):
        exit_files.read(tmp_path / "y.npz")


def test_the_command_and_the_bench_that_replays_it(cli: Callable[..., Ran], tmp_path: Path) -> None:
    path, lists = tmp_path / "exits.npz", tmp_path / "exits.jsonl"
    ran = cli("record", "--num-requests", 2, "--out", path, "--json")
    assert ran.code == 0, ran.err
    assert "mean depth" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["meta"]["gate"] == "ouro"
    bench = ("bench", "offline", "--num-requests", 2, "--repeats", 1, "--output-len", 5, "--json", "--device", "cpu")
    words = ("--modes", "refill", "--replay-depths", path, "--replay-threshold", 0.5, "--record-exits", lists)
    ran = cli(*bench, *words)
    assert ran.code == 0, ran.err
    written = [json.loads(line)["depths"] for line in lists.read_text().splitlines()]
    assert [tuple(depths[1:]) for depths in written] == [exits[:4] for exits in exit_files.read(path).exits(0.5)]
    again = json.loads(cli(*bench, "--replay-depths", lists).out.splitlines()[-1])
    assert again["depth_counts"] == json.loads(ran.out.splitlines()[-1])["depth_counts"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--gate", "pre-loop"), "cannot be recorded in one pass"),
        (("--out", "nowhere/x.npz"), "there is no folder"),
        (("--prompts", "nowhere.jsonl"), "does not exist"),
        (("--random", "micro-ouro"), "without a reference answer"),
    ],
)
def test_mistakes(cli: Callable[..., Ran], tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    ran = cli("record", "--num-requests", 1, "--out", tmp_path / "x.npz", *words)
    assert complaint in ran.refusal


def test_word_problems_have_their_solutions() -> None:
    from looped.model import load

    items = build(load("tiny-ouro", device="cpu"), 2).items
    assert all(len(item.reference) == item.output_len for item in items)
    assert torch.tensor(items[0].reference).min() >= 0
