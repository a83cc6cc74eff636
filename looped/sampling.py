"""From logits to the next tokens, for the reference decoder and the engine: the one place where tokens are drawn.

Everything is torch on fixed shapes: rows do not see each other, nothing waits for the device, and a CUDA graph can
hold it. Values that decide are exact (sorts, maxima, whole numbers) or computed element by element, so that the size
of a batch cannot change a row's token.
"""

# N rows, V vocabulary, B biased tokens, E ids that end a sequence

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looped import rng
from looped.sampling_options import FULL, GREEDY, MAX_LOGPROBS, RANDOM, Sampling

# For sizing memory: what a draw at the highest level holds for each logit at its peak, besides the logits; and what
# rows of `Seen` take for each token of the vocabulary and slot, once a request needs them.
BYTES_PER_LOGIT, SEEN_BYTES = 128, 5

# Probability mass is counted in whole units of the likeliest token's: 2^40 of them, so that sums are exact.
_UNITS = float(1 << 40)


class Knobs(NamedTuple):
    """Numbers of N rows, each a tensor [N]: float64, from `seed` on int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seed: Tensor
    top_k: Tensor
    min_tokens: Tensor


class Lists(NamedTuple):
    """Lists of N rows: tokens and what is added to their logits (unused places: token 0 and 0.0), and the ids that end
    a sequence (unused places: -1)."""

    bias_ids_NB: Tensor
    bias_NB: Tensor
    end_ids_NE: Tensor


class Seen(NamedTuple):
    """Tokens that occurred, for N rows: how often each was generated (int32), and whether the prompt has it (bool)."""

    counts_NV: Tensor
    prompt_NV: Tensor


class Drawn(NamedTuple):
    """The next tokens. `ok` is False where the logits hold NaN or infinity, or nothing else than minus infinity.

    `logprob` is that of the token, `top_ids` and `top_logprobs` [N, 20] the likeliest tokens (fewer columns if the
    vocabulary is smaller), all of the logits as the model gave them; None below the level that asks for them.
    """

    tokens: Tensor
    ok: Tensor
    logprob: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def sample(logits_NV: Tensor, temperature_N: Tensor, seeds_N: Tensor, positions_N: Tensor) -> Tensor:
    """Token ids [N]: the largest logit where the temperature is 0, else drawn with the Gumbel-max rule.

    `positions_N` are the positions that the new tokens will have. A draw depends on (seed, position) alone.
    """
    warm = temperature_N > 0
    noise = _gumbel(seeds_N, positions_N, logits_NV.shape[-1])
    drawn = noise.add_(_scaled(logits_NV, temperature_N)).argmax(-1)
    return torch.where(warm, drawn, logits_NV.argmax(-1))


def greedy(logits_NV: Tensor) -> Drawn:
    """The largest logit of every row, the first of equal ones."""
    # NaN and +inf make the largest logit one of them.
    largest, tokens = logits_NV.max(-1)
    return Drawn(tokens, largest.isfinite())


def draw(
    logits_NV: Tensor,
    knobs: Knobs,
    positions_N: Tensor,
    index_N: Tensor,
    level: int,
    lists: Lists | None = None,
    seen: Seen | None = None,
) -> Drawn:
    """The next token of every row, as `Sampling` describes it.

    `positions_N` are those of the new tokens, `index_N` the number of tokens generated before. `level` is at least that
    of every row; a higher one gives the same tokens. From `FILTERED` on `lists` is needed, at `FULL` also `seen`.
    """
    first = greedy(logits_NV)
    if level == GREEDY:
        return first
    if level == RANDOM:
        return first._replace(tokens=sample(logits_NV, knobs.temperature, knobs.seed, positions_N))
    assert lists is not None
    raw = logits_NV.double()
    logits = raw.scatter_add(-1, lists.bias_ids_NB, lists.bias_NB)
    if level == FULL:
        assert seen is not None
        logits = _penalized(logits, knobs, seen)
    logits = _without_ends(logits, knobs, lists, index_N)
    largest, tokens = logits.max(-1)
    scaled = _narrowed(_scaled(logits, knobs.temperature), knobs)
    drawn = scaled.add_(_gumbel(knobs.seed, positions_N, logits.shape[-1])).argmax(-1)
    tokens = torch.where(knobs.temperature > 0, drawn, tokens)
    ok = first.ok & (largest > -torch.inf)  # a row whose every token is out has none to draw
    return Drawn(tokens, ok) if level < FULL else Drawn(tokens, ok, *logprobs_of(raw, tokens))


def ends(tokens_N: Tensor, end_ids_NE: Tensor, min_tokens_N: Tensor, index_N: Tensor) -> Tensor:
    """Whether each token ends its sequence, bool [N]: one of the row's end ids, once `min_tokens` were there before."""
    return (end_ids_NE == tokens_N[:, None]).any(-1) & (index_N >= min_tokens_N)


def _scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    # To float64: the Gumbel numbers are, and a small temperature overflows float32.
    return logits_NV / temperature_N.clamp_min(1e-6).double()[:, None]


def _gumbel(seeds_N: Tensor, positions_N: Tensor, vocab_size: int) -> Tensor:
    return rng.uniform(seeds_N, positions_N, rng.SAMPLING, vocab_size).log_().neg_().log_().neg_()


# Scalars go into the kernels below as numbers: one in `torch.where` would be copied to the device.


def _penalized(logits_NV: Tensor, knobs: Knobs, seen: Seen) -> Tensor:
    counts = seen.counts_NV
    generated = counts > 0
    factor = knobs.repetition[:, None].expand_as(logits_NV).masked_fill(~(seen.prompt_NV | generated), 1.0)
    logits = torch.where(logits_NV > 0, logits_NV / factor, logits_NV * factor)
    return logits.sub_(knobs.frequency[:, None] * counts).sub_(knobs.presence[:, None] * generated)


