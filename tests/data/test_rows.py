"""Rows of local files: every format, every place to go on from, and one sentence for what is wrong."""

import json

import pytest

from looped.data.rows import PIECE, Files, find_files
from looped.errors import LoopedError


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(*paths, seed=0, epoch=0, state=None):
    return Files("files", list(paths), seed).open(epoch, state)


ROWS = [{"text": f"row {i} ü", "number": i} for i in range(23)]


@pytest.fixture
def files(tmp_path):
    datasets = pytest.importorskip("datasets")
    from pyarrow import Table, parquet

    table = Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=5)
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "array.json").write_text(json.dumps(ROWS), encoding="utf-8")
    (tmp_path / "blank.jsonl").write_text("\n" + "\n\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return {
        "jsonl": lines(tmp_path / "rows.jsonl", ROWS),
        "blank": tmp_path / "blank.jsonl",
        "json": tmp_path / "array.json",
        "parquet": tmp_path / "rows.parquet",
        "arrow": next((tmp_path / "saved").glob("data-*.arrow")),
    }


@pytest.mark.parametrize("kind", ["jsonl", "blank", "json", "parquet", "arrow"])
def test_reading_goes_on_behind_any_row(files, kind) -> None:
    assert list(rows_of(files[kind])) == ROWS
    for stop in range(len(ROWS) + 1):
        reader = rows_of(files[kind])
        for _ in range(stop):
            next(reader)
        state = json.loads(json.dumps(reader.state()))
        assert list(rows_of(files[kind], state=state)) == ROWS[stop:]


def test_going_on_skips_what_is_behind_without_reading_it(files, tmp_path) -> None:
    """Lines before the noted byte may be anything by now."""
    reader = rows_of(files["jsonl"])
    for _ in range(11):
        next(reader)
    state = reader.state()
    raw = files["jsonl"].read_bytes()
    byte = state["at"][0]
    files["jsonl"].write_bytes(b"#" * byte + raw[byte:])
    assert list(rows_of(files["jsonl"], state=state)) == ROWS[11:]


def test_files_come_in_an_order_of_seed_and_epoch(tmp_path) -> None:
    paths = [lines(tmp_path / f"{i}.jsonl", [{"text": f"{i}"}] * 2) for i in range(6)]
    orders = {(s, e): [row["text"] for row in rows_of(*paths, seed=s, epoch=e)] for s in range(2) for e in range(2)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert all(sorted(order) == sorted(orders[0, 0]) for order in orders.values())
    reader = rows_of(*paths, seed=1, epoch=1)
    first = [next(reader)["text"] for _ in range(5)]
    assert first + [row["text"] for row in rows_of(*paths, seed=1, epoch=1, state=reader.state())] == orders[1, 1]


def test_plain_text_is_cut_at_blank_lines(tmp_path) -> None:
    path = tmp_path / "book.md"
    paragraphs = [f"Paragraph {i}. " + "word " * 150 for i in range(20)]
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    pieces = [row["text"] for row in rows_of(path)]
    assert len(pieces) > 2
    assert all(PIECE <= len(piece) < PIECE + 2000 for piece in pieces[:-1])
    assert [p.strip() for piece in pieces for p in piece.split("\n\n")] == [p.strip() for p in paragraphs]
    reader = rows_of(path)
    next(reader)
    assert [row["text"] for row in rows_of(path, state=reader.state())] == pieces[1:]


def test_names_of_local_files(files, tmp_path, monkeypatch) -> None:
    assert find_files(str(files["jsonl"])) == [files["jsonl"]]
    assert find_files(str(tmp_path / "*.jsonl")) == [files["blank"], files["jsonl"]]
    assert find_files(str(tmp_path / "saved")) == [files["arrow"]]
    assert set(find_files(str(tmp_path))) == set(files.values())
    assert find_files("owner/name") is None
    assert find_files("owner/name:config:train+test") is None


def test_a_saved_data_set_of_splits(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert [row["text"] for row in rows_of(*find_files(str(tmp_path / "saved")))] == ["train"]
    assert [row["text"] for row in rows_of(*find_files(f"{tmp_path / 'saved'}:test"))] == ["test"]
    with pytest.raises(LoopedError, match="has no split 'dev'; it has test, train"):
        find_files(f"{tmp_path / 'saved'}:dev")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2, is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2, is not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2, is not JSON"),
        ("a.json", b'[{"text": "a"}, 3]', "item 2, is not a JSON object"),
        ("a.json", b'[{"text": "a"', "a.json is not JSON"),
        ("a.txt", b"\xff\xfe", "cannot read the data file"),
        ("a.parquet", b"PAR1 and no more", "is not a Parquet file"),
        ("a.arrow", b"nothing of the sort", "is not an Arrow file"),
    ],
)
def test_damaged_files_end_in_one_sentence(tmp_path, name, content, sentence) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoopedError, match=sentence) as caught:
        list(rows_of(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent.jsonl", "there is no data file absent.jsonl"),
        ("./absent", "there is no data file"),
        ("a/b/c", "there is no data file"),
        ("{tmp}/*.jsonl", "matches"),
        ("{tmp}/image.png", "data files end in"),
        ("{tmp}/empty", "holds no file that ends in"),
    ],
)
def test_missing_files_end_in_one_sentence(tmp_path, name, sentence) -> None:
    (tmp_path / "image.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoopedError, match=sentence):
        find_files(name.format(tmp=tmp_path))
