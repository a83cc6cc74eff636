"""The shipped tokenizer is lossless, splits digits, and reads a document alike alone and among others."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.data import tokenizer as module
from looped.data.embedded import embedded_documents
from looped.data.encoding import Encoder
from looped.data.exemplars import prefix
from looped.data.make import main

TOKENIZER = module.load()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_round_trip_of_any_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token():
    for code in itertools.chain(range(0x250), (0x20AC, 0x4E2D, 0x1F600)):
        assert TOKENIZER.decode(TOKENIZER.encode(chr(code)).ids) == chr(code)
    assert TOKENIZER.get_vocab_size() == module.VOCAB_SIZE


def test_specials():
    assert TOKENIZER.token_to_id(module.END) == module.END_ID == 0
    assert TOKENIZER.token_to_id(module.PAD) == module.PAD_ID == 1
    assert TOKENIZER.encode(f"1.{module.END}Q: ").ids.count(0) == 1


@given(st.integers(0, 10**9), st.sampled_from(["{}", " {}", "${}", "is {}.", "a = {}+", "{}\n", "({})"]))
@settings(max_examples=200, deadline=None)
def test_a_number_is_its_digits(number, shape):
    tokens = TOKENIZER.encode(shape.format(number)).tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list(str(number))


def test_pieces_join_like_the_whole():
    """What packing relies on: documents, terminators, prompt and answer can be tokenized apart."""
    documents = list(itertools.islice(embedded_documents(3), 200))
    whole = "".join(d + "\n\n" for d in documents)
    parts = [TOKENIZER.encode(d).ids + TOKENIZER.encode("\n\n").ids for d in documents]
    assert TOKENIZER.encode(whole).ids == list(itertools.chain.from_iterable(parts))
    for document in documents:
        question, _, answer = document.partition("\nA:")
        joined = TOKENIZER.encode(question + "\nA:").ids + TOKENIZER.encode(answer).ids
        assert joined == TOKENIZER.encode(document).ids


def test_encoder_equals_tokenizer():
    encoder = Encoder(TOKENIZER)
    for document in [*itertools.islice(embedded_documents(4), 3000), prefix()]:
        assert encoder.generated(document) == TOKENIZER.encode(document).ids


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab Zé1 2+-=*/'s.\n\t$,", max_size=40))
def test_encoder_equals_tokenizer_on_any_text(text):
    encoder = Encoder(TOKENIZER)
    assert encoder.generated(text) == encoder.repeated(text) == TOKENIZER.encode(text).ids


def test_exemplars_fit():
    assert len(TOKENIZER.encode(prefix()).ids) < 800


def test_transformers_loads_the_folder(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(module.folder()))
    text = "Q: Tom has 24 apples.\nA: 24 / 2 = 12. The answer is 12.\n\n"
    assert loaded(text)["input_ids"] == TOKENIZER.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)
    messages = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "The answer is 7."},
        {"role": "user", "content": "And 5 + 5?\n"},
    ]
    shown = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert shown == "Q: What is 3 + 4?\nA: The answer is 7.\n\nQ: And 5 + 5?\nA:"


def test_training_is_deterministic():
    texts = list(module.sample(words=300, drills=100))
    assert texts == list(module.sample(words=300, drills=100))
    assert module.train(texts).to_str() == module.train(texts).to_str()


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_training_gives(gsm8k_folder, tmp_path):
    assert main(["tokenizer", str(gsm8k_folder / "train.jsonl"), str(tmp_path)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (module.folder() / name).read_bytes()


def test_make_refuses_other_words(capsys):
    assert main(["tokeniser"]) == 2
    assert "give 'tokenizer GSM8K FOLDER'" in capsys.readouterr().err
