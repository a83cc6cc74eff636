"""Drawing tokens on a GPU: the same ones as `looped.sampling.draw`, without its passes over [N, V] float64.

A draw is the largest of logit / temperature + noise. Every program takes a chunk of a row's vocabulary and makes the
noise in registers. The two logarithms of the noise are costly in float64, so they are taken of few tokens only. With u
the uniform number of a token,

    noise = -log(-log u) <= -log(1 - u),   because -log u >= 1 - u

and the right side has a cheap upper bound: the bits of a float, read as a whole number, are a piecewise linear function
below its logarithm. So the token with the largest bound is computed exactly and then set aside, as long as a bound
reaches the best exact value; that takes about two rounds. Rounding is monotone, so what decides is the definition's own
float64 value, and of equal ones the lowest id.

`draw_narrow` prepares rows of the higher levels.
"""

# S slots, N rows, V vocabulary, C chunks of it
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped import rng
from looped.infer.backends.kernels.draw_narrow import CHUNK, narrow
from looped.infer.backends.kernels.draw_params import (
    BAD,
    FINITE,
    LEFT,
    MIN_P,
    SEED,
    TEMPERATURE,
    row_cuts,
    row_knobs,
)
from looped.model.kernels.launch import after_previous, launch_options, padded
from looped.sampling import Rows, Seen
from looped.sampling_options import FILTERED

_STREAM = tl.constexpr(rng.SAMPLING)
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def _mix(x):
    """See `rng`."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _row_key(seed, position):
    """What the noise of a row's tokens is made of."""
    key = _mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    return _mix(_mix(key ^ position.to(tl.uint64, bitcast=True)) + _STREAM)


@triton.jit
def _bits(key, token):
    """The 24 random bits of a token."""
    return (_mix(key + (token + 1).to(tl.uint64) * _GOLDEN) >> 40).to(tl.int32)


@triton.jit
def _noise(bits):
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * (1.0 / 16777216)))


@triton.jit
def _noise_bound(bits):
    """At least the noise, in float64: 1 - u is an odd whole number of 2^-25."""
    rest = (2 * (16777216 - bits) - 1).to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    # 152 = 25 + the exponent's offset. The margin is far above what float32 rounds away.
    return (0.6931472 * (152.0 - rest * (1.0 / 8388608)) + 1e-4).to(tl.float64)


