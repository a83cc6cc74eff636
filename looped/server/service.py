"""What the routes work with: the engine thread and the names it serves under."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from looped.server.admission import DEFAULT_COMPLETION_TOKENS, check_model, check_text, prepare, tokenize
from looped.server.engine_thread import EngineInfo, EngineThread
from looped.server.logprobs import Vocabulary
from looped.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, refuse_unsupported
from looped.server.responses import ChatShape, CompletionShape, Shape
from looped.server.sse import Answer


@dataclass
class Service:
    """`names` are what clients may call the model; empty: the model's own name, and `alias` (what was typed)."""

    thread: EngineThread
    names: tuple[str, ...] = ()
    alias: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def info(self) -> EngineInfo:
        return self.thread.info

    @property
    def served(self) -> tuple[str, ...]:
        """Every name that is answered to; the first is the one that is shown."""
        return self.names or tuple(dict.fromkeys((self.info.model, self.alias or self.info.model)))

    async def complete(self, body: CompletionRequest) -> Answer:
        """Admit a completion request. Raises what is wrong with it."""
        name = self._check(body)
        for prompt in body.prompt:
            check_text(prompt, self.info)
        special = body.add_special_tokens is not False
        prompts = [await tokenize(prompt, self.info, special) for prompt in body.prompt]
        shape = CompletionShape(_new_id("cmpl"), int(time.time()), name, **self._extras(body))
        return await self._admit(shape, body, prompts, DEFAULT_COMPLETION_TOKENS)

    async def chat(self, body: ChatRequest) -> Answer:
        """Admit a chat request. Raises what is wrong with it."""
        name = self._check(body)
        messages = [message.model_dump() for message in body.messages]
        going_on = bool(body.continue_final_message)
        add_prompt = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
        render = self.info.template.render
        text = await asyncio.to_thread(render, messages, add_prompt, going_on, body.chat_template_kwargs)
        check_text(text, self.info)
        # The template has written the special tokens already.
        prompts = [await tokenize(text, self.info, add_special_tokens=False)]
        shape = ChatShape(_new_id("chatcmpl"), int(time.time()), name, **self._extras(body))
        return await self._admit(shape, body, prompts, None)

    def _check(self, body: GenerationRequest) -> str:
        self.thread.check()
        name = check_model(body.model, self.served)
        refuse_unsupported(body)
        return name

    def _extras(self, body: GenerationRequest) -> dict[str, Any]:
        """What a shape writes beyond the plain answer."""
        return {
            "token_ids": bool(body.return_token_ids),
            "logprobs": body.num_logprobs,
            "vocabulary": Vocabulary(self.info.tokenizer),
        }

    async def _admit(
        self, shape: Shape, body: GenerationRequest, prompts: list[tuple[int, ...]], default_tokens: int | None
    ) -> Answer:
        work = prepare(shape.id, body, prompts, self.info, default_tokens=default_tokens)
        ticket = await self.thread.submit(work.requests)
        return Answer(ticket, work, shape, body.include_usage, body.running_usage)


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
