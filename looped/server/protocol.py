"""What clients may send: the request bodies, and the fields that are known but not served yet."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from looped.errors import shown
from looped.infer.request import MAX_SAMPLES
from looped.sampling_options import MAX_STOP_TOKEN_IDS
from looped.server.errors import ApiError
from looped.server.fields import (
    Content,
    Flag,
    LogitBias,
    Logprobs,
    Number,
    Prompts,
    Seed,
    Stops,
    Text,
    TokenIds,
    TopCount,
    Whole,
)

Count = Annotated[Whole, Field(ge=1)]
TokenId = Annotated[Whole, Field(ge=0)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]

# Fields of the OpenAI API and of other engines that come with a later version, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
# Ignoring these would answer another question than the one asked.
SERVER_WIDE = {
    "compute": "--compute",
    "depth": "--depth, or max_depth in the request",
    "gate": "--gate",
    "kv": "--kv",
    "kv_layout": "--kv",
    "layout": "--kv",
    "mode": "--mode",
    "threshold": "--threshold, or exit_threshold in the request",
}


MAX_MESSAGES = 8192
# Fields that this server does not know: each is compared with those it does.
MAX_EXTRA = 256


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: the usage so far in every chunk."""

    include_usage: Flag | None = False
    continuous_usage_stats: Flag | None = False


class GenerationRequest(BaseModel):
    """The fields that both completion endpoints share. `exit_threshold`, `min_depth`, `max_depth` are ours."""

    # Unknown fields are accepted and ignored, as OpenAI-compatible servers do; `refuse_unsupported` looks at them.
    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    seed: Seed | None = None
    stop: Stops = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: Flag | None = False
    n: Annotated[Whole, Field(ge=1, le=MAX_SAMPLES)] | None = 1
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    exit_threshold: Number | None = None
    min_depth: Count | None = None
    max_depth: Count | None = None
    return_token_ids: Flag | None = False

    @model_validator(mode="after")
    def _consistent(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is allowed with stream=true only", param="stream_options")
        if self.min_depth is not None and self.max_depth is not None and self.min_depth > self.max_depth:
            message = f"min_depth {shown(self.min_depth)} is above max_depth {shown(self.max_depth)}"
            raise ApiError(400, message, param="min_depth")
        return self

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def sampling_temperature(self) -> float:
        return 1.0 if self.temperature is None else self.temperature

    @property
    def max_new_tokens(self) -> int | None:
        """The limit that was asked for under either of its names, None where none was."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are to be told of each place; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Logprobs = None
    add_special_tokens: Flag | None = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Message(BaseModel):
    """One message of a chat; other keys (`name`) go on to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: Flag | None = False
    top_logprobs: TopCount | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a text, or a chat as the model would see it."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


DEPTH_FIELDS = ("exit_threshold", "min_depth", "max_depth")


def refuse_unsupported(body: GenerationRequest) -> None:
    """Raise a 400 that names the field if the request asks for what this version does not serve."""
    extra: Mapping[str, Any] = body.model_extra or {}
    if len(extra) > MAX_EXTRA:
        raise ApiError(400, f"the body has {len(extra)} unknown fields; {MAX_EXTRA} are allowed")
    for name, value in extra.items():
        if value is None or (name == "best_of" and _equal(value, body.num_samples)):
            continue
        if name in SERVER_WIDE:
            message = f"{name} is an option of the server, not of a request: {SERVER_WIDE[name]}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
        if name in NEUTRAL and not any(_equal(value, neutral) for neutral in NEUTRAL[name]):
            allowed = " or ".join(["leave it out", *(f"send {neutral!r}" for neutral in NEUTRAL[name][:1])])
            raise ApiError(400, f"{name} is not supported yet; {allowed}", param=name, code="unsupported_parameter")
        meant = difflib.get_close_matches(name, DEPTH_FIELDS, n=1, cutoff=0.8)
        if meant:
            # other unknown fields pass, as clients send many; a depth option that does nothing would go unnoticed
            raise ApiError(400, f"unknown field {shown(name)}; did you mean {meant[0]}?", param=name)


def _equal(value: Any, neutral: Any) -> bool:
    """Equality that keeps false and 0 apart."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
