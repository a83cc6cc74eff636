"""A chat as the text the model was trained on: the checkpoint's own template, rendered by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from looped.errors import one_line
from looped.server.errors import ApiError

if TYPE_CHECKING:
    from looped.model.tokenizer import Tokenizer

# What a request's chat_template_kwargs must not replace.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


class ChatTemplate:
    """A checkpoint's chat template, ready to render. Made at load: the library takes seconds to import."""

    def __init__(self, tokenizer: Tokenizer | None, model: str) -> None:
        self._model = model
        self.text = None if tokenizer is None else tokenizer.chat_template
        self.tokens = {} if tokenizer is None else tokenizer.special_tokens
        if self.text is not None:
            import_module("transformers.utils.chat_template_utils")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. Raises a 400 when there is no template or it refuses the messages."""
        if self.text is None:
            raise ApiError(
                400, f"{self._model} has no chat template; use /v1/completions with a prompt", code="no_chat_template"
            )
        if add_generation_prompt and continue_final_message:
            message = "add_generation_prompt and continue_final_message exclude each other"
            raise ApiError(400, message, param="continue_final_message")
        reserved = sorted(set(extra or {}) & set(_RESERVED))
        if reserved:
            raise ApiError(400, f"chat_template_kwargs must not set {reserved[0]}", param="chat_template_kwargs")
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=self.text,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.tokens, **(extra or {})},
            )
        except Exception as error:  # a template is a program of the checkpoint's: its faults have any type
            raise ApiError(
                400, f"the chat template refused the messages: {one_line(error)}", param="messages"
            ) from error
        return str(rendered[0])
