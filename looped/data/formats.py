"""What a row of a data set says: a chat, or a text. Known shapes are found by their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from looped.data.gsm8k import solved
from looped.data.rows import Row
from looped.errors import LoopedError

CHATS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("question", "answer"),
    ("problem", "solution"),
)
TEXT = "text"
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_MARK = "####"


class Message(NamedTuple):
    role: str
    content: str


class Item(NamedTuple):
    """A chat, or a plain text where `messages` is empty."""

    messages: tuple[Message, ...]
    text: str = ""

    @property
    def key(self) -> str:
        """The words of it, by which it is told apart from others."""
        return self.text + "\0".join(f"{role}\0{content}" for role, content in self.messages)


@dataclass(frozen=True)
class Format:
    """How rows are read: `columns` found by name where there are none; rows marked as reasoning kept or dropped."""

    columns: tuple[str, ...] = ()
    keep_reasoning: bool = False

    def __post_init__(self) -> None:
        if len(self.columns) > 2:
            raise LoopedError(f"--columns takes one column or two, prompt and completion; got {len(self.columns)}")

    def read(self, row: Row, where: str) -> Item | None:
        """The chat or text of a row; None where it is dropped: marked as reasoning, or without an answer.

        Raises LoopedError where the columns are not there or hold something else, naming those that are.
        """
        if not self.keep_reasoning and row.get("reasoning") in ("on", True):
            return None
        value = self._value(row, where)
        if isinstance(value, str):
            return Item((), value) if value.strip() else None
        chat = tuple(message for message in map(self._cleaned, value) if message.content.strip())
        answered = any(message.role == "assistant" for message in chat)
        return Item(chat) if answered else None

    def _cleaned(self, message: Message) -> Message:
        if self.keep_reasoning or message.role != "assistant":
            return message
        return message._replace(content=_THOUGHTS.sub("", message.content).strip())

    def _value(self, row: Row, where: str) -> str | list[Message]:
        missing = [column for column in self.columns if column not in row]
        if missing:
            raise LoopedError(f"{where} has no column {missing[0]!r}; it has {_names(row)}")
        if len(self.columns) == 2:
            return _pair(row, (self.columns[0], self.columns[1]), where)
        if self.columns:
            return _text_or_chat(row[self.columns[0]], self.columns[0], where)
        for column in CHATS:
            if row.get(column) is not None:
                return _text_or_chat(row[column], column, where)
        for pair in PAIRS:
            if all(row.get(column) is not None for column in pair):
                return _pair(row, pair, where)
        if isinstance(row.get(TEXT), str):
            return str(row[TEXT])
        raise LoopedError(
            f"{where} needs the columns messages, or prompt and completion, or question and answer, or text; it has "
            f"{_names(row)}: name them with --columns"
        )


def _names(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def _pair(row: Row, pair: tuple[str, str], where: str) -> list[Message]:
    asked, said = (
        _side(row[column], column, role, where) for column, role in zip(pair, ("user", "assistant"), strict=True)
    )
    if pair == ("question", "answer") and _MARK in said[-1].content:
        problem = solved(asked[-1].content, said[-1].content)
        return [Message("user", problem.question), Message("assistant", problem.said)]
    if pair == ("instruction", "output") and isinstance(row.get("input"), str) and row["input"].strip():
        asked = [Message("user", f"{asked[0].content}\n\n{row['input']}")]
    return asked + said


def _side(value: Any, column: str, role: str, where: str) -> list[Message]:
    found = _text_or_chat(value, column, where)
    return [Message(role, found)] if isinstance(found, str) else found


def _text_or_chat(value: Any, column: str, where: str) -> str | list[Message]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value:
        return [_message(entry, column, where) for entry in value]
    raise LoopedError(f"{where} holds neither a text nor a list of messages in the column {column!r}")


def _message(entry: Any, column: str, where: str) -> Message:
    if isinstance(entry, Mapping):
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        if isinstance(content, list):  # parts, of which those that are text count
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        if isinstance(role, str) and isinstance(content, str):
            return Message(_ROLES.get(role, role), content)
    raise LoopedError(f"{where} every entry of {column} needs the fields role and content, both text")
