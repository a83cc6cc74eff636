"""What a caller asks for and what comes back: sampling parameters, requests, completions. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from looped import checks
from looped.errors import LoopedError, shown
from looped.sampling_options import Sampling, child_seed

MAX_SAMPLES = 128


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, how deep its tokens may go, and when it stops.

    `temperature` 0 is greedy. `seed` None takes the engine's seed; a draw depends on (seed, position) alone.
    `exit_threshold`, `min_depth` and `max_depth` override the engine's for this request. Generation ends at
    `max_tokens`, at the end of the context, at an end-of-text token (unless `ignore_eos`) or one of `stop_token_ids`
    (kept in the token ids), or where a `stop` string appears (cut from the text); none of the last three before
    `min_tokens` tokens are there. What `top_p` to `logprobs` do is said at `looped.sampling_options.Sampling`.
    `n` samples are drawn for each prompt; `child` gives the parameters of one.

    Raises `LoopedError` for values out of range.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int | None = None
    exit_threshold: float | None = None
    min_depth: int | None = None
    max_depth: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        checks.given(temperature=self.temperature, max_tokens=self.max_tokens, n=self.n)
        checks.numbers(temperature=self.temperature, exit_threshold=self.exit_threshold)
        if not isinstance(self.ignore_eos, bool):
            raise LoopedError(f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
        names = ("max_tokens", "seed", "min_depth", "max_depth", "n")
        checks.whole_numbers(**{name: getattr(self, name) for name in names})
        if self.max_tokens < 1:
            raise LoopedError(f"max_tokens must be at least 1, got {shown(self.max_tokens)}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise LoopedError(f"seed must fit in 64 bits, got {shown(self.seed)}")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise LoopedError(f"n must be between 1 and {MAX_SAMPLES}, got {shown(self.n)}")
        for name in ("min_depth", "max_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LoopedError(f"{name} must be at least 1, got {shown(value)}")
        if self.min_depth is not None and self.max_depth is not None and self.min_depth > self.max_depth:
            raise LoopedError(f"min_depth {shown(self.min_depth)} is above max_depth {shown(self.max_depth)}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(item, str) for item in stop):
            raise LoopedError(f"stop must be a text or a list of texts, got {shown(stop)}")
        object.__setattr__(self, "stop", tuple(stop))
        if not all(self.stop):
            raise LoopedError("stop strings must not be empty")
        sampling = Sampling(**{item.name: getattr(self, item.name) for item in fields(Sampling)})
        object.__setattr__(self, "_sampling", sampling)
        object.__setattr__(self, "stop_token_ids", sampling.stop_token_ids)
        object.__setattr__(self, "logit_bias", sampling.logit_bias)
        if self.min_tokens > self.max_tokens:
            raise LoopedError(f"min_tokens {shown(self.min_tokens)} is above max_tokens {shown(self.max_tokens)}")

    @property
    def sampling(self) -> Sampling:
        """The part that decides a token, which the reference decoder takes too."""
        sampling: Sampling = getattr(self, "_sampling")  # noqa: B009
        return sampling

    def child(self, index: int, default_seed: int = 0) -> SamplingParams:
        """The parameters of the `index`-th of the `n` samples, with n = 1. The first keeps the seed (None stays None);
        the others have `child_seed` of it, or of `default_seed` (the engine's) where there is none."""
        if index == 0:
            return self if self.n == 1 else replace(self, n=1)
        return replace(self, n=1, seed=child_seed(default_seed if self.seed is None else self.seed, index))


@dataclass(frozen=True)
class Request:
    """One prompt with its parameters. `ordinal` is its place in the call, which replayed depths are looked up by.

    `stream` asks for text with every token; without it only stop strings are watched for.
    """

    key: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    ordinal: int = 0
    stream: bool = True


class Output(NamedTuple):
    """One new token of a request, or (token None) its end without one.

    `depth` is the number of loop steps of the pass that produced the token; `finish_reason` is None while it goes on,
    else "stop", "length", "abort" or "error". `text` is what may be shown now: it lags behind the tokens while a
    character is incomplete or a stop string may be forming. Where logprobs were asked for, `logprob` is the token's
    and `top_logprobs` has (id, log-probability) of the likeliest ones, best first, at least as many as asked for.
    """

    key: str
    token: int | None
    depth: int
    text: str
    finish_reason: str | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Completion:
    """One sample of one prompt, the `index`-th. `depths[i]` loops produced `token_ids[i]`; `depths[0]` is the
    prefill's.

    Where logprobs were asked for, `logprobs[i]` is the log-probability of token i and `top_logprobs[i]` those of the
    likeliest tokens as (id, log-probability), best first; else both are None.
    """

    text: str
    token_ids: list[int]
    depths: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    prompt: str | None = None
    index: int = 0
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
