"""What a caller asks for and what comes back: sampling parameters, requests, completions. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from looped import checks
from looped.errors import LoopedError

# Parameters that are known but not served yet, with the value that means "off".
_NOT_YET: dict[str, object] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "logprobs": None,
    "min_tokens": 0,
    "n": 1,
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, how deep its tokens may go, and when it stops.

    `temperature` 0 is greedy. `seed` None takes the engine's seed; a draw depends on (seed, position) alone.
    `exit_threshold`, `min_depth` and `max_depth` override the engine's for this request. Generation ends at
    `max_tokens`, at the end of the context, at an end-of-text token (unless `ignore_eos`) or one of `stop_token_ids`
    (kept in the token ids), or where a `stop` string appears (cut from the text).

    Raises `LoopedError` for values out of range and for parameters that are not served yet.
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
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        checks.given(temperature=self.temperature, max_tokens=self.max_tokens)
        checks.numbers(temperature=self.temperature, exit_threshold=self.exit_threshold)
        names = ("max_tokens", "seed", "min_depth", "max_depth")
        checks.whole_numbers(**{name: getattr(self, name) for name in names})
        if not 0.0 <= self.temperature < float("inf"):
            raise LoopedError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.max_tokens < 1:
            raise LoopedError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise LoopedError(f"seed must fit in 64 bits, got {self.seed}")
        for name in ("min_depth", "max_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LoopedError(f"{name} must be at least 1, got {value}")
        if self.min_depth is not None and self.max_depth is not None and self.min_depth > self.max_depth:
            raise LoopedError(f"min_depth {self.min_depth} is above max_depth {self.max_depth}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(item, str) for item in stop):
            raise LoopedError(f"stop must be a text or a list of texts, got {stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(checks.token_ids("stop_token_ids", self.stop_token_ids)))
        if not all(self.stop):
            raise LoopedError("stop strings must not be empty")
        for item in fields(self):
            if item.name in _NOT_YET and getattr(self, item.name) != _NOT_YET[item.name]:
                raise LoopedError(f"{item.name} is not supported yet: leave it at {_NOT_YET[item.name]}")


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
    character is incomplete or a stop string may be forming.
    """

    key: str
    token: int | None
    depth: int
    text: str
    finish_reason: str | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Completion:
    """The result of one request. `depths[i]` loops produced `token_ids[i]`; `depths[0]` is the prefill's."""

    text: str
    token_ids: list[int]
    depths: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    prompt: str | None = None
