"""The verb: table, JSON, files, several processes, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looped.eval import report
from tests.conftest import Ran
from tests.eval.conftest import ROWS

pytest.importorskip("lm_eval")

Cli = Callable[..., Ran]
SMALL = ("--limit", 2, "--max-gen-toks", 4, "--dtype", "float64", "--device", "cpu")


def test_a_grid_is_one_table_and_one_object(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--kv", "ragged,shared", "--gate", "none,ouro", "--threshold", "0.5,0.99", "--output", out, "--json")
    ran = cli("eval", "wordmath,wordmath-drills", "--model", checkpoint, *words, *SMALL)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert lines[0].split() == "task kv gate q / depth n strict flexible mean depth tok/s".split()
    rows = [line.split() for line in lines[2:14]]
    assert [row[:4] for row in rows[:3]] == [
        ["wordmath", "ragged", "-", "4"],
        ["wordmath", "ragged", "ouro", "0.5"],
        ["wordmath", "ragged", "ouro", "0.99"],
    ]
    assert [row[0] for row in rows] == ["wordmath"] * 6 + ["wordmath-drills"] * 6
    summary = json.loads(lines[-1])
    assert json.loads((out / "results.json").read_text()) == summary
    assert set(summary["scores"]) == {"wordmath", "wordmath-drills"}
    cells = summary["scores"]["wordmath"]
    assert list(cells)[:2] == ["ragged full", "ragged gate=ouro q=0.5"]
    assert len(cells) == 6
    assert cells["ragged full"]["mean_depth"] == 4.0
    assert cells["ragged gate=ouro q=0.5"]["mean_depth"] < cells["ragged gate=ouro q=0.99"]["mean_depth"] < 4.0
    assert cells["shared full"]["n"] == 2
    protocol = summary["tasks"]["wordmath"]
    assert (protocol["version"], protocol["num_fewshot"], protocol["max_gen_toks"]) == (1.0, 0, 4)
    assert protocol["chat_template"] is False
    assert protocol["filters"] == ["strict-match", "flexible-extract"]
    assert summary["lm_eval"]
    assert len(summary["model"]["revision"]) == 64
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 6 * 2
    assert {len(sample["depths"]) for sample in samples} == {4}
    assert sorted(file.name for file in out.iterdir()) == ["results.json", "samples.jsonl"]


def test_prompts_that_exit_and_the_engine_s_ways(cli: Cli, checkpoint: Path) -> None:
    words = ("eval", "wordmath", "--model", checkpoint, "--gate", "none,ouro", "--threshold", 0.5, "--json", *SMALL)
    ragged = ("--prefill", "ragged", "--prefill-threshold", 0.3, "--prefill-cosine", "--prefill-protected", 2)
    ran = cli(*words, *ragged, "--backend", "sdpa")
    plain, gated = json.loads(ran.out.splitlines()[-1])["scores"]["wordmath"].items()
    assert (plain[1]["prefill"], gated[1]["prefill"]) == ("dense", "ragged")
    assert gated[0].endswith("prefill=cosine-0.3 protected=2")
    assert (gated[1]["prefill_threshold"], gated[1]["prefill_cosine"], gated[1]["prefill_protected"]) == (0.3, True, 2)
    for more, sentence in (
        (("--exits", "lookahead"), "needs a gate that is known one step ahead"),
        (("--backend", "fa9"), "unknown backend 'fa9'"),
        (("--prefill-protected", 2), "need --prefill ragged"),
        (("--prefill", "ragged", "--mode", "cb"), "every token at full depth"),
    ):
        assert sentence in cli(*words, *more).refusal


def test_fixed_depths(cli: Cli, checkpoint: Path) -> None:
    ran = cli("eval", "wordmath", "--model", checkpoint, "--kv", "depth", "--depth", "1,3", "--json", *SMALL)
    cells = json.loads(ran.out.splitlines()[-1])["scores"]["wordmath"]
    assert [(name, cell["mean_depth"]) for name, cell in cells.items()] == [("depth depth=1", 1), ("depth depth=3", 3)]


def test_a_recipe_holds_the_same_options(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"task: [wordmath]\nmodel: {checkpoint}\nkv: [ragged]\ngate: [ouro]\nthreshold: [0.5]\nlimit: 1\n"
    )
    ran = cli("eval", "--config", recipe, "--max-gen-toks", 4)
    assert ran.code == 0, ran.err
    assert "ouro" in ran.out


def test_data_belongs_to_gsm8k_among_several_tasks(cli: Cli, checkpoint: Path, jsonl: Callable[..., Path]) -> None:
    data = jsonl()
    ran = cli("eval", "wordmath,gsm8k", "--model", checkpoint, "--data", data, "--num-fewshot", 1, "--json", *SMALL)
    tasks = json.loads(ran.out.splitlines()[-1])["tasks"]
    assert tasks["gsm8k"]["data"] == str(data)
    assert tasks["wordmath"]["data"] != str(data)
    refused = cli("eval", "wordmath,wordmath-drills", "--model", checkpoint, "--data", data).refusal
    assert refused.startswith("--data serves one task")


def test_two_processes_score_as_one(
    cli: Cli, cli_process: Cli, checkpoint: Path, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    """The gold is set to what the model says for three of five questions, so that the score is neither 0 nor 1."""
    questions = [{"question": f"What is {n} + {n}?", "answer": "#### 0"} for n in range(5)]
    words = ("eval", "wordmath", "--model", checkpoint, "--kv", "ragged", "--gate", "ouro", "--threshold", "0.6")
    words = (*words, "--max-gen-toks", 6, "--dtype", "float64", "--device", "cpu")

    def outcome(run: Cli, name: str, data: Path, *more: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        ran = run(*words, "--data", data, "--output", tmp_path / name, "--json", *more)
        assert ran.code == 0, ran.err
        rows = [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        (cell,) = json.loads(ran.out.splitlines()[-1])["scores"]["wordmath"].values()
        return cell, rows

    _, said = outcome(cli, "first", jsonl(questions))
    for row, sample in list(zip(questions, said, strict=True))[:3]:
        row["answer"] = f"#### {sample['extracted']}"
    data = jsonl(questions, "gold.jsonl")
    alone, alone_rows = outcome(cli, "alone", data)
    shared, shared_rows = outcome(cli_process, "shared", data, "--num-processes", 2)
    assert alone["exact_match_flexible"] == pytest.approx(0.6)
    timing = ("tok_s", "seconds")
    assert {k: v for k, v in shared.items() if k not in timing} == {k: v for k, v in alone.items() if k not in timing}
    assert shared_rows == alone_rows


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("wordmat",), "unknown task 'wordmat'; did you mean 'wordmath'?"),
        (("wordmath", "--kv", "raged"), "unknown KV layout 'raged'"),
        (("wordmath", "--gate", "our"), "unknown gate 'our'; did you mean 'ouro'?"),
        (("wordmath", "--gate", "ouro", "--depth", 2), "--depth and --gate exclude each other"),
        (("wordmath", "--threshold", 0.5), "--threshold and --min-depth need a gate"),
        (("wordmath", "--gate", "ouro", "--threshold", "0.5,-1"), "threshold"),
        (("wordmath", "--depth", 0), "depth must be between 1 and max_loops = 4, got 0"),
        (("wordmath", "--limit", 0), "--limit must be at least 1, got 0"),
        (("wordmath", "--num-fewshot", 9), "num_fewshot must be between 0 and 8"),
        (("wordmath", "--num-processes", 0), "--num-processes must be at least 1"),
        (("wordmath", "--max-gen-toks", 5000), "max_gen_toks is 5000; the context of 1200"),
        (("wordmath", "--data", "nowhere.jsonl"), "the data file nowhere.jsonl does not exist"),
        (("gsm8k",), "the data set openai/gsm8k is not on this machine"),
    ],
)
def test_refusals_leave_nothing(
    cli: Cli, checkpoint: Path, tmp_path: Path, words: tuple[object, ...], sentence: str
) -> None:
    out = tmp_path / "run"
    refused = cli("eval", *words, "--model", checkpoint, "--output", out).refusal
    assert sentence in refused
    assert not out.exists()


def test_a_missing_column_is_named(cli: Cli, checkpoint: Path, jsonl: Callable[..., Path]) -> None:
    data = jsonl([{"prompt": "Who?", "reply": "me"}])
    refused = cli("eval", "gsm8k", "--model", checkpoint, "--data", data).refusal
    assert "no question and no answer" in refused
    assert "columns found: prompt, reply" in refused


@pytest.mark.slow
def test_processes_refuse_in_one_sentence(cli_process: Cli, checkpoint: Path, jsonl: Callable[..., Path]) -> None:
    one = jsonl(ROWS[:1])
    ran = cli_process("eval", "wordmath", "--data", one, "--model", checkpoint, "--num-processes", 2, "--device", "cpu")
    assert ran.code == 2, ran
    assert ran.err.splitlines()[-1] == (
        "looped: error: 1 documents cannot be shared by 2 processes; use fewer processes"
    )
    assert "Traceback" not in ran.err


def test_an_earlier_run_is_kept_unless_told(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("eval", "wordmath", "--model", checkpoint, "--output", out, *SMALL)
    assert cli(*words).code == 0
    (out / "mine.txt").write_text("a note")
    before = (out / "results.json").read_text()
    assert "already holds a run; give another --output folder, or --overwrite" in cli(*words).refusal
    assert (out / "results.json").read_text() == before
    assert cli(*words, "--kv", "shared", "--overwrite").code == 0
    assert "shared full" in (out / "results.json").read_text()
    assert (out / "mine.txt").read_text() == "a note"
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file; give a folder" in cli(*words[:-1], "cpu", "--output", file).refusal


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(tmp_path, {"scores": {}}, [])
    before = sorted(file.name for file in tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("looped.files.os.replace", full)
    with pytest.raises(report.LoopedError, match="No space left on device"):
        report.write(tmp_path, {"scores": {"new": {}}}, [])
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert json.loads((tmp_path / "results.json").read_text()) == {"scores": {}}


def test_a_summary_that_cannot_be_written_leaves_no_samples(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        report.write(tmp_path, {"scores": object()}, [])
    assert not list(tmp_path.iterdir())
