"""Work lists from files, from random ids, from word problems; replayed depths."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from looped.analysis import lengths, worklist
from looped.analysis.workfiles import read_rows
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
        ({"prompt_len": "many", "output_len": 3}, "`prompt_len` must be a whole number"),
        ([1, 2], "must be an object"),
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


def test_drawn_lengths_have_the_published_statistics() -> None:
    rng = np.random.default_rng(0)
    for name, (prompt_mean, output_mean), tolerance in (
        ("alpaca", (18, 60), 0.05),
        ("sharegpt", (267, 311), 0.12),
        ("arxiv", (6989, 370), 0.06),
    ):
        pairs = list(itertools.islice(lengths.draw(lengths.fits_of(name) or [], rng), 6000))
        assert min(min(pair) for pair in pairs) >= 4
        assert max(a + b for a, b in pairs) <= 16_384
        assert statistics.mean(a for a, _ in pairs) == pytest.approx(prompt_mean, rel=tolerance)
        assert statistics.mean(b for _, b in pairs) == pytest.approx(output_mean, rel=tolerance)


def test_drawn_lists_follow_the_seed_and_can_be_mixed() -> None:
    model = micro_ouro(max_positions=16_384)
    first, again, other = (worklist.build(model, 6, Path("alpaca"), seed=s) for s in (0, 0, 1))
    assert first == again != other
    mixed = worklist.build(model, 30, Path("alpaca+arxiv")).items
    prompts = [len(item.prompt_ids) for item in mixed]
    assert min(prompts) < 200
    assert max(prompts) > 2000
    assert {item.output_len for item in worklist.build(model, 3, Path("sharegpt"), output_len=5).items} == {5}


def test_the_azure_trace_and_plain_lengths_as_csv(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,37,4\n2023-11-16 18:15:50,5,9\n")
    plain = tmp_path / "plain.csv"
    plain.write_text("prompt_len,output_len\n37,4\n5,9\n")
    for path in (azure, plain):
        items = worklist.build(MODEL, 2, path).items
        assert [(len(item.prompt_ids), item.output_len) for item in items] == [(37, 4), (5, 9)]


def encode(text: str, special: bool) -> list[int]:
    """A token for each letter, and one before a prompt."""
    return [0] * special + [ord(letter) % 61 for letter in text]


def test_conversations_and_instructions(tmp_path: Path) -> None:
    chats = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}, {"from": "human", "value": "x"}]
    short = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]
    chats.write_text(json.dumps([{"conversations": turns[::-1]}, {"conversations": short}, {"conversations": turns}]))
    assert [(row.prompt, row.output_len, row.reference) for row in read_rows(chats, encode)] == [
        (tuple(encode("hello", True)), 8, tuple(encode("good day", False)))
    ]
    tasks = write(
        tmp_path / "alpaca.jsonl",
        {"instruction": "Add up.", "input": "1 2", "output": "three"},
        {"instruction": "Say something.", "input": "", "output": "certainly"},
    )
    prompts = [row.prompt for row in read_rows(tasks, encode)]
    assert prompts == [tuple(encode("Add up.\n1 2", True)), tuple(encode("Say something.", True))]


def test_answers_of_plain_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "w.jsonl", {"prompt_ids": [1, 2], "output_ids": [3, 4, 5]}, {"prompt": "a", "output": "bc"})
    rows = list(read_rows(path, encode))
    assert [(row.output_len, len(row.reference)) for row in rows] == [(3, 3), (2, 2)]
