"""Log-probabilities in answers: texts of single tokens, and the two shapes the OpenAI API writes them in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from looped.infer.request import Output

if TYPE_CHECKING:
    from looped.model.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity
_INCOMPLETE, _BY_ID = "\ufffd", "token_id:"


@dataclass(frozen=True)
class TokenLogprobs:
    """A token and the likeliest ones in its place; `offset` is where its text begins in the text of all tokens.

    A token is named by its text, or by its id where it is a piece of a character: many pieces would share one name.
    """

    token: int
    name: str
    offset: int
    length: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Vocabulary:
    """Texts of single tokens, empty without a tokenizer."""

    tokenizer: Tokenizer | None

    def text(self, token: int, before: int | None) -> str:
        """The text of `token` behind another: some tokenizers drop the space that begins a text."""
        if self.tokenizer is None:
            return ""
        alone = self._decode([token])
        if before is None:
            return alone
        first, both = self._decode([before]), self._decode([before, token])
        return both[len(first) :] if both.startswith(first) and len(both) - len(first) >= len(alone) else alone

    def _decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class Logprobs:
    """What a choice was asked to say about its tokens: `count` likeliest ones for each."""

    count: int
    vocabulary: Vocabulary
    tokens: list[TokenLogprobs] = field(default_factory=list)

    def take(self, output: Output) -> None:
        """Note a new token."""
        assert output.token is not None
        last = self.tokens[-1] if self.tokens else None
        before = None if last is None else last.token
        offset = 0 if last is None else last.offset + last.length
        tops = output.top_logprobs[: self.count]
        top = tuple((_name(token, self.vocabulary.text(token, before)), _finite(value)) for token, value in tops)
        text = self.vocabulary.text(output.token, before)
        logprob = None if output.logprob is None else _finite(output.logprob)
        self.tokens.append(TokenLogprobs(output.token, _name(output.token, text), offset, len(text), logprob, top))


def completion_json(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Four lists of equal length. Each of `top_logprobs` has the token itself besides the likeliest ones."""
    tops: list[dict[str, float | None]] = []
    for token in tokens:
        top: dict[str, float | None] = {}
        for name, value in token.top:
            top.setdefault(name, value)  # of tokens with one text the likelier
        tops.append(top | {token.name: token.logprob})
    return {
        "tokens": [token.name for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.offset for token in tokens],
    }


def chat_json(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """One entry a token, with the likeliest ones in its place."""
    content = [
        _entry(token.name, token.logprob) | {"top_logprobs": [_entry(name, value) for name, value in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(name: str, logprob: float | None) -> dict[str, Any]:
    # The bytes of a piece of a character are not to be had from its text.
    known = None if name.startswith(_BY_ID) else list(name.encode())
    return {"token": name, "logprob": logprob, "bytes": known}


def _name(token: int, text: str) -> str:
    return f"{_BY_ID}{token}" if not text or _INCOMPLETE in text else text


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST
