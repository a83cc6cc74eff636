"""From a request body to engine requests: names, prompts, lengths, seeds and depth options checked and resolved."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from looped.errors import shown
from looped.infer.request import Request, SamplingParams
from looped.sampling_options import child_seed
from looped.server.engine_thread import EngineInfo
from looped.server.errors import ApiError
from looped.server.fields import Prompt
from looped.server.protocol import GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Work:
    """Engine requests of one HTTP request in the order of their choices: choice = prompt * n + sample."""

    requests: tuple[Request, ...]
    prompt_tokens: int


def check_model(name: str | None, served: Sequence[str]) -> str:
    """The served name that a request means; the first where it gives none. Raises 404 for another model."""
    if name is None:
        return served[0]
    if name not in served:
        message = f"the model {shown(name, 100)} is not served here; served: {', '.join(served)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


def check_depths(body: GenerationRequest, info: EngineInfo) -> None:
    """Refuse depth options that the engine cannot honour."""
    wanted = {name: getattr(body, name) for name in ("exit_threshold", "min_depth", "max_depth")}
    for name, value in wanted.items():
        if value is None:
            continue
        if info.mode == "cb":
            message = f"{name} has no effect under mode cb, which runs every token at full depth"
            raise ApiError(400, message, param=name)
        if info.gate is None and name != "max_depth":
            raise ApiError(400, f"{name} needs a gate, and the server runs without one (--gate)", param=name)
        if name != "exit_threshold" and value > info.max_depth:
            raise ApiError(400, f"{name} must be between 1 and {info.max_depth} loops, got {shown(value)}", param=name)
    if body.exit_threshold is not None and info.threshold_range is not None:
        low, high = info.threshold_range
        if not low <= body.exit_threshold <= high:
            message = f"exit_threshold must be between {low:g} and {high:g} for the {info.gate} gate"
            raise ApiError(400, message, param="exit_threshold")


def check_text(text: Prompt, info: EngineInfo) -> None:
    """Refuse a text that is too long for the context whatever its tokens are: to count them would take a while."""
    if isinstance(text, str) and info.max_chars is not None and len(text) > info.max_chars:
        message = f"the prompt has {len(text)} characters; the context of {info.context} tokens has no room for them"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


async def tokenize(prompt: Prompt, info: EngineInfo, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a prompt; a text is encoded on a thread of its own, for long ones take a while."""
    if not isinstance(prompt, str):
        return prompt
    if info.tokenizer is None:
        raise ApiError(400, f"{info.model} has no tokenizer; send token ids", param="prompt", code="no_tokenizer")
    return tuple(await asyncio.to_thread(info.tokenizer.encode, prompt, add_special_tokens))


def prepare(
    key: str,
    body: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    info: EngineInfo,
    *,
    default_tokens: int | None,
) -> Work:
    """Engine requests for prompts of token ids. `default_tokens` None allows all that the context leaves."""
    check_depths(body, info)
    _check_ids("stop_token_ids", body.stop_token_ids or (), info)
    _check_ids("logit_bias", tuple(body.logit_bias or ()), info)
    if body.stop and info.tokenizer is None:
        message = f"stop strings need a tokenizer, and {info.model} has none; use stop_token_ids"
        raise ApiError(400, message, param="stop")
    most = body.max_new_tokens or default_tokens
    if most is not None and (body.min_tokens or 0) > most:
        message = f"min_tokens {shown(body.min_tokens)} is above max_tokens {shown(most)}"
        raise ApiError(400, message, param="min_tokens")
    requests: list[Request] = []
    for ids in prompts:
        check_prompt(ids, info)
        room = info.max_len - len(ids)
        limit = most or room
        for sample in range(body.num_samples):
            params = _params(body, min(limit, room), sample)
            requests.append(Request(f"{key}-{len(requests)}", ids, params, ordinal=len(requests)))
    return Work(tuple(requests), sum(len(ids) for ids in prompts))


def check_prompt(ids: Sequence[int], info: EngineInfo) -> None:
    """Refuse a prompt that is empty, has foreign ids, or can never run: too long for the context or the KV pool."""
    if not ids:
        raise ApiError(400, "the prompt is empty", param="prompt")
    _check_ids("prompt", ids, info)
    if len(ids) >= info.context:
        message = f"the prompt has {len(ids)} tokens; the context of {info.context} leaves room for {info.context - 1}"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    if len(ids) >= info.max_len:
        message = f"the prompt has {len(ids)} tokens; the server's KV pool has room for {info.max_len - 1}"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")


def _check_ids(name: str, ids: Sequence[int], info: EngineInfo) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
        raise ApiError(400, f"{name}: token ids must be between 0 and {info.vocab_size - 1}", param=name)


def _params(body: GenerationRequest, max_tokens: int, sample: int) -> SamplingParams:
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return SamplingParams(
        temperature=body.sampling_temperature,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        seed=choose_seed(body.seed, body.sampling_temperature, sample),
        exit_threshold=body.exit_threshold,
        min_depth=body.min_depth,
        max_depth=body.max_depth,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=body.logit_bias,
        logprobs=body.num_logprobs,
        # The context may leave less room than was asked for.
        min_tokens=min(body.min_tokens or 0, max_tokens),
        **given,
    )


def choose_seed(seed: int | None, temperature: float, sample: int) -> int | None:
    """The seed of the `sample`-th choice. The first takes the request's; a request without one gets a fresh one.

    Greedy requests without a seed take the engine's, so that families with a random initial state repeat themselves.
    """
    if seed is None:
        return None if temperature == 0 else secrets.randbits(63)
    return child_seed(seed, sample)
