"""Data sets of the hub: splits and configurations by name, mixed by size, gone on with where they stopped.

The hub itself is a stand-in: streams of local Parquet files under its names, and errors as `datasets` words them.
"""

import itertools
import json

import pytest

from looped.data.hub import DEFAULT, NEMOTRON, Mixture, find_hub
from looped.errors import LoopedError

SIZES = {"math": 40, "code": 20, "chat": 120}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`some/chats` with three splits, `some/configs` with two configurations, and nothing else."""
    datasets = pytest.importorskip("datasets")
    from pyarrow import Table, parquet

    real = datasets.load_dataset
    for split, size in SIZES.items():
        for shard in range(2):
            rows = [{"split": split, "number": i} for i in range(size) if i % 2 == shard]
            parquet.write_table(Table.from_pylist(rows), tmp_path / f"{split}-{shard}.parquet", row_group_size=7)
    calls = []

    def load_dataset(name, config=None, *, streaming=False, **_):
        calls.append((name, config))
        assert streaming
        configs = {"some/chats": [None, "default"], NEMOTRON: [None, "default"], "some/configs": ["main", "socratic"]}
        if name not in configs:
            raise datasets.exceptions.DatasetNotFoundError(
                f"Dataset '{name}' doesn't exist on the Hub or cannot be accessed."
            )
        if config is None and None not in configs[name]:
            raise ValueError(f"Config name is missing.\nPlease pick one among the available configs: {configs[name]}")
        if config not in configs[name]:
            raise ValueError(f"BuilderConfig '{config}' not found. Available: {configs[name][1:]}")
        splits = ("math", "code", "chat") if name != "some/configs" else ("math",)
        files = {split: str(tmp_path / f"{split}-*.parquet") for split in splits}
        if name == "some/configs":
            files = {"train": files["math"]}
        found = real("parquet", data_files=files, streaming=True, cache_dir=str(tmp_path / "cache"))
        for split, rows in found.items():
            rows.info.splits = datasets.splits.SplitDict()
            rows.info.splits.add(datasets.SplitInfo(name=split, num_examples=SIZES.get(split, 40)))
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def numbers(source, epoch=0, state=None):
    return [(row.get("split"), row["number"]) for row in source.open(epoch, state)]


def test_one_split_in_order_from_any_place(hub) -> None:
    source = find_hub("some/chats:code")
    whole = numbers(source)
    assert sorted(whole) == [("code", i) for i in range(20)]
    for stop in (0, 1, 8, 10, 19, 20):
        reader = source.open(0)
        for _ in range(stop):
            next(reader)
        state = json.loads(json.dumps(reader.state()))
        assert numbers(source, state=state) == whole[stop:]
    assert numbers(source) == whole, "to go on in the middle leaves the source as it was"


def test_splits_are_mixed_by_size_in_an_order_of_seed_and_epoch(hub) -> None:
    source = find_hub("some/chats:math+code+chat", seed=1)
    assert isinstance(source, Mixture)
    assert source.weights == [40.0, 20.0, 120.0]
    whole = numbers(source)
    assert sorted(whole) == sorted((split, i) for split, size in SIZES.items() for i in range(size))
    early = [split for split, _ in whole[:90]]
    assert 10 <= early.count("math") <= 32 and 45 <= early.count("chat") <= 75
    assert numbers(source) == whole
    assert numbers(source, epoch=1) != whole
    assert numbers(find_hub("some/chats:math+code+chat", seed=2)) != whole
    for stop in (0, 17, 100, 179):
        reader = source.open(0)
        list(itertools.islice(reader, stop))
        assert numbers(source, state=json.loads(json.dumps(reader.state()))) == whole[stop:]


def test_the_part_behind_a_name_is_a_split_or_a_configuration(hub) -> None:
    assert len(numbers(find_hub("some/configs:socratic"))) == 40
    assert len(numbers(find_hub("some/configs:main:train"))) == 40
    assert len(numbers(find_hub("some/chats::math"))) == 40
    assert len(numbers(find_hub("some/chats:default:math"))) == 40
    hub.clear()
    find_hub("some/chats:math")
    assert hub == [("some/chats", None)]


def test_the_default_is_the_authors_data(hub) -> None:
    with pytest.raises(LoopedError, match=r"has no split 'stem'; it has math, code, chat"):
        find_hub(DEFAULT)
    assert hub[0] == (NEMOTRON, None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("some/absent", r"cannot load the data set 'some/absent' \(DatasetNotFoundError: .*doesn't exist on the Hub"),
        ("some/chats", r"has no split 'train'; it has math, code, chat"),
        ("some/chats:maths", r"has no split 'maths'; it has math, code, chat"),
        ("some/chats:math+maths", r"has no split 'maths'"),
        (
            "some/configs",
            r"Config name is missing. Please pick one among the available configs: \['main', 'socratic'\]",
        ),
        ("some/configs:mian", r"BuilderConfig 'mian' not found. Available: \['socratic'\]"),
        ("some/configs:main:test", r"has no split 'test'; it has train"),
        ("a/b:c:d:e", "too many parts"),
        ("embeded", "there is no data file embeded, and data sets of the hub are named owner/name"),
    ],
)
def test_mistakes_name_what_there_is(hub, name, sentence) -> None:
    with pytest.raises(LoopedError, match=sentence) as caught:
        find_hub(name)
    assert "\n" not in str(caught.value)


def test_without_network_and_with_a_connection_that_breaks(hub, monkeypatch) -> None:
    source = find_hub("some/chats:math")

    class Broken:
        def skip(self, number):
            return self

        def __iter__(self):
            yield {"number": 0}
            raise ConnectionError("Connection broken:\nIncompleteRead")

    source.rows = Broken()
    with pytest.raises(LoopedError, match=r"reading some/chats:math failed behind row 1 \(ConnectionError: Connection"):
        numbers(source)

    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach 'some/chats' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(LoopedError, match="check the name and the network, or give local files"):
        find_hub("some/chats:math")
