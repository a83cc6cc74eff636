"""`looped report`: what it reads from runs, what it draws, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from looped.cli import main
from looped.data.tokenizer import load as words_of
from looped.decode import generate
from looped.model import LoopedLM, load, save
from looped.train.pretrain.curves import curves
from looped.train.pretrain.log import read_run
from looped.train.pretrain.tables import tables
from looped.train.pretrain.traces import page, trace
from tests.models import ouro_config


def _log(folder: Path, rows: int = 12, **constant: float) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for row in range(1, rows + 1):
        figures = {"step": row * 10.0, "tokens": row * 1e6, "tok_s": 1e5, "memory_gib": 1.0, "loss": 3.0 / row}
        for depth in range(1, 5):
            figures |= {f"ce_{depth}": 3.0 / row / depth, f"answer_ce_{depth}": 2.0 / row, f"direct_ce_{depth}": 1.0}
            figures |= {f"hard_exit_{depth}": 0.25}
        figures |= {"jump_0": 0.7, "jump_1": 0.2, "jump_2": 0.1, "gain_correlation": 0.4, "answer_depth": 2.5}
        figures |= {"answer_gain": 0.01} | constant
        lines.append(json.dumps(figures))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_curves_have_a_row_a_run_and_a_column_for_what_is_logged(tmp_path: Path) -> None:
    runs = [read_run(_log(tmp_path / name)) for name in ("local", "global")]
    drawing = curves(runs)
    ET.fromstring(drawing)
    assert drawing.count("share of exits by depth") == drawing.count("neighbours' exits".replace("'", "&#x27;")) == 2
    assert "loss under the layout" not in drawing and ">local<" in drawing and ">global<" in drawing
    ragged = curves([runs[0], read_run(_log(tmp_path / "ragged", ragged_loss=0.5))])
    assert ragged.count("loss under the layout") == 2


def test_tables_show_the_first_and_the_last_figures(tmp_path: Path) -> None:
    text = tables(read_run(_log(tmp_path / "run")))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2].startswith("| 3 |") and rows[-1].startswith("| 12 |")
    assert "0.70 / 0.20 / 0.10" in rows[-1] and "+0.010" in rows[-1]


def test_traced_depths_are_those_of_the_reference_decoder() -> None:
    """A text that the model itself would say, read again with tokens leaving: the same depths in decode positions."""
    model = load("tiny-ouro", device="cpu", dtype="float32")
    words = words_of("looped/assets/tiny-ouro")
    prompt = words.encode(
        "Q: Tom has 3 pens and buys 4 more. How many pens does he have?\nA:", add_special_tokens=False
    ).ids
    said = generate(model, prompt, "ragged", "native", 0.5, prefill="ragged", max_new_tokens=10)
    text = words.decode([*prompt, *said.token_ids])
    assets = Path("looped/assets/tiny-ouro")
    traced = trace("tiny", model, assets, [text], 0.5)
    assert "".join(piece for piece, _ in traced.pieces[0]) == text
    own = [depth for _, depth in traced.pieces[0]]
    assert own[0] is None
    assert own[-len(said.depths) :] == said.depths
    html = page([traced, traced._replace(name="other")], 0.5)
    assert html.count("<h3>tiny</h3>") == html.count("<h3>other</h3>") == 1


def test_report_writes_files_from_a_run_with_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _log(tmp_path / "run")
    torch.manual_seed(0)
    tokenizer = Path("looped/assets/tokenizer")
    save(LoopedLM(ouro_config(vocab_size=2048, max_positions=1024)), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).write_bytes((tokenizer / name).read_bytes())
    (folder / "summary.json").write_text(json.dumps({"model": "/elsewhere/model", "seconds": 3.0}))
    assert main(["report", str(folder), "--output", str(tmp_path / "out"), "--texts", "1", "--device", "cpu"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"curves.svg", "tables.md", "traces.html"}


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no log of a run" in capsys.readouterr().err
    _log(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1')
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "is damaged" in capsys.readouterr().err
