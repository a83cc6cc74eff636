"""Answers from a ticket's outputs: server-sent events as they come, or one body at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from looped.infer.request import Output
from looped.server.admission import Work
from looped.server.engine_thread import Ticket
from looped.server.errors import ApiError, engine_fault, internal
from looped.server.responses import Choice, Shape, Usage

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Answer:
    """One admitted request: its outputs to come and how to write them."""

    ticket: Ticket
    work: Work
    shape: Shape
    include_usage: bool = False
    running_usage: bool = False

    async def close(self) -> None:
        """Abort what has not finished."""
        self.ticket.close()

    def choices(self) -> dict[str, Choice]:
        return {request.key: self.shape.choice(index) for index, request in enumerate(self.work.requests)}


def event(body: dict[str, Any]) -> bytes:
    """One event. Only ASCII: some clients split lines at characters that JSON leaves as they are (U+2028)."""
    return b"data: " + json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def whole(answer: Answer) -> dict[str, Any]:
    """The body once every choice is finished. Raises a 500 if the engine failed on one of them."""
    choices = answer.choices()
    try:
        async for output in answer.ticket:
            _take(choices, output)
    finally:
        answer.ticket.close()
    done = list(choices.values())
    return answer.shape.whole(done, Usage.of(answer.work.prompt_tokens, done))


async def stream(answer: Answer) -> AsyncIterator[bytes]:
    """Events of a stream. After the 200 an error is an event too; the last one is always [DONE].

    When the client goes away the generator is closed, and what still runs is aborted.
    """
    try:
        async for chunk in _chunks(answer):
            yield event(chunk)
    except ApiError as error:
        yield event(error.body)
    except Exception:
        log.exception("a stream failed")
        yield event(internal().body)
    finally:
        answer.ticket.close()
    yield DONE


async def _chunks(answer: Answer) -> AsyncIterator[dict[str, Any]]:
    choices, shape = answer.choices(), answer.shape
    for chunk in shape.opening(list(choices.values())):
        yield chunk | _usage(answer, choices)
    async for output in answer.ticket:
        choice = _take(choices, output)
        if choice.has_news:
            yield shape.chunk(choice) | _usage(answer, choices)
            choice.sent()
    if answer.include_usage:
        yield shape.usage_chunk(Usage.of(answer.work.prompt_tokens, list(choices.values())))


def _take(choices: dict[str, Choice], output: Output) -> Choice:
    if output.finish_reason == "error":
        raise engine_fault()
    choices[output.key].take(output)
    return choices[output.key]


def _usage(answer: Answer, choices: dict[str, Choice]) -> dict[str, Any]:
    """With include_usage every chunk has the key; it stays null up to the last one unless a running count is wanted."""
    if answer.running_usage:
        return {"usage": Usage.of(answer.work.prompt_tokens, list(choices.values())).json()}
    return {"usage": None} if answer.include_usage else {}
