"""Work lists from files, from random ids, from word problems; replayed depths."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from looped.analysis import worklist
from looped.errors import LoopedError
from looped.files import shipped
from tests.models import micro_ouro

MODEL = micro_ouro()


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_random_ids_follow_the_seed() -> None:
    first, again, other = (worklist.build(MODEL, 4, input_len=5, output_len=3, seed=s) for s in (0, 0, 1))
    assert first == again != other
    assert (first.prompt_tokens, first.output_tokens) == (20, 12)
    assert all(0 <= i < MODEL.config.vocab_size for item in first.items for i in item.prompt_ids)


def test_a_file_is_repeated_and_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", {"prompt_ids": [1, 2], "output_len": 4}, {"prompt_ids": [3]})
    items = worklist.build(MODEL, 3, prompts=path).items
    assert [item.prompt_ids for item in items] == [(1, 2), (3,), (1, 2)]
    assert [item.output_len for item in items] == [4, worklist.DEFAULT_OUTPUT_LEN, 4]
    assert [item.output_len for item in worklist.build(MODEL, 1, prompts=path, output_len=7).items] == [7]


def test_lengths_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "w.json", {"pairs": [[3, 5], [2, 9]]})
    items = worklist.build(MODEL, 2, prompts=path).items
    assert [(len(item.prompt_ids), item.output_len) for item in items] == [(3, 5), (2, 9)]


def test_the_shipped_list_is_readable() -> None:
    pairs = json.loads(shipped("eval/workloads/chat-lengths.json").read_text())["pairs"]
    assert len(pairs) == 64
    assert max(a + b for a, b in pairs) <= 512


def test_word_problems_ask_for_as_much_as_their_solutions_have() -> None:
    from looped.model.loading import ASSETS
    from looped.model.tokenizer import Tokenizer

    model = micro_ouro(vocab_size=2048, max_positions=512)
    model._load_tokenizer = lambda: Tokenizer(ASSETS / "tokenizer", (0,))
    items = worklist.build(model, 8).items
    assert len({item.output_len for item in items}) > 1
    text = model.tokenizer.decode(items[0].prompt_ids)  # type: ignore[union-attr]
    assert text.startswith("Q: ")
    assert text.endswith("A:")
    assert {item.output_len for item in worklist.build(model, 8, output_len=5).items} == {5}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "hello"}, "row 1: give a column `prompt`"),
        ({"prompt": "hello"}, "has no tokenizer"),
        ({"prompt_ids": "hello"}, "list of token ids"),
        ({"prompt_ids": [1], "output_len": 0}, "`output_len`"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, row: object, complaint: str) -> None:
    with pytest.raises(LoopedError, match=complaint):
        worklist.build(MODEL, 1, prompts=write(tmp_path / "w.jsonl", row))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopedError, match="the context of random-ouro has 96"):
        worklist.build(MODEL, 1, input_len=90, output_len=7)
    with pytest.raises(LoopedError, match="holds no requests"):
        worklist.build(MODEL, 1, prompts=write(tmp_path / "w.jsonl"))
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(LoopedError, match="not valid JSON"):
        worklist.build(MODEL, 1, prompts=tmp_path / "x.jsonl")
    with pytest.raises(LoopedError, match="pairs"):
        worklist.build(MODEL, 1, prompts=write(tmp_path / "y.json", {"pairs": [[1]]}))


def test_depth_distributions() -> None:
    assert worklist.parse_depths("uniform", 4) == {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25}
    assert worklist.parse_depths("2:0.5,3:0.3,4:0.2", 4) == {2: 0.5, 3: 0.3, 4: 0.2}
    work = worklist.build(MODEL, 50, input_len=2, output_len=40)
    depths = worklist.draw_depths(work, {2: 0.5, 4: 0.5}, seed=3)
    assert depths == worklist.draw_depths(work, {2: 0.5, 4: 0.5}, seed=3)
    counts = Counter(depth for row in depths for depth in row)
    assert set(counts) == {2, 4}
    assert sum(counts.values()) == 2000
    assert abs(counts[2] - 1000) < 5 * 22.4  # five standard deviations of 2,000 fair draws


@pytest.mark.parametrize("text", ["2:0.5", "5:1", "0:1", "two:1", "2:1.5,3:-0.5", ""])
def test_impossible_distributions_are_refused(text: str) -> None:
    with pytest.raises(LoopedError, match="--replay-depths"):
        worklist.parse_depths(text, 4)
