"""Incremental text: equal to decoding at once, never half a character, never part of a stop string."""

import time

from hypothesis import given
from hypothesis import strategies as st

from looped.infer.detokenize import Detokenizer


class Bytes:
    """One token a UTF-8 byte; like byte-level BPE, an incomplete character decodes to the replacement character."""

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(token_ids).decode("utf-8", errors="replace")


def feed(text, stop=()):
    reader = Detokenizer(Bytes(), stop)
    pieces = []
    for byte in text.encode():
        pieces.append(reader.push(byte))
        if reader.stopped:
            break
    return reader, [*pieces, reader.finish()]


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text(text):
    reader, pieces = feed(text)
    assert "".join(pieces) == text == reader.text


def test_characters_come_whole():
    _, pieces = feed("aé漢🙂")
    assert [piece for piece in pieces if piece] == ["a", "é", "漢", "🙂"]


def test_an_incomplete_character_shows_at_the_end():
    reader = Detokenizer(Bytes())
    assert reader.push("é".encode()[0]) == ""
    assert reader.finish() == "\ufffd"


def test_what_may_be_a_stop_string_is_held_back():
    reader, pieces = feed("one\n\ntwo", ("\n\n",))
    assert pieces == ["o", "n", "e", "", "", ""]
    assert reader.stopped and reader.text == "one"
    _, pieces = feed("one\ntwo", ("\n\n",))
    assert pieces == ["o", "n", "e", "", "\nt", "w", "o", ""]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_exactly_what_may_become_a_stop_string_is_held_back(text, stop):
    reader = Detokenizer(Bytes(), tuple(stop))
    shown = ""
    for count, byte in enumerate(text.encode(), start=1):
        shown += reader.push(byte)
        if reader.stopped:
            break
        beginnings = [s[:n] for s in stop for n in range(1, len(s)) if text[:count].endswith(s[:n])]
        assert shown == text[: count - max(map(len, beginnings), default=0)]


def test_many_long_stop_strings_cost_little():
    started = time.perf_counter()
    feed("x" * 300, tuple("x" * 200 + f"{number:04}" for number in range(300)))
    assert time.perf_counter() - started < 2


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    reader, pieces = feed(text, tuple(stop))
    ends = [text.index(s) + len(s) for s in stop if s in text]
    # Of the stop strings complete at the first token that completes one, the earliest to begin cuts the text.
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.index(s) for s in stop if s in seen)]
    assert "".join(pieces) == expected == reader.text
    assert reader.stopped == bool(ends)


def test_a_stop_string_in_the_last_flush_stops():
    """The text of a token that ends in half a character is read only when no more come."""

    class Pairs:
        texts = ("a", "b\n\n\ufffd", "\n")

        def decode(self, token_ids, skip_special_tokens=True):
            return "".join(self.texts[i] for i in token_ids)

    reader = Detokenizer(Pairs(), ("\n\n",))
    assert [reader.push(0), reader.push(1)] == ["a", ""]
    assert not reader.stopped
    assert reader.finish() == "b"
    assert reader.stopped and reader.text == "ab"


def test_stop_strings_across_token_edges():
    class Words:
        texts = ("one", " st", "o", "p me", "stop", "xsto")

        def decode(self, token_ids, skip_special_tokens=True):
            return "".join(self.texts[i] for i in token_ids)

    for ids, shown in (((0, 1, 2, 3), "one "), ((0, 4), "one"), ((0, 5, 3), "onex"), ((4,), "")):
        reader = Detokenizer(Words(), ("stop",))
        assert "".join(reader.push(i) for i in ids) == shown
        assert reader.stopped and reader.finish() == "" and reader.text == shown


def test_stop_strings_count_after_min_tokens():
    def shown(text, stop, least):
        reader = Detokenizer(Bytes(), stop, min_tokens=least)
        pieces = []
        for byte in text.encode():
            pieces.append(reader.push(byte))
            if reader.stopped:
                break
        return "".join([*pieces, reader.finish()]), reader.stopped

    assert shown("abcabc", ("bc",), 0) == ("a", True)
    assert shown("abcabc", ("bc",), 2) == ("a", True)  # complete with the third token
    assert shown("abcabc", ("bc",), 3) == ("abca", True)
    assert shown("abcabc", ("bc",), 6) == ("abcabc", False)
    assert shown("bbbb", ("bb",), 2) == ("b", True)  # tokens 2 and 3 make a second one
