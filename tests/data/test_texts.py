"""Texts of any source packed into windows: what comes out is what went in, for small and large vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from looped.data.packed import read_packed
from looped.data.sources import read_texts
from looped.data.texts import TextConfig, build_texts, find_words
from looped.errors import LoopedError

TEXTS = [f"Document {i}: {'word ' * (i % 7)}ends." for i in range(400)]


def jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(tmp_path: Path, source: str, **changes: object) -> TextConfig:
    values: dict[str, object] = {"folder": str(tmp_path / "out"), "sources": (source,), "tokens": 3000, "held_out": 500}
    return TextConfig(**({"seq_len": 32} | values | changes))  # type: ignore[arg-type]


def wide_tokenizer(folder: Path) -> str:
    """A tokenizer whose words have ids above 65,535."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [
        "<end>",
        *(f"unused{i}" for i in range(70_000)),
        *sorted({word for text in TEXTS for word in text.split()}),
    ]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return str(folder)


@pytest.mark.parametrize("wide", [False, True])
def test_windows_hold_the_documents_in_order(tmp_path: Path, wide: bool) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"body": text} for text in TEXTS])
    words = find_words(wide_tokenizer(tmp_path / "words") if wide else "embedded")
    told: list[int] = []
    folders = build_texts(config(tmp_path, source, column="body"), words, told.append)
    train, held_out = (read_packed(folder) for folder in folders)
    assert train.tokens.dtype == (np.uint32 if wide else np.uint16) and train.mask is None
    stream = [token for text in TEXTS for token in [*words.tokenizer.encode(text).ids, words.end]]
    flat = held_out.tokens.reshape(-1).tolist()
    assert flat == stream[: len(flat)] and len(held_out.tokens) == -(-500 // 33)
    rest = train.tokens.reshape(-1).tolist()
    # training begins with the document after the one that filled the held-out windows
    begin = next(i for i in range(len(flat), len(stream)) if stream[i - 1] == words.end)
    assert rest == stream[begin : begin + len(rest)]
    assert sum(told) == len(train.tokens) + len(held_out.tokens) and (max(rest) >= 1 << 16) == wide
    assert build_texts(config(tmp_path, source, column="body"), words) == folders
    with pytest.raises(LoopedError, match="another packed data set"):
        build_texts(config(tmp_path, source, column="body", tokens=4000), words)


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "corpus"
    folder.mkdir()
    jsonl(folder / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    parquet.write_table(pyarrow.table({"text": ["three", "four"]}), folder / "b.parquet")
    (folder / "c.txt").write_text("five\n\nstill five\n")
    (folder / "ignored.bin").write_bytes(b"\x00")
    assert list(read_texts(str(folder), "text")) == ["one", "two", "three", "four", "five\n\nstill five"]


def test_long_text_files_are_cut_at_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} " + "long " * 500 for i in range(40)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    pieces = list(read_texts(str(tmp_path / "book.txt"), "text"))
    assert len(pieces) > 2 and "\n\n".join(pieces).split() == " ".join(paragraphs).split()
    assert all(piece.startswith("Paragraph") for piece in pieces)


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        ([{"body": "x"}], "text", "has no column 'text'; it has body"),
        ([{"text": 5}], "text", "has no text in the column 'text'"),
        ([{"text": "too short"}], "text", "too short: held-out got"),
        ([], "text", "too short: held-out got 0 tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    tmp_path: Path, rows: list[dict[str, object]], column: str, message: str
) -> None:
    source = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(LoopedError, match=message):
        build_texts(config(tmp_path, source, column=column), find_words("embedded"))


def test_sources_and_tokenizers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoopedError, match="no data file"):
        list(read_texts(str(tmp_path / "nowhere.jsonl"), "text"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoopedError, match="holds no file that ends in"):
        list(read_texts(str(tmp_path / "empty"), "text"))
    (tmp_path / "a.jsonl").write_text("{broken\n")
    with pytest.raises(LoopedError, match="line 1, is not JSON"):
        list(read_texts(str(tmp_path / "a.jsonl"), "text"))
    with pytest.raises(LoopedError, match=r"holds no tokenizer\.json"):
        find_words(str(tmp_path / "empty"))
    with pytest.raises(LoopedError, match="no tokenizer folder"):
        find_words(str(tmp_path / "nowhere"))
