"""Chats and texts as stretches of text, some of which the model is to say: what distillation takes as decode."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from looped.data.formats import Item, Message
from looped.errors import LoopedError, one_line

if TYPE_CHECKING:
    from looped.model.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
_ANSWER_MARK = "\nA:"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Segment(NamedTuple):
    """A stretch of text, said by the model or not."""

    text: str
    said: bool


class Chats:
    """Turns chats into text by a template, or as Q and A lines where there is none.

    What the assistant says is what the template marks as generated; in templates without marks it is what a turn adds
    to the prompt before it, so a turn that a template writes otherwise once others follow is left out.
    `refusal` keeps why the last chat was refused.
    """

    def __init__(self, tokenizer: Tokenizer, choice: str = AUTO) -> None:
        self.template = _template(tokenizer, choice)
        self.tokens = tokenizer.special_tokens
        self.marked = self.template is not None and bool(_GENERATION.search(self.template))
        self.refusal = ""

    def segments(self, item: Item) -> list[Segment]:
        """The text of an item in order, ending with what the model says; empty where a template refuses the chat."""
        if not item.messages:
            return split_text(item.text)
        if self.template is None:
            return _trimmed([part for message in item.messages for part in _lines(message)])
        try:
            return _trimmed(self._marked(item.messages) if self.marked else self._by_prefix(item.messages))
        except Refused as error:
            self.refusal = str(error)
            return []

    def _marked(self, messages: Sequence[Message]) -> list[Segment]:
        text, spans = self._render(messages, marks=True)
        return _cut(text, spans)

    def _by_prefix(self, messages: Sequence[Message]) -> list[Segment]:
        whole, spans = self._render(messages)[0], []
        for turn, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, through = self._render(messages[:turn], prompt=True)[0], self._render(messages[: turn + 1])[0]
            end = len(through.rstrip())
            if through.startswith(before) and whole.startswith(through[:end]) and end > len(before):
                spans.append((len(before), end))
        return _cut(whole, spans)

    def _render(
        self, messages: Sequence[Message], *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        chat: list[dict[str, Any]] = [message._asdict() for message in messages]
        try:
            texts, spans = render_jinja_template(
                [chat],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise Refused(one_line(error)) from error
        return texts[0], [tuple(span) for span in spans[0]] if marks else []


class Refused(Exception):
    """A template does not take a chat."""


def _template(tokenizer: Tokenizer, choice: str) -> str | None:
    """The template of a choice. Raises LoopedError for a file that cannot be read or is no template."""
    if choice == NONE:
        return None
    if choice == AUTO:
        return tokenizer.chat_template
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = Path(choice).expanduser().read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise LoopedError(f"--chat-template {choice} cannot be read ({error}); give auto, none or a file") from error
    except TemplateSyntaxError as error:
        raise LoopedError(f"--chat-template {choice}, line {error.lineno}, is not valid Jinja ({error})") from error
    return text


def split_text(text: str) -> list[Segment]:
    """A text cut behind its last `A:`, else after a share of it, 10 to 50 %, that depends on the text."""
    head, mark, answer = text.rpartition(_ANSWER_MARK)
    if mark:
        return [Segment(head + mark, False), Segment(answer, True)]
    share = 0.1 + 0.4 * (zlib.crc32(text.encode()) % 1000) / 1000
    at = max(1, round(share * len(text)))
    space = text.find(" ", at)
    at = at if space < 0 else space
    return [Segment(text[:at], False), Segment(text[at:], True)]


def _lines(message: Message) -> list[Segment]:
    content = message.content.strip()
    if message.role == "assistant":
        return [Segment(f" {content}", True), Segment("\n\n", False)]
    return [Segment(f"Q: {content}{_ANSWER_MARK}" if message.role == "user" else f"{content}\n\n", False)]


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, at = [], 0
    for begin, end in spans:
        segments += [Segment(text[at:begin], False), Segment(text[begin:end], True)]
        at = end
    return [*segments, Segment(text[at:], False)]


def _trimmed(segments: list[Segment]) -> list[Segment]:
    """Up to the last that the model says; neighbours of one kind joined, so that words are not cut between them."""
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].said == segment.said:
            joined[-1] = Segment(joined[-1].text + segment.text, segment.said)
        elif segment.text:
            joined.append(segment)
    while joined and not joined[-1].said:
        joined.pop()
    return joined