def _without_ends(logits_NV: Tensor, knobs: Knobs, lists: Lists, index_N: Tensor) -> Tensor:
    ids = lists.end_ids_NE
    early = (index_N < knobs.min_tokens)[:, None] & (ids >= 0)
    # Adding where others would assign: unused places all point at token 0 and must leave it alone.
    minus = torch.zeros_like(ids, dtype=logits_NV.dtype).masked_fill(early, -torch.inf)
    return logits_NV.scatter_add(-1, ids.clamp_min(0), minus)


def _narrowed(scaled_NV: Tensor, knobs: Knobs) -> Tensor:
    """Minus infinity, in place, for what min_p, top_k and top_p leave out. The likeliest token always stays."""
    ordered, order = scaled_NV.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp_()
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = (weights >= knobs.min_p[:, None]) & ((knobs.top_k <= 0)[:, None] | (rank < knobs.top_k[:, None]))
    mass = (weights * _UNITS).nan_to_num(0.0, 0.0, 0.0).masked_fill(~keep, 0.0).long()
    before = mass.cumsum(-1) - mass
    reached = before >= knobs.top_p[:, None] * mass.sum(-1, keepdim=True)
    keep &= ~reached | (knobs.top_p >= 1)[:, None]
    keep |= rank == 0
    return scaled_NV.masked_fill_(torch.zeros_like(keep).scatter_(-1, order, keep).logical_not_(), -torch.inf)


def logprobs_of(raw_NV: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From float64 logits the last three of a `Drawn`."""
    logprobs = raw_NV.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens_N[:, None])[:, 0]
    values, ids = logprobs.topk(min(MAX_LOGPROBS, raw_NV.shape[-1]), -1)
    # The order of equal values is not said by topk: here the lower id comes first.
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return chosen, ids.gather(-1, by_value), values


class Table(NamedTuple):
    """Parameters of requests as host arrays, a row each: what `Knobs` and `Lists` hold on the device."""

    floats: NDArray[np.float64]
    ints: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float64]
    end_ids: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        params: Sequence[Sampling],
        seeds: Sequence[int],
        end_ids: Sequence[Sequence[int]],
        max_bias: int,
        max_ends: int,
    ) -> Table:
        """`end_ids[i]` end the i-th sequence. `max_bias` and `max_ends` are the widths of the two lists."""
        table = cls(
            np.array([_floats(p) for p in params], np.float64),
            np.array([_ints(p, seed) for p, seed in zip(params, seeds, strict=True)], np.int64),
            np.zeros((len(params), max_bias), np.int64),
            np.zeros((len(params), max_bias), np.float64),
            np.full((len(params), max_ends), -1, np.int64),
        )
        for row, (p, ids) in enumerate(zip(params, end_ids, strict=True)):
            bias = p.logit_bias or {}
            table.bias_ids[row, : len(bias)] = list(bias)
            table.bias[row, : len(bias)] = list(bias.values())
            table.end_ids[row, : len(ids)] = ids
        return table


class Rows(NamedTuple):
    """The columns of a `Table` on the device, a row a slot."""

    floats: Tensor
    ints: Tensor
    bias_ids: Tensor
    bias: Tensor
    end_ids: Tensor


def knobs_of(floats_NF: Tensor, ints_NI: Tensor) -> Knobs:
    """The columns of the first two parts of a `Table`."""
    return Knobs(*floats_NF.unbind(-1), *ints_NI.unbind(-1))


def _floats(p: Sampling) -> tuple[float, ...]:
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    # Temperatures have float32's precision.
    return (float(np.float32(p.temperature)), p.top_p, p.min_p, *penalties)


def _ints(p: Sampling, seed: int) -> tuple[int, ...]:
    # More than any vocabulary or sequence has means the same as all of it.
    return (seed, min(p.top_k, 1 << 40), min(p.min_tokens, 1 << 40))


def end_ids(params: Sampling, eos_ids: Sequence[int], ignore_eos: bool, vocab_size: int) -> list[int]:
    """The ids that end a sequence, each once; ids that the model does not have never come and are left out."""
    ids = dict.fromkeys((*(() if ignore_eos else eos_ids), *params.stop_token_ids))
    return [token for token in ids if 0 <= token < vocab_size]


class Alone:
    """Draws the tokens of one sequence, for the reference decoder: nothing is kept but the tokens so far."""

    def __init__(
        self, params: Sampling, seed: int, ends_at: Sequence[int], prompt: Sequence[int], vocab_size: int
    ) -> None:
        """`ends_at` are the ids that end the sequence."""
        self._params, self._ends_at, self._vocab_size = params, frozenset(ends_at), vocab_size
        self._table = Table.of([params], [seed], [ends_at], len(params.logit_bias or {}), len(ends_at))
        self._prompt, self._generated = list(prompt), list[int]()

    def draw(self, logits_1V: Tensor) -> Drawn:
        """The token behind those drawn so far."""
        device = logits_1V.device
        floats, ints, *lists = (torch.from_numpy(column).to(device) for column in self._table)
        index = len(self._generated)
        drawn = draw(
            logits_1V,
            knobs_of(floats, ints),
            torch.tensor([len(self._prompt) + index], device=device),
            torch.tensor([index], device=device),
            self._params.level,
            Lists(*lists),
            Seen(self._count(self._generated).to(device), self._count(self._prompt).to(device) > 0),
        )
        self._generated.append(int(drawn.tokens))
        return drawn

    @property
    def ended(self) -> bool:
        """Whether the newest token ends the sequence."""
        *before, last = self._generated
        return last in self._ends_at and len(before) >= self._params.min_tokens

    def _count(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long).bincount(minlength=self._vocab_size)[None].int()
