"""How tokens are drawn: the parameters that the reference decoder and the engine share, checked in one place. No torch.

`looped.sampling` applies them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from looped import checks
from looped.errors import LoopedError, shown

# Levels of work: the largest logit; a random draw; bias, min_tokens and a narrowed choice; penalties and logprobs.
GREEDY, RANDOM, FILTERED, FULL = range(4)

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20

_WRAP = 1 << 64


@dataclass(frozen=True)
class Sampling:
    """What decides a token, besides logits, seed and position.

    In this order: `logit_bias` (token id to what is added to its logit, at most 1,024 ids); the penalties on tokens
    that occurred: `repetition_penalty` divides positive logits and multiplies others where the token is in the prompt
    or was generated, `frequency_penalty` is subtracted for every time it was generated, `presence_penalty` once; while
    fewer than `min_tokens` tokens are there, tokens that would end the sequence are out. `temperature` 0 then takes the
    largest logit, the lowest id of equals. Else logits are divided by it, and what may be drawn is narrowed by `min_p`
    (at least that share of the likeliest token's probability), then `top_k` (0 or -1: all), then `top_p` (the likeliest
    tokens whose mass reaches it, out of what min_p and top_k left); of equal logits the lower ids come first.

    `stop_token_ids` (at most 64) end a sequence. `logprobs` asks for the log-probability of every new token and of that
    many likeliest ones (0 to 20), taken from the model's own logits: before bias, penalties and temperature.

    Raises `LoopedError` for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        kinds = {name: getattr(self, name) for name in self.__dataclass_fields__}
        stop_ids, bias, logprobs = kinds.pop("stop_token_ids"), kinds.pop("logit_bias"), kinds.pop("logprobs")
        checks.given(**kinds)
        checks.whole_numbers(top_k=self.top_k, min_tokens=self.min_tokens, logprobs=logprobs)
        checks.numbers(**kinds)
        if not 0 <= self.temperature <= sys.float_info.max:
            raise LoopedError(f"temperature must be a finite number of at least 0, got {shown(self.temperature)}")
        if not 0 < self.top_p <= 1:
            raise LoopedError(f"top_p must be above 0 and at most 1, got {shown(self.top_p)}")
        if self.top_k < -1:
            raise LoopedError(f"top_k must be 0 or -1 (off) or a number of tokens, got {shown(self.top_k)}")
        if not 0 <= self.min_p <= 1:
            raise LoopedError(f"min_p must be between 0 and 1, got {shown(self.min_p)}")
        if not 0 < self.repetition_penalty <= sys.float_info.max:
            given = shown(self.repetition_penalty)
            raise LoopedError(f"repetition_penalty must be a finite number above 0, got {given}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise LoopedError(f"{name} must be between -2 and 2, got {shown(getattr(self, name))}")
        if self.min_tokens < 0:
            raise LoopedError(f"min_tokens must be at least 0, got {shown(self.min_tokens)}")
        if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
            raise LoopedError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {shown(logprobs)}")
        ids = tuple(checks.token_ids("stop_token_ids", stop_ids))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise LoopedError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(ids)}")
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _bias(bias))

    @property
    def level(self) -> int:
        """How much work a draw takes, one of the four levels below; each does all that the lower ones do."""
        if self.penalties or self.logprobs is not None:
            return FULL
        narrowed = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        if narrowed or self.logit_bias or self.min_tokens > 0:
            return FILTERED
        return RANDOM if self.temperature > 0 else GREEDY

    @property
    def penalties(self) -> bool:
        """Whether the tokens that occurred matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `LoopedError` for a biased token that the model does not have."""
        if self.logit_bias and not 0 <= min(self.logit_bias) <= max(self.logit_bias) < vocab_size:
            raise LoopedError(f"logit_bias: token ids must be between 0 and {vocab_size - 1}")


def _bias(given: object) -> dict[int, float] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise LoopedError(f"logit_bias must map token ids to numbers, got {type(given).__name__}")
    if len(given) > MAX_LOGIT_BIAS:
        raise LoopedError(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, got {len(given)}")
    ids = checks.token_ids("the keys of logit_bias", list(given))
    for token, value in zip(ids, given.values(), strict=True):
        checks.given(**{f"logit_bias of token {token}": value})
        checks.numbers(**{f"logit_bias of token {token}": value})
        if not abs(value) <= sys.float_info.max:
            raise LoopedError(f"logit_bias of token {token} must be a finite number, got {shown(value)}")
    return {token: float(value) for token, value in zip(ids, given.values(), strict=True)}


def child_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sample of a request, an int64: its own for the first, else splitmix64 of both.

    A hash, so that the samples of a request never meet those of a request with a neighbouring seed.
    """
    if index == 0:
        return seed
    x = (seed + index * 0x9E3779B97F4A7C15) % _WRAP
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WRAP
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WRAP
    x ^= x >> 31
    return x - _WRAP if x >= _WRAP >> 1 else x