@triton.jit
def _champion(bounds, tokens, values, key, divisor, start):
    """The largest exact value and its first token, of those whose bound is not minus infinity."""
    best, winner = start, tl.full((), _NOBODY, tl.int32)
    top = tl.max(bounds, 0)
    while (top >= best) & (top > float("-inf")):
        token = tl.min(tl.where(bounds == top, tokens, _NOBODY), 0)
        value = tl.load(values + token).to(tl.float64) / divisor + _noise(_bits(key, token))
        better = (value > best) | ((value == best) & (token < winner))
        best, winner = tl.where(better, value, best), tl.where(better, token, winner)
        bounds = tl.where(tokens == token, float("-inf"), bounds)
        top = tl.max(bounds, 0)
    return best, winner


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _race(
    best_out, token_out, flags_out, values, values_row, slots, positions, floats, ints, tops, cut_at, cut_id,
    V, CHUNK: tl.constexpr, NARROWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N, C). `values` are logits, or with NARROWED what `narrow` made of them and says of its outcome."""
    after_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    slot = tl.load(slots + row)
    number, whole = row_knobs(floats, ints, slot)
    temperature = tl.load(number + TEMPERATURE)
    values += row * values_row
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    x = tl.load(values + token, mask=inside, other=float("-inf")).to(tl.float64)
    if not NARROWED:
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0) * BAD
        tl.store(flags_out + place, bad | tl.max((x > float("-inf")).to(tl.int32), 0) * (FINITE | LEFT))
    best, winner = tl.full((), float("-inf"), tl.float64), tl.full((), _NOBODY, tl.int32)
    if temperature > 0:
        divisor = tl.full((), 1.0, tl.float64) if NARROWED else tl.maximum(temperature, 1e-6)
        alive = x > float("-inf")
        if NARROWED:
            cuts, _, _ = row_cuts(number, whole, V)
            if cuts:
                cut = tl.load(cut_at + row)
                alive = alive & ((x > cut) | ((x == cut) & (token <= tl.load(cut_id + row))))
            min_p = tl.load(number + MIN_P)
            if min_p > 0:
                alive = alive & (tl.exp(x - tl.load(tops + row)) >= min_p)
        key = _row_key(tl.load(whole + SEED), tl.load(positions + row) + 1)
        bounds = x
        if not NARROWED:
            bounds = x * (1.0 / divisor)
            bounds += tl.abs(bounds) * 1e-15  # a product with the inverse may be below the quotient
        bounds = tl.where(alive, bounds + _noise_bound(_bits(key, token)), float("-inf"))
        best, winner = _champion(bounds, token, values, key, divisor, best)
    else:
        best = tl.max(x, 0)
        winner = tl.min(tl.where((x == best) & inside, token, _NOBODY), 0)
    tl.store(best_out + place, best)
    tl.store(token_out + place, winner)


@triton.jit
def _join(tokens, ok, best, token, flags, V, C: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (N,): of the chunks' bests the largest, of equal ones the first."""
    after_previous(OVERLAP)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(best + row * C + at, mask=at < C, other=float("-inf"))
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top, tl.load(token + row * C + at, mask=at < C, other=_NOBODY), _NOBODY), 0)
    # Where no token can be drawn any will do.
    tl.store(tokens + row, tl.where(first < V, first, 0).to(tl.int64))
    flag = tl.load(flags + row * C + at, mask=at < C, other=0)
    bad, finite, left = tl.max(flag & BAD, 0), tl.max(flag & FINITE, 0), tl.max(flag & LEFT, 0)
    tl.store(ok + row, (bad == 0) & (finite > 0) & (left > 0))


def draw_rows(
    logits_NV: Tensor,
    rows: Rows,
    at_N: Tensor,
    positions_N: Tensor,
    index_N: Tensor,
    level: int,
    seen_SV: Seen | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The next token [N] of every row, by the parameters of its slot in `at_N`, and whether its logits are fine [N].

    `positions_N` are those of the tokens before, `index_N` the number of tokens generated before. `level` is at least
    RANDOM; at FULL `seen_SV`, by slot, is needed. Waits for nothing, and may lie in a CUDA graph.
    """
    logits_NV = logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()
    num_rows, vocab_size = logits_NV.shape
    chunks = -(-vocab_size // chunk)
    options = launch_options(logits_NV.device)
    flags_NC = logits_NV.new_empty((num_rows, chunks), dtype=torch.int32)
    token_NC = torch.empty_like(flags_NC)
    best_NC = logits_NV.new_empty((num_rows, chunks), dtype=torch.float64)
    narrowed = level >= FILTERED
    values_NV, outcome = logits_NV, (best_NC,) * 3
    if narrowed:
        values_NV, outcome = narrow(logits_NV, rows, at_N, index_N, seen_SV, flags_NC, chunk)
    _race[(num_rows, chunks)](
        best_NC, token_NC, flags_NC, values_NV, values_NV.stride(0), at_N, positions_N, rows.floats, rows.ints,
        *outcome, V=vocab_size, CHUNK=chunk, NARROWED=narrowed, num_warps=4, **options,
    )  # fmt: skip
    tokens_N = torch.empty_like(at_N)
    ok_N = torch.empty_like(at_N, dtype=torch.bool)
    block = padded(chunks)
    _join[(num_rows,)](
        tokens_N, ok_N, best_NC, token_NC, flags_NC, V=vocab_size, C=chunks, BLOCK=block,
        num_warps=min(max(block // 64, 1), 8), **options,
    )  # fmt: skip
    return tokens_N, ok_N
