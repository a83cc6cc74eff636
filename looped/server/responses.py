"""The bodies of answers: what accumulates for a choice, and how the two endpoints write it.

Beyond the OpenAI API each choice has `exit_depths` (loops per token, the first one's is the prompt pass), and the
usage has `mean_depth` (over the tokens after each choice's first; null where there are none).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from looped.infer.request import Output
from looped.server.logprobs import Logprobs, TokenLogprobs, Vocabulary, chat_json, completion_json


@dataclass
class Choice:
    """One choice as it grows; `unsent_*` is what no chunk has carried yet."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    unsent_text: str = ""
    num_sent: int = 0
    logprobs: Logprobs | None = None
    """Where they were asked for."""

    def take(self, output: Output) -> None:
        if output.token is not None:
            self.token_ids.append(output.token)
            self.depths.append(output.depth)
            if self.logprobs is not None:
                self.logprobs.take(output)
        self.text += output.text
        self.unsent_text += output.text
        self.finish_reason = output.finish_reason

    @property
    def has_news(self) -> bool:
        """Text to show, or the end. Tokens whose text is held back wait for the next chunk."""
        return bool(self.unsent_text) or self.finish_reason is not None

    def sent(self) -> None:
        self.unsent_text, self.num_sent = "", len(self.token_ids)


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    mean_depth: float | None

    @classmethod
    def of(cls, prompt_tokens: int, choices: Sequence[Choice]) -> Usage:
        decoded = [depth for choice in choices for depth in choice.depths[1:]]
        mean = round(sum(decoded) / len(decoded), 4) if decoded else None
        return cls(prompt_tokens, sum(len(choice.token_ids) for choice in choices), mean)

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "mean_depth": self.mean_depth,
        }


@dataclass(frozen=True)
class Shape(ABC):
    """How one endpoint writes its answers. `token_ids`: each choice lists its token ids as well.

    `logprobs` is the number of likeliest tokens that are told of each place, None where nothing was asked.
    """

    id: str
    created: int
    model: str
    token_ids: bool = False
    logprobs: int | None = None
    vocabulary: Vocabulary = Vocabulary(None)  # noqa: RUF009

    whole_object = chunk_object = ""

    def choice(self, index: int) -> Choice:
        """A choice that has nothing yet."""
        logprobs = None if self.logprobs is None else Logprobs(self.logprobs, self.vocabulary)
        return Choice(index, logprobs=logprobs)

    @abstractmethod
    def logprobs_json(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The endpoint's way of writing log-probabilities."""

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """The endpoint's own part of a finished choice."""

    @abstractmethod
    def chunk_choice(self, choice: Choice) -> dict[str, Any]:
        """The endpoint's own part of what a choice has new."""

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Chunks that come before any token."""
        return []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer without streaming."""
        written = [self._common(choice, 0) | self.whole_choice(choice) for choice in choices]
        return self._frame(self.whole_object, written) | {"usage": usage.json()}

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """The chunk of what `choice` has new."""
        return self._frame(self.chunk_object, [self._common(choice, choice.num_sent) | self.chunk_choice(choice)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that asked for it."""
        return self._frame(self.chunk_object, []) | {"usage": usage.json()}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _common(self, choice: Choice, start: int) -> dict[str, Any]:
        common: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, start),
            "finish_reason": choice.finish_reason,
            "exit_depths": choice.depths[start:],
        }
        return common | ({"token_ids": choice.token_ids[start:]} if self.token_ids else {})

    def _logprobs(self, choice: Choice, start: int) -> dict[str, Any] | None:
        if choice.logprobs is None or not choice.token_ids:
            return None
        return self.logprobs_json(choice.logprobs.tokens[start:])


class CompletionShape(Shape):
    whole_object = chunk_object = "text_completion"

    def logprobs_json(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return completion_json(tokens)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def chunk_choice(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.unsent_text}


class ChatShape(Shape):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def logprobs_json(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_json(tokens)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def chunk_choice(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {"content": choice.unsent_text} if choice.unsent_text else {}}

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._frame(self.chunk_object, [self._common(choice, 0) | delta]) for choice in choices]
