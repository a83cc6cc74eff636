"""Text from a growing list of token ids: whole characters only, and nothing that a stop string may take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"


class Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental decoding of one sequence.

    Only the last few ids are decoded again for each token: text is the difference of two decodes that share their
    beginning, so tokenizers that treat the first token of a text apart do no harm.

    `stopped` says that a `stop` string came: after `push`, and after `finish`, whose last characters may complete one.
    One that is complete with the first `min_tokens` tokens is text like any other.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._from = 0
        self._read = 0
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, cut before a stop string."""
        return self._text

    def push(self, token_id: int) -> str:
        """Add a token; returns the new text that may be shown."""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._from : self._read])
        now = self._tokenizer.decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            self._add(now[len(before) :])
            self._from, self._read = self._read, len(self._ids)
        return self._show(len(self._text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """The rest of the text once no more tokens come, incomplete characters included."""
        if not self.stopped:
            before = self._tokenizer.decode(self._ids[self._from : self._read])
            now = self._tokenizer.decode(self._ids[self._from :])
            self._add(now[len(before) :])
            self._from = self._read = len(self._ids)
        return self._show(len(self._text))

    def _add(self, new: str) -> None:
        before = len(self._text)
        self._text += new
        if len(self._ids) <= self._min_tokens:
            return
        # Only what ends in the new text: an earlier one was passed over on purpose.
        hits = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop if new]
        hits = [at for at in hits if at >= 0]
        if hits:
            self.stopped = True
            self._text = self._text[: min(hits)]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest, size = 0, len(self._text)
        for stop in self._stop:
            # Only where its first character is, and only what would be longer: this runs for every token.
            at = self._text.find(stop[0], max(0, size - len(stop) + 1), size - longest)
            while at >= 0:
                if self._text.endswith(stop[: size - at]):
                    longest = size - at
                    break
                at = self._text.find(stop[0], at + 1, size - longest)
        return longest

    def _show(self, upto: int) -> str:
        new = self._text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return new
