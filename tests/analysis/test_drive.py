"""The offline bench's timed pass: what its steady window holds, and what is counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from looped.analysis import drive, offline, worklist
from looped.analysis.bounds import attention_bound, decode_bound
from looped.analysis.profile import idle_share
from looped.gates import ReplayGate
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.request import SamplingParams
from looped.infer.scheduler import Stage
from tests.conftest import Ran
from tests.models import micro_ouro, ouro_config


def an_engine(mode: str = "refill", exits: str = "sync") -> Engine:
    gate = ReplayGate([[2, 3]] * 12)
    return Engine(micro_ouro(), EngineOptions(mode=mode, exits=exits, gate=gate, max_num_seqs=2))


def a_run(engine: Engine, lens: list[int]) -> drive.Run:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lens]
    return drive.run(engine, [(1, 2, 3)] * len(lens), params, None)


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
def test_the_steady_window_opens_at_2w_ends_and_closes_with_the_queue(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ticks = an_engine(mode), itertools.count()
    seen: list[tuple[int, int, int]] = []
    honest = engine.step

    def step() -> list[object]:
        outputs = honest()
        ended = sum(output.finished for output in outputs)
        seen.append((len(outputs), ended, len(engine.scheduler.waiting)))
        return outputs  # type: ignore[return-value]

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(drive.time, "perf_counter", lambda: next(ticks))
    run = a_run(engine, [3, 5, 4, 6, 3, 5, 4, 3, 6, 4, 5, 3])
    done = list(itertools.accumulate(ended for _, ended, _ in seen))
    first = next(i for i, count in enumerate(done) if count >= 4)
    last = next(i for i, (_, _, waiting) in enumerate(seen) if not waiting)
    assert run.steady is not None
    assert run.steady.tokens == sum(count for count, _, _ in seen[first + 1 : last + 1])
    assert run.steady.stats.tokens == run.steady.tokens
    assert run.steady.stats.stages[Stage.CORE].batches <= run.stats.stages[Stage.CORE].batches
    assert run.tokens == 51
    assert run.prefill_seconds is None and run.joules is None


def test_short_lists_have_no_steady_window() -> None:
    assert a_run(an_engine(), [3, 4, 3]).steady is None


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_loop_steps_are_the_sum_of_the_depths(exits: str) -> None:
    run = a_run(an_engine(exits=exits), [4] * 5)
    depths = [depth for _, row in run.outputs for depth in row[1:]]
    assert run.stats.loop_steps == sum(depths) == 5 * (3 + 4 + 4)
    assert run.stats.stages[Stage.CORE].batches >= sum(depths) / 2


def test_the_bench_reports_launches_occupancy_and_the_window(cli: Callable[..., Ran], micro_folder: Path) -> None:
    words = ("--num-requests", 12, "--max-num-seqs", 2, "--output-len", 6, "--input-len", 4, "--repeats", 1)
    ran = cli("bench", "offline", "--model", micro_folder, *words, "--replay-depths", "2:0.5,3:0.5", "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    steps = sum(depth * count for depth, count in enumerate(result["depth_counts"]))
    refill, cb = result["modes"]["refill"], result["modes"]["cb"]
    assert refill["ideal_core_launches"] == steps / 2
    assert refill["occupancy"] == pytest.approx(steps / 2 / refill["launches"]["core"])
    assert cb["ideal_core_launches"] == 12 * 5 * 4 / 2
    assert refill["steady"]["realised"] == pytest.approx(refill["steady"]["speedup"] / refill["steady"]["s_e2e"])
    assert cb["steady"]["speedup"] == 1.0
    assert result["s_dec_attention"] == pytest.approx(result["s_dec"], rel=0.2)
    assert "steady" in ran.out and "launches" in ran.out and "attention" in ran.out
    assert refill["joules_per_token"] is None


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_every_way_to_hear_of_exits(cli: Callable[..., Ran], micro_folder: Path, exits: str) -> None:
    words = ("--num-requests", 3, "--max-num-seqs", 2, "--output-len", 4, "--input-len", 4, "--repeats", 2)
    ran = cli(
        *("bench", "offline", "--model", micro_folder, *words, "--replay-depths", "2:0.5,3:0.5", "--json"),
        *("--exits", exits),
    )
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert result["settings"]["exits"] == exits
    assert result["agreement"] == "no-refill and refill: the same tokens and exit depths"


def test_a_profile_and_latencies(cli: Callable[..., Ran], tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    small = ("--batch", "1,2", "--context", "8", "--prefill", "4,8", "--repeats", "2", "--device", "cpu", "--no-json")
    assert cli("bench", "step", "--random", "micro-huginn", "--max-loops", "3", *small, "--out", step).code == 0
    words = ("--num-requests", 6, "--max-num-seqs", 2, "--output-len", 12, "--input-len", 4, "--repeats", 1)
    ran = cli(
        *("bench", "offline", "--random", "micro-huginn", "--max-loops", "3", *words, "--device", "cpu"),
        *(
            "--replay-depths",
            "2:1",
            "--latencies",
            step,
            "--profile",
            tmp_path / "t.json",
            "--out",
            tmp_path / "o.json",
        ),
    )
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / "o.json").read_text())
    for mode in ("cb", "no-refill", "refill"):
        assert json.loads((tmp_path / f"t-{mode}.json").read_text())["traceEvents"]
        found = result["modes"][mode]
        assert found["of_allowed"] == pytest.approx(found["tok_s"] / found["allowed_tok_s"])
        assert found["gpu_idle"] is None
    assert "that the stages' latencies allow" in ran.out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--exits", "devise"), "did you mean 'device'"),
        (("--exits", "lookahead"), "known one step ahead"),
        (("--replay-threshold", "0.5"), "--replay-threshold"),
        (("--replay-depths", "2:1", "--replay-threshold", "0.5"), "--replay-threshold"),
        (("--record-exits", "x.jsonl", "--modes", "cb"), "cb runs every token at full depth"),
        (("--out", "nowhere/x.json"), "there is no folder"),
        (("--latencies", "nowhere.json"), "cannot be read"),
        (("--random", "micro-ouro"), "one of the two"),
        (("--prompts", "arxiv"), "the context of"),
    ],
)
def test_mistakes(cli: Callable[..., Ran], micro_folder: Path, words: tuple[str, ...], complaint: str) -> None:
    sizes = ("--num-requests", 2, "--max-num-seqs", 2, "--output-len", 4)
    assert complaint in cli("bench", "offline", "--model", micro_folder, *sizes, *words).refusal


def test_attention_in_the_bound() -> None:
    config = ouro_config(max_positions=1 << 20)
    tokens = [(2, 0), (4, 0), (3, 0)]
    assert attention_bound(config, tokens) == pytest.approx(decode_bound(config, 3.0))
    # So long a context leaves attention alone, and only the loop has layers.
    assert attention_bound(config, [(2, 1 << 40)]) == pytest.approx(2.0, rel=1e-3)
    assert attention_bound(config, []) == 1.0


def test_idle_share() -> None:
    assert idle_share([(0, 4), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(6, 10), (0, 7), (1, 2)]) == 0.0
    assert idle_share([]) is None


def test_the_setup_takes_engine_options() -> None:
    model = micro_ouro()
    work = worklist.build(model, 3, input_len=4, output_len=4)
    setup = offline.Setup(model, work, gate="ouro", threshold=0.5, max_num_seqs=2)
    coarse = replace(setup, engine=EngineOptions(exits="device", page_size=4, num_pages=64), kv="last-exited")
    result = offline.measure(coarse, modes=("refill",), repeats=1, show=False)
    assert result.settings["exits"] == "device"
    assert "64 pages of 4" in result.modes["refill"].engine
