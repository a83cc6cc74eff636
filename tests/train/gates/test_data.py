"""Documents, chats, packing and batches that gates are distilled from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from looped.data.formats import Item, Message
from looped.errors import LoopedError
from looped.model import LoopedLM, load
from looped.model.tokenizer import Tokenizer
from looped.train.gates.batches import Document, Shape, batches, best_fit, packed, padded
from looped.train.gates.chat import Chats
from looped.train.gates.documents import Corpus, DataOptions, RandomTokens, open_corpus
from looped.train.gates.feed import Feed, in_background
from looped.train.gates.sequences import Packed, Sequences

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n"
    "{% endfor %}"
)
TWO_TURNS = (
    Message("system", "Be brief."),
    Message("user", "1 + 1?"),
    Message("assistant", "2"),
    Message("user", "And 2 + 2?"),
    Message("assistant", "It is 4."),
)


@pytest.fixture(scope="module")
def model() -> LoopedLM:
    return load("tiny-ouro", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(model: LoopedLM) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(tokenizer: Tokenizer, tmp_path: Path, template: str) -> Chats:
    (tmp_path / "chat.jinja").write_text(template)
    return Chats(tokenizer, str(tmp_path / "chat.jinja"))


def said(found: Chats, messages: tuple[Message, ...]) -> tuple[str, list[str]]:
    segments = found.segments(Item(messages))
    return "".join(part.text for part in segments), [part.text for part in segments if part.said]


@pytest.mark.parametrize(("template", "answers"), [
    (CHATML, ["2<|im_end|>", "It is 4.<|im_end|>"]),
    (MARKED, ["2<end>", "It is 4.<end>"]),
])  # fmt: skip
def test_what_a_template_makes_of_the_assistant_is_what_the_model_says(tokenizer, tmp_path, template, answers) -> None:
    found = chats(tokenizer, tmp_path, template)
    text, parts = said(found, TWO_TURNS)
    assert parts == answers
    from transformers.utils.chat_template_utils import render_jinja_template

    whole = render_jinja_template([[m._asdict() for m in TWO_TURNS]], chat_template=template)[0][0]
    assert text == whole.rstrip()


def test_a_turn_that_is_written_otherwise_once_others_follow_is_left_out(tokenizer, tmp_path) -> None:
    shortened = (
        "{% for message in messages %}[{{ message['role'] }}]"
        "{{ message['content'] if loop.last or message['role'] == 'user' else message['content'][:1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    _, parts = said(chats(tokenizer, tmp_path, shortened), TWO_TURNS[1:])
    assert parts == ["2", "It is 4."], "one letter cannot be shortened"
    long = (Message("user", "a"), Message("assistant", "xyz"), *TWO_TURNS[3:])
    assert said(chats(tokenizer, tmp_path, shortened), long)[1] == ["It is 4."]


def test_without_a_template_chats_are_questions_and_answers(tokenizer) -> None:
    text, parts = said(Chats(tokenizer, "none"), TWO_TURNS)
    assert text == "Be brief.\n\nQ: 1 + 1?\nA: 2\n\nQ: And 2 + 2?\nA: It is 4."
    assert parts == [" 2", " It is 4."]
    assert said(Chats(tokenizer), TWO_TURNS) == (text, parts), "the shipped tokenizer's own template says the same"


def test_templates_that_refuse_or_cannot_be_read(tokenizer, tmp_path) -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    found = chats(tokenizer, tmp_path, strict)
    assert found.segments(Item(TWO_TURNS)) == []
    assert "roles must alternate" in found.refusal
    with pytest.raises(LoopedError, match="cannot be read"):
        Chats(tokenizer, str(tmp_path / "absent.jinja"))
    with pytest.raises(LoopedError, match="line 1, is not valid Jinja"):
        chats(tokenizer, tmp_path, "{% for %}")


def conversations(number: int) -> list[dict[str, Any]]:
    dice = random.Random(0)
    rows = []
    for index in range(number):
        talk = [{"role": "user", "content": f"{index} + 1? " + "please " * dice.randint(0, 20)}]
        talk.append({"role": "assistant", "content": f"{index} + 1 = {index + 1}. " * dice.randint(1, 9)})
        if index % 3 == 0:
            talk += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes, quite sure."}]
        rows.append({"messages": talk, "reasoning": "on" if index % 10 == 9 else "off"})
    return rows


def test_documents_of_chats(model, tokenizer, tmp_path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    source = lines(tmp_path / "data.jsonl", conversations(60))
    options = DataOptions(chat_template=str(tmp_path / "chat.jinja"))
    corpus = Corpus(source, model, 0, 1024, options)
    documents = list(itertools.islice(corpus.training(), 40))
    assert any(len(document.spans) == 2 for document in documents)
    for document in documents:
        assert document.token_ids[-1] == model.config.eos_ids[0]
        assert document.token_ids.count(model.config.eos_ids[0]) == 1
        first = document.said[0]
        assert document.prompt_len == first[0]
        assert tokenizer.decode(document.token_ids[: first[0]]).endswith("<|im_start|>assistant\n")
        answers = [tokenizer.decode(document.token_ids[a:b]).removesuffix("<|endoftext|>") for a, b in document.said]
        assert all(answer.endswith("<|im_end|>") for answer in answers)
        assert len(answers) == 1 or answers[1] == "Yes, quite sure.<|im_end|>"
    again = lines(tmp_path / "short.jsonl", conversations(60))
    short = list(itertools.islice(Corpus(again, model, 0, 60, options).training(), 30))
    assert all(len(document.token_ids) <= 60 for document in short)
    assert any(len(document.token_ids) == 60 for document in short)


def texts(number: int) -> list[dict[str, Any]]:
    return [{"text": f"Q: What is {i} + 1?\nA: {i} + 1 = {i + 1}. The answer is {i + 1}."} for i in range(number)]


def test_held_out_documents_are_never_trained_on_and_the_same_in_any_order(model, tokenizer, tmp_path) -> None:
    rows = texts(200)
    corpus = Corpus(lines(tmp_path / "a.jsonl", [*rows, rows[0]]), model, 0, 256)
    held_out = corpus.held_out(100_000)
    assert 8 <= len(held_out) <= 35
    stream = corpus.training()
    rest = 201 - len(held_out)
    first, second = ([next(stream) for _ in range(rest)] for _ in range(2))
    ids = [[tuple(document.token_ids) for document in part] for part in (first, second, held_out)]
    assert sorted(ids[0]) == sorted(ids[1]) and ids[0] != ids[1]
    assert not set(ids[0]) & set(ids[2])
    assert len({*ids[0], *ids[2]}) == 200
    random.Random(0).shuffle(rows)
    other = Corpus(lines(tmp_path / "b.jsonl", texts(40) + rows), model, 3, 256)
    assert {tuple(d.token_ids) for d in other.held_out(100_000)} == set(ids[2])
    document = held_out[0]
    assert tokenizer.decode(document.token_ids[: document.prompt_len]).endswith("\nA:")
    assert document.token_ids[-1] == 0 and document.spans == ()


@pytest.mark.parametrize("number", range(2, 12))
def test_small_sources_have_both_sides(model, tmp_path, number) -> None:
    corpus = Corpus(lines(tmp_path / "a.jsonl", texts(number)), model, 0, 256)
    held_out = corpus.held_out(100_000)
    seen = {tuple(d.token_ids) for d in itertools.islice(corpus.training(), 3 * number)}
    assert held_out and seen and len(seen) + len(held_out) == number


def test_texts_without_a_question_are_cut_somewhere_in_their_first_half(model) -> None:
    plain = Corpus("embedded", model, 0, 256).document("no question, only a text of some length that goes on and on")
    assert 0 < plain.prompt_len < len(plain.token_ids) / 2 + 2


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "holds 0 documents, and distillation needs at least 2"),
        (texts(1) * 3, "holds 1 documents, and distillation needs at least 2"),
        ([row | {"reasoning": "on"} for row in conversations(5)], "5 rows were dropped as reasoning"),
        ([{"title": "x"}], "line 1, needs the columns .* it has title"),
    ],
)
def test_sources_that_are_too_short_or_have_other_columns(model, tmp_path, rows, sentence) -> None:
    with pytest.raises(LoopedError, match=sentence):
        Corpus(lines(tmp_path / "a.jsonl", rows), model, 0, 256)


def test_sources_where_nothing_is_said_within_the_limit(model, tmp_path) -> None:
    long = [{"prompt": f"{i} " * 80, "completion": "yes"} for i in range(40)]
    corpus = Corpus(lines(tmp_path / "a.jsonl", long), model, 0, 32)
    with pytest.raises(
        LoopedError, match="holds no document to train on with an answer of two tokens or more within 32"
    ):
        next(corpus.training())
    with pytest.raises(LoopedError, match="holds no held-out document"):
        corpus.held_out(10)
    strict = tmp_path / "strict.jinja"
    strict.write_text("{{ raise_exception('no system role') }}")
    refusing = Corpus(corpus.name, model, 0, 256, DataOptions(chat_template=str(strict)))
    with pytest.raises(LoopedError, match=r"the chat template refuses chats \(no system role\)"):
        next(refusing.training())


def test_a_source_by_default(model, tmp_path, monkeypatch) -> None:
    assert Corpus("auto", model, 0, 64).name == "embedded"
    asked: list[str] = []

    def find(name: str, seed: int) -> Any:
        asked.append(name)
        raise LoopedError("no network here")

    monkeypatch.setattr("looped.train.gates.documents.find_source", find)
    monkeypatch.setattr("looped.train.gates.documents._speaks_embedded", lambda model: False)
    with pytest.raises(LoopedError, match="no network"):
        Corpus("auto", model, 0, 64)
    assert asked == ["nvidia/Nemotron-Post-Training-Dataset-v2:math+code+stem+chat"]


def test_best_fit() -> None:
    assert best_fit([5, 3, 7, 2, 3], 10) == [[2, 1], [0, 4, 3]]
    dice = random.Random(0)
    lengths = [dice.randint(1, 100) for _ in range(500)]
    rows = best_fit(lengths, 100)
    assert sorted(itertools.chain(*rows)) == [*range(500)]
    assert all(sum(lengths[index] for index in row) <= 100 for row in rows)
    assert sum(lengths) / (100 * len(rows)) > 0.98
    with pytest.raises(ValueError, match="does not fit"):
        best_fit([11], 10)


def test_packed_rows_say_what_stands_where() -> None:
    one, two = Document([5, 6, 7, 8], 2), Document([1, 2, 3, 4, 5, 6], 1, ((1, 3), (4, 6)))
    batch = packed([[one, two], [one]], 12)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 0, 0], [5, 6, 7, 8, *[0] * 8]]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.decode.nonzero().tolist() == [[0, 2], [0, 5], [0, 6], [0, 8], [1, 2]]
    assert batch.prompt.nonzero().tolist() == [[0, 0], [0, 1], [0, 4], [0, 7], [1, 0], [1, 1]]
    assert batch.bounds.cuts == (0, 4, 10, 12, 16, 24) and batch.bounds.starts.tolist() == [0, 4, 10, 12, 16, 24]
    assert (batch.num_sequences, batch.num_tokens, batch.bounds.longest) == (5, 14, 8)
    assert batch.spread(torch.arange(5))[0].tolist() == [0] * 4 + [1] * 6 + [2] * 2


def test_what_packed_and_padded_batches_mark_is_the_same() -> None:
    dice = random.Random(1)
    documents = [Document([index, *range(1, n)], dice.randint(1, n - 2)) for index, n in enumerate(range(4, 40))]
    marks = []
    for batch in (padded(documents), packed([[documents[i] for i in row] for row in best_fit(range(4, 40), 64)], 64)):
        marks.append(
            sorted(zip(batch.tokens[batch.decode].tolist(), batch.positions[batch.decode].tolist(), strict=True))
        )
        marks.append(
            sorted(zip(batch.tokens[batch.prompt].tolist(), batch.positions[batch.prompt].tolist(), strict=True))
        )
    assert marks[:2] == marks[2:]


@pytest.mark.parametrize("width", [None, 128])
def test_batches_hold_every_document_once(width) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 90, (200,), generator=generator).tolist()
    documents = [Document([index, *range(1, length)], 2) for index, length in enumerate(lengths)]
    seen: list[int] = []
    sizes = []
    for batch in batches(documents, 512, width=width):
        assert batch.tokens.numel() <= 512
        sizes.append(batch.num_tokens / batch.tokens.numel())
        if isinstance(batch, Sequences):
            assert (batch.lengths - batch.prompt_lens).tolist() == sorted(batch.lengths - 2, reverse=True)
        seen += batch.tokens[batch.positions == 0].tolist() if width is None else firsts(batch)
    assert sorted(seen) == [*range(200)]
    assert sum(sizes) / len(sizes) > (0.9 if width else 0.8)


def firsts(batch: Packed) -> list[int]:
    there = (batch.positions == 0) & (batch.kinds > 0)
    return batch.tokens[there].tolist()


def test_a_chat_in_padded_batches_is_a_document_for_each_turn() -> None:
    talk = Document([*range(10)], 2, ((2, 5), (7, 10)))
    batch = next(batches([talk], 512))
    assert isinstance(batch, Sequences)
    assert sorted(zip(batch.prompt_lens.tolist(), batch.lengths.tolist(), strict=True)) == [(2, 5), (7, 10)]
    # what is decoded, and before which token, is the same as in one packed row but for the token that ends a turn
    wide = packed([[talk]], 10)
    assert wide.decode.nonzero()[:, 1].tolist() == [2, 3, 4, 7, 8]


def source_of(kind: str, model: LoopedLM, tmp_path: Path) -> Any:
    if kind == "random":
        return RandomTokens(model, 0, 96)
    if kind == "embedded":
        return Corpus("embedded", model, 0, 96)
    (tmp_path / "chat.jinja").write_text(CHATML)
    options = DataOptions(chat_template=str(tmp_path / "chat.jinja"), shuffle=17)
    name = lines(tmp_path / "a.jsonl", conversations(70)) if kind == "jsonl" else "some/chats:math+chat"
    return Corpus(name, model, 0, 96, options)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one[0], other[0], strict=True)
    equal = all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
    return equal and one[1] == other[1] and type(one[0]) is type(other[0])


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, config: str | None = None, *, streaming: bool = False) -> Any:
        if config is not None:
            raise ValueError(f"BuilderConfig '{config}' not found. Available: ['default']")
        rows = datasets.Dataset.from_list(conversations(40))
        return {"math": rows.to_iterable_dataset(num_shards=2), "chat": rows.to_iterable_dataset(num_shards=3)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


@pytest.mark.parametrize("width", [None, 96])
@pytest.mark.parametrize("kind", ["jsonl", "hub", "embedded", "random"])
def test_a_feed_goes_on_with_exactly_the_batches_that_are_left(model, tmp_path, hub, kind, width) -> None:
    shape = Shape(200, width)
    documents = source_of(kind, model, tmp_path)
    number = 60  # several pools, and epochs of the small files
    whole = list(itertools.islice(Feed(documents, shape, 5), number))
    assert [index for _, index in whole] == [*range(number)]
    for stop in (1, 8, 31, 52):
        feed = Feed(source_of(kind, model, tmp_path), shape, 5, ahead=stop % 2 == 1)
        list(itertools.islice(feed, stop))
        place = json.loads(json.dumps(feed.place(stop - 1)))
        rest = list(itertools.islice(Feed(source_of(kind, model, tmp_path), shape, 5, place), number - stop))
        assert all(same(one, other) for one, other in zip(whole[stop:], rest, strict=True))
    other = list(itertools.islice(Feed(documents, shape, 6), 8))
    assert not all(same(one, two) for one, two in zip(whole, other, strict=False))


def test_going_on_reads_no_more_than_a_block(model, tmp_path, monkeypatch) -> None:
    """What lies before the present block of a file is not even parsed."""
    documents = source_of("jsonl", model, tmp_path)
    lines(tmp_path / "a.jsonl", conversations(300))
    feed = Feed(documents, Shape(200, 96), 5)
    whole = list(itertools.islice(feed, 13))
    place = feed.place(11)
    assert (place["pool"], place["documents"]["epoch"]) == (1, 0)
    byte = place["documents"]["block"]["at"][0]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"#" * byte + path.read_bytes()[byte:])
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "_bound", lambda self: documents.bound)
        again = dataclasses.replace(documents.options)
        cut = Corpus(str(path), model, 0, 96, again)
    assert same(next(iter(Feed(cut, Shape(200, 96), 5, place))), whole[12])


def test_a_background_thread_passes_errors_on_and_ends_with_its_reader() -> None:
    def broken() -> Any:
        yield 1
        raise LoopedError("line 2 is bad")

    items = in_background(broken, 2)
    assert next(items) == 1
    with pytest.raises(LoopedError, match="line 2"):
        next(items)
    endless = in_background(itertools.count, 2)
    assert [next(endless) for _ in range(5)] == [0, 1, 2, 3, 4]
    before = threading.active_count()
    endless.close()
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(5)
    assert threading.active_count() == before - 1
    assert list(in_background(lambda: iter([3, 4]), 1)) == [3, 4]


def test_random_documents_are_for_random_weights_only(model) -> None:
    documents = RandomTokens(model, 0, 512)
    some = list(itertools.islice(documents.training(), 50))
    assert {len(d.token_ids) for d in some} > {512} and all(0 < d.prompt_len < len(d.token_ids) - 1 for d in some)
    assert max(max(d.token_ids) for d in some) < model.config.vocab_size
    assert not {tuple(d.token_ids) for d in some} & {tuple(d.token_ids) for d in documents.held_out(5000)}
    assert isinstance(open_corpus("auto", model, 0, 64, DataOptions()), Corpus)


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        ("", (), "a.jsonl holds 0 documents, and distillation needs at least 2"),
        ('{"text": "a"}\n{"text": ', (), "a.jsonl, line 2, is not JSON; give one object a line"),
        ('{"body": "a"}\n', (), "it has body: name them with --columns"),
        ('{"body": "a"}\n', ("--columns", "text"), "has no column 'text'; it has body"),
        ('{"text": "a"}\n', ("--columns", "a,b,c"), "--columns takes one column or two"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n', ("--max-length", 4), "within 4"),
        ('{"text": "a"}\n', ("--chat-template", "absent.jinja"), "--chat-template absent.jinja cannot be read"),
        ('{"text": "a"}\n', ("--shuffle", 0), "--shuffle must be at least 1"),
    ],
)
def test_bad_data_ends_the_command_with_one_sentence(cli, tmp_path, content, words, sentence) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    out = tmp_path / "out"
    done = cli("train-gate", "--data", tmp_path / "a.jsonl", "--output", out, "--device", "cpu", *words)
    assert sentence in done.refusal
    assert not out.exists()


def test_splits_and_names_of_the_hub_on_the_command_line(cli, tmp_path, hub) -> None:
    words = ("train-gate", "--output", tmp_path / "out", "--device", "cpu", "--data")
    assert "some/chats has no split 'maths'; it has math, chat" in cli(*words, "some/chats:maths").refusal
    assert "data sets of the hub are named owner/name" in cli(*words, "embeded").refusal


def test_a_run_on_packed_chats_of_a_file_resumes_bit_for_bit(cli, tmp_path, monkeypatch) -> None:
    """Killed within a pool and a block of a small file, that the whole run reads more than once."""
    from safetensors.torch import load_file

    from looped.train.gates import teaching
    from tests.train.gates.test_run import make_teacher

    monkeypatch.setattr(teaching, "_CACHE_BYTES", 0)
    (tmp_path / "chat.jinja").write_text(CHATML)
    words = ("train-gate", "--teacher", make_teacher(tmp_path / "teacher"), "--device", "cpu", "--pack", "on")
    words = (*words, "--data", lines(tmp_path / "a.jsonl", conversations(90)), "--shuffle", 16, "--max-length", 128)
    words = (*words, "--chat-template", tmp_path / "chat.jinja", "--tokens", 3500, "--batch-tokens", 256)
    words = (*words, "--eval-tokens", 300, "--save-minutes", 1e-6)
    assert cli(*words, "--output", tmp_path / "whole").code == 0

    features, calls = teaching.Teaching.features, 0

    def until_killed(self: Any, batch: Any, index: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return features(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(teaching.Teaching, "features", until_killed)
        assert cli(*words, "--output", tmp_path / "cut").code == 130
    assert cli(*words, "--output", tmp_path / "cut", "--resume").code == 0
    whole, cut = (load_file(tmp_path / run / "gate.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
