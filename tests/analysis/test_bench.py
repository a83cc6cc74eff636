"""`looped bench offline` on a micro model: what it reports, and that it catches schedulers that disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looped.analysis import offline, worklist
from looped.analysis.bounds import end_to_end_bound
from looped.analysis.drive import Run
from looped.gates import ReplayGate
from looped.infer.engine import Engine
from looped.model import load, save
from tests.conftest import Ran
from tests.models import micro_ouro

SIZES = ("--num-requests", "5", "--max-num-seqs", "2", "--output-len", "6", "--repeats", "2")
SMALL = (*SIZES, "--input-len", "4")


def test_the_json_object(cli: Callable[..., Ran], micro_folder: Path) -> None:
    ran = cli("bench", "offline", "--model", micro_folder, *SMALL, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out.splitlines()[-1])
    assert list(result["modes"]) == ["cb", "no-refill", "refill"]
    assert all(mode["tok_s"] > 0 and len(mode["runs"]) == 2 for mode in result["modes"].values())
    assert result["tokens"] == 5 * 6
    assert sum(result["depth_counts"]) == 5 * 5
    assert 1 < result["mean_depth"] < result["mean_depth_with_first"] < 4
    assert 0 < result["prefill_share"] < 1
    assert result["s_e2e"] == pytest.approx(end_to_end_bound(result["prefill_share"], result["s_dec"]))
    assert result["realised"] == pytest.approx(result["modes"]["refill"]["speedup"] / result["s_e2e"])
    assert result["decode_only"]["s_dec"] > result["s_dec"]
    assert result["settings"]["threshold"] == 0.6
    assert result["agreement"] == "no-refill and refill: the same tokens and exit depths"


def test_the_table(cli: Callable[..., Ran], micro_folder: Path) -> None:
    out = cli("bench", "offline", "--model", micro_folder, *SMALL).out
    for word in ("cb", "no-refill", "refill", "S_dec", "S_e2e", "threads", "micro-ouro", "ragged"):
        assert word in out


def test_replayed_depths(cli: Callable[..., Ran], micro_folder: Path) -> None:
    ran = cli("bench", "offline", "--model", micro_folder, *SMALL, "--replay-depths", "2:1", "--json")
    result = json.loads(ran.out.splitlines()[-1])
    assert result["mean_depth"] == 2.0
    assert result["mean_depth_with_first"] == pytest.approx(2 + 2 / 6)  # one token in six is a prefill's, at R = 4
    assert "seed 0" in ran.out


def test_a_hazard_gate_that_never_exits_is_measured_at_a_half(cli: Callable[..., Ran], tmp_path: Path) -> None:
    from looped.model import save

    save(micro_ouro(exit_threshold=1.0), tmp_path / "m", "float32")
    ran = cli("bench", "offline", "--model", tmp_path / "m", *SMALL, "--json", "--modes", "refill")
    assert "measured at 0.5" in ran.out
    result = json.loads(ran.out.splitlines()[-1])
    assert result["settings"]["threshold"] == 0.5
    assert result["s_e2e"] is None  # without cb there is no prefill share


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--gate", "lookahed"), "did you mean 'lookahead'"),
        (("--kv", "raged"), "did you mean 'ragged'"),
        (("--threshold", "2"), "outside the range"),
        (("--modes", "refil"), "did you mean 'refill'"),
        (("--modes", "cb,cb"), "each scheduler once"),
        (("--repeats", "0"), "--repeats"),
        (("--replay-depths", "9:1"), "between 1 and 4"),
        (("--replay-depths", "2:1", "--gate", "ouro"), "takes the place of the gate"),
        (("--prompts", "nowhere.jsonl"), "does not exist"),
        (("--prompts", "x.jsonl", "--input-len", "3"), "one of the two"),
    ],
)
def test_mistakes(cli: Callable[..., Ran], micro_folder: Path, words: tuple[str, ...], complaint: str) -> None:
    assert complaint in cli("bench", "offline", "--model", micro_folder, *SIZES, *words).refusal


def test_logits_that_are_not_finite(cli: Callable[..., Ran], micro_folder: Path, tmp_path: Path) -> None:
    model = load(micro_folder)
    model.norm.weight.fill_(torch.nan)
    save(model, tmp_path)
    ran = cli("bench", "offline", "--model", tmp_path, *SIZES)
    assert ran.code == 2 and "not finite" in ran.err.splitlines()[-1]


def test_a_negative_seed(cli: Callable[..., Ran], micro_folder: Path) -> None:
    assert cli("bench", "offline", "--model", micro_folder, *SIZES, "--input-len", 3, "--seed", -1).code == 0


def setup(**changes: object) -> offline.Setup:
    model = micro_ouro()
    work = worklist.build(model, 4, input_len=4, output_len=6)
    values = {"model": model, "work": work, "gate": "ouro", "threshold": 0.5, "max_num_seqs": 2} | changes
    return offline.Setup(**values)  # type: ignore[arg-type]


def test_schedulers_that_disagree_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = offline.run

    def lies(engine: Engine, *args: Any) -> Run:
        done = honest(engine, *args)
        if engine.options.mode == "refill":
            done.outputs[1][1][2] = 5 - done.outputs[1][1][2]
        return done

    monkeypatch.setattr(offline, "run", lies)
    with pytest.raises(RuntimeError, match="timing must never change output"):
        offline.measure(setup(), repeats=1, show=False)


def test_rounds_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = offline.run, []

    def drifts(engine: Engine, *args: Any) -> Run:
        done = honest(engine, *args)
        calls.append(engine)
        done.outputs[0][0][0] = len(calls)
        return done

    monkeypatch.setattr(offline, "run", drifts)
    with pytest.raises(RuntimeError, match="two rounds"):
        offline.measure(setup(), modes=("cb",), repeats=2, show=False)


def test_time_ends_the_rounds() -> None:
    assert offline.measure(setup(), modes=("refill",), repeats=50, max_seconds=0.0, show=False).rounds == 1


def test_full_depth_everywhere_leaves_nothing_to_gain() -> None:
    gate = ReplayGate([[4] * 6] * 4)
    result = offline.measure(setup(gate=gate, threshold=None), repeats=1, show=False)
    assert result.mean_depth == result.mean_depth_with_first == 4.0
    assert result.s_dec == result.s_e2e == 1.0
