"""Rows of every known shape, columns by name, reasoning dropped or kept, mistakes."""

import pytest

from looped.data.formats import Format, Item, Message
from looped.errors import LoopedError

ASKED, SAID = Message("user", "Why?"), Message("assistant", "Because.")
PLAIN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ((), {"messages": PLAIN, "uuid": 3}),
        ((), {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}),
        ((), {"messages": [PLAIN[0], {"role": "assistant", "content": [{"type": "text", "text": "Because."}]}]}),
        ((), {"messages": [{"role": "system", "content": ""}, *PLAIN]}),
        ((), {"prompt": "Why?", "completion": "Because."}),
        ((), {"prompt": PLAIN[:1], "completion": PLAIN[1:]}),
        ((), {"instruction": "Why?", "output": "Because.", "input": ""}),
        ((), {"question": "Why?", "answer": "Because."}),
        (("a", "b"), {"a": "Why?", "b": "Because.", "messages": None}),
        (("talk",), {"talk": PLAIN, "text": "not this"}),
    ],
)
def test_one_chat_in_many_shapes(columns, row) -> None:
    assert Format(columns).read(row, "row 1,") == Item((ASKED, SAID))


def test_texts() -> None:
    assert Format().read({"text": "one"}, "") == Item((), "one")
    assert Format(("body",)).read({"text": "one", "body": "two"}, "") == Item((), "two")
    assert Format().read({"text": "  "}, "") is None


def test_solutions_in_the_shape_of_gsm8k_lose_their_marks() -> None:
    item = Format().read({"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, "")
    assert item is not None and item.messages[1].content == "1+1=2. The answer is 2."


def test_rows_of_reasoning_are_dropped_and_thoughts_stripped() -> None:
    thinking = [PLAIN[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause."}]
    empty = [PLAIN[0], {"role": "assistant", "content": "<think></think>Because."}]
    for reasoning in (None, "off"):
        for messages in (thinking, empty):
            assert Format().read({"messages": messages, "reasoning": reasoning}, "") == Item((ASKED, SAID))
    assert Format().read({"messages": PLAIN, "reasoning": "on"}, "") is None
    kept = Format(keep_reasoning=True).read({"messages": thinking, "reasoning": "on"}, "")
    assert kept is not None and kept.messages[1].content.startswith("<think>")


def test_chats_without_an_answer_are_dropped() -> None:
    assert Format().read({"messages": PLAIN[:1]}, "") is None
    only_thought = [PLAIN[0], {"role": "assistant", "content": "<think>hm</think>"}]
    assert Format().read({"messages": only_thought}, "") is None


@pytest.mark.parametrize(
    ("columns", "row", "sentence"),
    [
        ((), {"title": "x", "body": "y"}, "row 1, needs the columns .*; it has body, title: name them with --columns"),
        (("chat",), {"messages": PLAIN}, "row 1, has no column 'chat'; it has messages"),
        (("a", "b"), {"a": "x"}, "has no column 'b'; it has a"),
        ((), {"messages": []}, "neither a text nor a list of messages in the column 'messages'"),
        (("text",), {"text": 3}, "neither a text nor a list"),
        ((), {"messages": [{"role": "user"}]}, "every entry of messages needs the fields role and content"),
        ((), {"messages": [3]}, "every entry of messages needs"),
    ],
)
def test_mistakes_name_the_row_and_what_is_there(columns, row, sentence) -> None:
    with pytest.raises(LoopedError, match=sentence):
        Format(columns).read(row, "row 1,")


def test_three_columns_are_refused() -> None:
    with pytest.raises(LoopedError, match="--columns takes one column or two"):
        Format(("a", "b", "c"))
