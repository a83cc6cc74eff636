"""`looped trace`: the printed traces, runs on given exits, runs of the engine, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.analysis import depths, worklist
from looped.analysis.printed import NUM_STAGES, PRESETS
from looped.analysis.simulate import Workload, simulate, sums
from looped.infer import LLM, SamplingParams
from looped.infer.scheduler import Limits, Stage
from looped.model import load
from tests.conftest import REPOSITORY, Ran
from tests.infer.test_scheduler_traces import HUGINN_REFILL, OURO_NO_REFILL, OURO_REFILL, OURO_REFILL_K16

PRINTED = {
    "table-2-ouro": OURO_REFILL,
    "table-2-huginn": HUGINN_REFILL,
    "table-3-no-refill": OURO_NO_REFILL,
    "table-3-refill": OURO_REFILL_K16,
}
LISTS = "[[2,3],[4]]"


def as_json(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran
    result: dict[str, Any] = json.loads(ran.out)
    return result


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_gives_the_rows_that_the_paper_prints(cli: Callable[..., Ran], name: str) -> None:
    result = as_json(cli("trace", "--preset", name, "--format", "json"))
    rows, printed = result["rows"], PRINTED[name]
    assert len(rows) == len(printed) == NUM_STAGES
    for row, (stage, batch, detail, exits, queues) in zip(rows, printed, strict=True):
        after = row["queues"]
        shown = [after["prelude"]] if name == "table-3-no-refill" else [after["core"], after["coda"]]
        got = (row["stage"], row["batch"], row["exits"], (*shown, after["waiting"]))
        assert (row["step"], got) == (row["step"], (stage, batch, sum(exits.values()), queues))
        if stage == "prefill":
            assert row["prompt_tokens"] == detail
        if stage == "core":
            assert {int(step): num for step, num in row["steps"].items()} == detail


def test_the_three_ouro_traces_come_from_one_list_of_exits() -> None:
    work = PRESETS["table-2-ouro"].work
    assert work is PRESETS["table-3-no-refill"].work is PRESETS["table-3-refill"].work
    # How many of the first three tokens leave at 2, 3 and 4: table 3, left.
    counts = [Counter(exits[token] for exits in work.exits[:64]) for token in range(3)]
    assert counts == [{2: 1, 3: 29, 4: 34}, {2: 13, 3: 39, 4: 12}, {2: 17, 3: 39, 4: 8}]


def test_a_preset_is_a_workload_that_other_flags_change(cli: Callable[..., Ran]) -> None:
    base = ("trace", "--preset", "table-2-ouro", "--format", "json")
    rows = as_json(cli(*base, "--min-coda-batch", 16))["rows"]
    assert rows == as_json(cli("trace", "--preset", "table-3-refill", "--format", "json"))["rows"]
    rows = as_json(cli(*base, "--mode", "no-refill"))["rows"]
    assert rows == as_json(cli("trace", "--preset", "table-3-no-refill", "--format", "json"))["rows"]
    assert len(as_json(cli(*base, "--stages", 50))["rows"]) == 50
    short = as_json(cli(*base, "--requests", 3, "--output-len", 2, "--max-loops", 3))
    assert short["settings"]["num_requests"] == 3
    assert max(int(step) for row in short["rows"] for step in row["steps"]) == 3


def test_the_table(cli: Callable[..., Ran]) -> None:
    lines = cli("trace", "--preset", "table-2-ouro").out.splitlines()
    assert lines[0].startswith("refill, W 64, M 8192, S 8, K 1, R 4; 256 requests (workload of table 2")
    assert lines[2:5] == [
        " #  stage     B  detail              exits  Q_R  Q_C  Q_P",
        " 0  init                                      0    0  256",
        " 1  prefill  21  8192 prompt tokens           0    0  235",
    ]
    assert lines[4 + 1] == " 2  prelude  20  after prefill               20    0  235"
    assert lines[3 + 11] == "11  core     64  r1:1 r3:63             29   35   29  192"
    assert lines[-2:] == [
        "launches: prefill 3, prelude 7, core 6, coda 4; 18382 prompt tokens, 95 exits",
        "core rows 384, which fill 6.0 launches of 64; occupancy 100.0%",
    ]
    out = cli("trace", "--preset", "table-3-no-refill").out
    assert "Q_D  Q_P" in out and "Q_R" not in out and "occupancy 78.0%" in out
    assert out.count("Q_C >=") == 0 and cli("trace", "--preset", "table-3-refill").out.count("Q_C >= 16") == 4


def test_exits_by_list(cli: Callable[..., Ran], tmp_path: Path) -> None:
    run = ("trace", "--format", "json", "--exits")
    wanted = as_json(cli(*run, LISTS))
    assert [(row["stage"], row["batch"]) for row in wanted["rows"]][:4] == [
        ("prefill", 2),
        ("prelude", 2),
        ("core", 2),
        ("core", 2),
    ]
    assert wanted["totals"] == {
        "launches": {"prefill": 1, "prelude": 2, "core": 5, "coda": 3},
        "prompt_tokens": 256,
        "exits": 3,
        "core_rows": 9,
        "ideal_core_launches": 9 / 64,
        "occupancy": 9 / (5 * 64),
    }
    files = {
        "a.json": LISTS,
        "b.jsonl": "[2, 3]\n\n[4]\n",
        "c.jsonl": '{"text": "", "depths": [4, 2, 3]}\n{"depths": [4, 4]}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert as_json(cli(*run, tmp_path / name))["rows"] == wanted["rows"]
    assert as_json(cli(*run, "[2,3]"))["totals"]["core_rows"] == 5
    assert as_json(cli(*run, LISTS, "--requests", 5))["totals"]["core_rows"] == 9 + 9 + 5
    assert as_json(cli(*run, LISTS, "--output-len", 2))["totals"]["core_rows"] == 2 + 4
    assert as_json(cli(*run, LISTS, "--output-len", 3))["totals"]["core_rows"] == 5 + 8  # past the list: full depth
    assert as_json(cli(*run, LISTS, "--output-len", 1))["totals"]["launches"] == {"prefill": 1}
    assert as_json(cli(*run, LISTS, "--prompt-len", "100,28"))["totals"]["prompt_tokens"] == 128
    assert as_json(cli(*run, LISTS, "--mode", "cb"))["totals"]["core_rows"] == 12


def test_exits_by_distribution(cli: Callable[..., Ran]) -> None:
    run = ("trace", "--format", "json", "--exits", "1:0.2,2:0.5,4:0.3", "--requests", 200, "--output-len", 11)
    run = (*run, "--max-num-seqs", 16)
    first, again = as_json(cli(*run, "--seed", 3)), as_json(cli(*run, "--seed", 3))
    assert first == again != as_json(cli(*run, "--seed", 4))
    assert first["totals"]["exits"] == 2000
    assert 2.4 * 2000 - 300 < first["totals"]["core_rows"] < 2.4 * 2000 + 300  # 2.4 on average, 50 a standard deviation
    cohorts = as_json(cli(*run, "--mode", "no-refill"))["totals"]["occupancy"]
    assert first["totals"]["occupancy"] > 0.9 > 0.7 > cohorts  # refill keeps the batch full until requests run out
    drawn = depths.draw({1: 0.5, 4: 0.5}, 30, 100, seed=0)
    assert 1300 < sum(exits.count(1) for exits in drawn) < 1700


def test_defaults_of_the_paper(cli: Callable[..., Ran]) -> None:
    run = ("trace", "--exits", "uniform", "--format", "json")
    ouro, huginn = as_json(cli(*run))["settings"], as_json(cli(*run, "--no-fully-looped"))["settings"]
    limits = ("max_num_seqs", "max_num_batched_tokens", "min_free_slots", "min_coda_batch", "max_loops")
    assert [ouro[name] for name in limits] == [64, 8192, 8, 1, 4]
    assert [huginn[name] for name in limits] == [64, 8192, 8, 16, 16]


exit_lists = st.lists(st.lists(st.integers(1, 4), max_size=5).map(tuple), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(exits=exit_lists, mode=st.sampled_from(["cb", "no-refill", "refill"]), seqs=st.integers(1, 4), data=st.data())
def test_the_sums_are_those_of_the_exits(
    exits: list[tuple[int, ...]], mode: str, seqs: int, data: st.DataObject
) -> None:
    coda_batch = data.draw(st.integers(1, seqs))
    limits = Limits.of(seqs, 16, min_coda_batch=coda_batch)
    work = Workload(tuple(data.draw(st.integers(1, 40)) for _ in exits), tuple(exits))
    rows = simulate(mode, limits, work, 4)
    totals = sums(rows, seqs)
    passes = [depth for request in exits for depth in request]
    assert totals.exits == len(passes)
    assert totals.core_rows == (4 * len(passes) if mode == "cb" else sum(passes))
    assert totals.prompt_tokens == sum(work.prompt_lens)
    assert all(row.batch <= seqs for row in rows)
    assert (rows[-1].prelude, rows[-1].core, rows[-1].coda, rows[-1].waiting) == (0, 0, 0, 0)
    assert sum(row.batch for row in rows if row.stage is Stage.CODA) == len(passes)


def test_a_run_without_a_model_imports_no_torch() -> None:
    for words in (["--preset", "table-2-ouro"], ["--exits", "1:0.5,3:0.5", "--format", "json"], ["--exits", LISTS]):
        code = f"from looped.cli import main; assert main({['trace', *words]!r}) == 0; import sys; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
        assert not {"torch", "numpy", "yaml"} & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "give --exits"),
        (("--preset", "table-2-oro"), "did you mean 'table-2-ouro'"),
        (("--exits", "1:0.5"), "sum to 1"),
        (("--exits", "deep"), "such as 2:0.5"),
        (("--exits", "5:1"), "between 1 and 4, got 5"),
        (("--exits", "5:1", "--max-loops", "8", "--requests", "0"), "--requests must be at least 1"),
        (("--exits", "[[2,5]]"), "between 1 and 4, got 5"),
        (("--exits", "[[2,0]]"), "between 1 and 4, got 0"),
        (("--exits", "[[2,"), "--exits is not valid JSON"),
        (("--exits", "[]"), "must hold lists"),
        (("--exits", '[["2"]]'), "must hold lists"),
        (("--exits", "[[true]]"), "must hold lists"),
        (("--exits", '{"depth": [2]}'), "must hold lists"),
        (("--exits", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("--exits", LISTS, "--prompt-len", "1,2,3", "--requests", "2"), "3 numbers for 2 requests"),
        (("--exits", LISTS, "--prompt-len", "0"), "--prompt-len must be at least 1"),
        (("--exits", LISTS, "--output-len", "0"), "--output-len must be at least 1"),
        (("--exits", LISTS, "--stages", "0"), "--stages must be at least 1"),
        (("--exits", LISTS, "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        (("--exits", LISTS, "--max-num-seqs", "4", "--min-coda-batch", "5"), "would never be met"),
        (("--exits", LISTS, "--mode", "refil"), "did you mean 'refill'"),
        (("--exits", LISTS, "--gate", "ouro"), "--gate is for a run with --model"),
        (("--model", "tiny-ouro", "--exits", LISTS), "--exits is for a run without --model"),
        (("--model", "tiny-oro"), "tiny-ouro"),
        (("--model", "tiny-ouro", "--prompt", "hi", "--prompt-len", "3"), "one of the two"),
        (("--model", "tiny-ouro", "--prompt-len", "3,4"), "one number with --model"),
    ],
)
def test_mistakes(cli: Callable[..., Ran], words: tuple[str, ...], complaint: str) -> None:
    assert complaint in cli("trace", *words).refusal


@pytest.mark.parametrize("mode", ["cb", "no-refill", "refill"])
def test_the_engine_runs_the_schedule_of_its_exits(cli: Callable[..., Ran], micro_folder: Path, mode: str) -> None:
    """Its rows are those of the scheduler alone on the exits that the engine reports."""
    sizes = ("--requests", 5, "--prompt-len", 4, "--output-len", 6, "--max-num-seqs", 3)
    ran = cli("trace", "--model", micro_folder, *sizes, "--mode", mode, "--format", "json")
    result = as_json(ran)
    model = load(micro_folder)
    work = worklist.build(model, 5, input_len=4, output_len=6)
    llm = LLM(model, mode, gate="ouro", threshold=0.6, max_num_seqs=3)
    done = llm.generate(
        [item.prompt_ids for item in work.items], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    )
    exits = tuple(tuple(one.depths[1:]) for one in done)
    assert result["totals"]["core_rows"] == sum(map(sum, exits))
    rows = simulate(mode, Limits.of(3), Workload((4,) * 5, exits), 4)
    assert len(rows) == len(result["rows"])
    for row, got in zip(rows, result["rows"], strict=True):
        assert (row.stage, row.batch, row.exits) == (got["stage"], got["batch"], got["exits"])
        assert dict(row.steps) == {int(step): num for step, num in got["steps"].items()}
        assert (row.core, row.coda, row.waiting) == tuple(got["queues"][name] for name in ("core", "coda", "waiting"))


def test_the_engine_on_a_text(cli: Callable[..., Ran]) -> None:
    words = ("--prompt", "Q: What is 2 plus 3?\nA:", "--requests", 3, "--output-len", 3, "--max-num-seqs", 2)
    out = cli("trace", "--model", "tiny-ouro", *words, "--stages", 6).out
    assert out.startswith("refill, W 2, M 8192, S 1, K 1, R 4; 3 requests (tiny-ouro, ragged layout, ouro gate at 0.5)")
    assert out.count("\n6  ") == 1 and "\n7  " not in out
