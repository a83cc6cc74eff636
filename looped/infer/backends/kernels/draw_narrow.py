"""Which tokens of a row may be drawn: bias, penalties, ends, and the cut of top_k and top_p, found without a sort.

In the order of a stable sort (larger first, of equals the lower id) what top_k and top_p keep is a prefix. So it has a
last token, the cut, and the sums that decide it are whole numbers: exact, in any order of adding. Four kernels:

1. `_prepare`: scaled logits in float64, and each chunk's largest.
2. `_weigh`: by distance from the row's largest, tokens fall into few bins; counts and masses of these.
3. `_gather`: only bins that may hold the cut are looked at; their tokens go into a list.
4. `find_cut`: bisection, first for the value at the cut, then, among tokens of that value, for the id.

The bin is a monotone function of the value, so bins are in order as tokens are. min_p is no part of the order: it is a
question to each token's own weight, asked where masses are summed and when tokens are drawn.
"""

# S slots, N rows, V vocabulary, C chunks of it, J bins
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.draw_cut import BLOCK, find_cut
from looped.infer.backends.kernels.draw_params import (
    BAD,
    FINITE,
    FREQUENCY,
    LEFT,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    row_cuts,
    row_knobs,
)
from looped.model.kernels.launch import after_previous, launch_options, padded
from looped.sampling import Rows, Seen

CHUNK = 2048
BINS = 8

# Mass is counted in whole units, see `looped.sampling`.
_UNITS = tl.constexpr(float(1 << 40))
_INF = tl.constexpr(float("inf"))


@triton.jit
def _penalized(logit, number, counts, prompt, token, mask):
    count = tl.load(counts + token, mask=mask, other=0)
    generated = count > 0
    occurred = generated | (tl.load(prompt + token, mask=mask, other=0) != 0)
    factor = tl.where(occurred, tl.load(number + REPETITION), 1.0)
    logit = tl.where(logit > 0, logit / factor, logit * factor)
    logit -= tl.load(number + FREQUENCY) * count.to(tl.float64)
    return logit - tl.load(number + PRESENCE) * generated.to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["slots", "index"])
def _prepare(
    scaled, peaks, sums, finites, flags, logits, logits_row, slots, index, floats, ints, bias_ids, bias, end_ids,
    counts, prompt, V, CHUNK: tl.constexpr, BIASES: tl.constexpr, BIAS_BLOCK: tl.constexpr,
    ENDS: tl.constexpr, ENDS_BLOCK: tl.constexpr, PENALIZED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N, C). Greedy rows keep their logits as they are."""
    after_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + chunk
    slot = tl.load(slots + row)
    number, whole = row_knobs(floats, ints, slot)
    temperature = tl.load(number + TEMPERATURE)
    divisor = tl.where(temperature > 0, tl.maximum(temperature, 1e-6), 1.0)
    logits += row * logits_row
    scaled += row * V
    counts += slot * V
    prompt += slot * V
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < V
    raw = tl.load(logits + token, mask=inside, other=-_INF).to(tl.float64)
    x = raw
    if PENALIZED:
        x = _penalized(x, number, counts, prompt, token, inside)
    x = x / divisor
    tl.store(scaled + token, x, mask=inside)
    # Few tokens have a bias or must not come yet: they are written over.
    at = tl.arange(0, BIAS_BLOCK)
    added = tl.load(bias + slot * BIASES + at, mask=at < BIASES, other=0.0)
    end = tl.arange(0, ENDS_BLOCK)
    early = tl.load(index + row) < tl.load(whole + MIN_TOKENS)
    out = tl.load(end_ids + slot * ENDS + end, mask=(end < ENDS) & early, other=-1)
    if (tl.max((added != 0).to(tl.int32), 0) > 0) | (tl.max(out, 0) >= 0):
        tl.debug_barrier()
        ids = tl.load(bias_ids + slot * BIASES + at, mask=added != 0, other=-1)
        here = (added != 0) & (ids // CHUNK == chunk)
        changed = tl.load(logits + ids, mask=here, other=0.0).to(tl.float64) + added
        if PENALIZED:
            changed = _penalized(changed, number, counts, prompt, ids, here)
        tl.store(scaled + ids, changed / divisor, mask=here)
        tl.debug_barrier()
        tl.store(scaled + out, tl.full(out.shape, -_INF, tl.float64), mask=(out >= 0) & (out // CHUNK == chunk))
        tl.debug_barrier()
        x = tl.load(scaled + token, mask=inside, other=-_INF)
    bad = tl.max(((raw != raw) | (raw == _INF)).to(tl.int32), 0) * BAD
    finite = tl.max((raw > -_INF).to(tl.int32), 0) * FINITE
    left = x > -_INF
    tl.store(flags + place, bad | finite | tl.max(left.to(tl.int32), 0) * LEFT)
    tl.store(peaks + place, tl.max(x, 0))
    tl.store(sums + place, tl.sum(tl.where(left, x, 0.0), 0))
    tl.store(finites + place, tl.sum(left.to(tl.int32), 0))


@triton.jit
def _bin(x, top, narrowness, BINS: tl.constexpr):
    far = (top - x) * narrowness
    return tl.where(far < BINS - 1, far, BINS - 1.0).to(tl.int32)


@triton.jit
def _mass(x, top, min_p, counted):
    weight = tl.exp(x - top)
    return tl.where(counted & (weight >= min_p), weight * _UNITS, 0.0).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _weigh(
    tops, widths, bin_counts, bin_masses, scaled, peaks, sums, finites, slots, floats, ints,
    V, CHUNK: tl.constexpr, C_BLOCK: tl.constexpr, BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N, C)."""
    after_previous(OVERLAP)
    row, chunk, C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number, whole = row_knobs(floats, ints, tl.load(slots + row))
    at = tl.arange(0, C_BLOCK)
    top = tl.max(tl.load(peaks + row * C + at, mask=at < C, other=-_INF), 0)
    total = tl.sum(tl.load(sums + row * C + at, mask=at < C, other=0.0), 0)
    finite = tl.sum(tl.load(finites + row * C + at, mask=at < C, other=0), 0)
    # Bins reach half again as far as the mean. Any width is right: a good one makes the list below short.
    narrowness = BINS / (1.5 * tl.maximum(top - total / tl.maximum(finite, 1), 0.0))
    if chunk == 0:
        tl.store(tops + row, top)
        tl.store(widths + row, narrowness)
    cuts, _, _ = row_cuts(number, whole, V)
    if cuts:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < V
        x = tl.load(scaled + row * V + token, mask=inside, other=-_INF)
        mass = _mass(x, top, tl.load(number + MIN_P), inside)
        which = tl.where(inside, _bin(x, top, narrowness, BINS), -1)
        place = (row * C + chunk) * BINS
        for j in tl.static_range(BINS):
            tl.store(bin_counts + place + j, tl.sum((which == j).to(tl.int32), 0))
            tl.store(bin_masses + place + j, tl.sum(tl.where(which == j, mass, 0), 0))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gather(
    list_x, list_mass, list_id, head, scaled, tops, widths, bin_counts, bin_masses, slots, floats, ints,
    V, CHUNK: tl.constexpr, C_BLOCK: tl.constexpr, BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N, C). The head of a list: its length, how many tokens come before it, their mass, that of all."""
    after_previous(OVERLAP)
    row, chunk, C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number, whole = row_knobs(floats, ints, tl.load(slots + row))
    cuts, top_k, top_p = row_cuts(number, whole, V)
    if cuts:
        c, j = tl.arange(0, C_BLOCK), tl.arange(0, BINS)
        places = (row * C + c[:, None]) * BINS + j[None, :]
        count_CJ = tl.load(bin_counts + places, mask=c[:, None] < C, other=0)
        count = tl.sum(count_CJ, 0)
        mass = tl.sum(tl.load(bin_masses + places, mask=c[:, None] < C, other=0), 0)
        count_to, mass_to = tl.cumsum(count, 0), tl.cumsum(mass, 0)
        mass_before = mass_to - mass
        # The bin of the last token that top_k leaves; all of the mass up to it may count for top_p, or none of the bin.
        last_k = tl.min(tl.where(count_to >= top_k, j, BINS - 1), 0)
        most = tl.sum(tl.where(j == last_k, mass_to, 0), 0)
        least = tl.where(top_k < V, tl.sum(tl.where(j == last_k, mass_before, 0), 0), most)
        # A bin has a token that top_p leaves if its first one is.
        starts = mass_before.to(tl.float64)
        first_p = tl.max(tl.where((count > 0) & (starts < top_p * least.to(tl.float64)), j, 0), 0)
        last_p = tl.max(tl.where((count > 0) & (starts < top_p * most.to(tl.float64)), j, 0), 0)
        low = tl.where(top_p < 1, tl.minimum(first_p, last_k), last_k)
        high = tl.where(top_k < V, last_k, last_p)
        listed = (j >= low) & (j <= high)
        if chunk == 0:
            tl.store(head + row * 4, tl.sum(tl.where(listed, count, 0), 0).to(tl.int64))
            tl.store(head + row * 4 + 1, tl.sum(tl.where(j < low, count, 0), 0).to(tl.int64))
            tl.store(head + row * 4 + 2, tl.sum(tl.where(j < low, mass, 0), 0))
            tl.store(head + row * 4 + 3, most)
        count_CJ = tl.where(listed[None, :], count_CJ, 0)
        if tl.sum(tl.sum(tl.where(c[:, None] == chunk, count_CJ, 0), 1), 0) > 0:
            first = tl.sum(tl.sum(tl.where(c[:, None] < chunk, count_CJ, 0), 1), 0)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(scaled + row * V + token, mask=token < V, other=-_INF)
            top = tl.load(tops + row)
            which = _bin(x, top, tl.load(widths + row), BINS)
            here = (token < V) & (which >= low) & (which <= high)
            to = row * V + first + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(list_x + to, x, mask=here)
            tl.store(list_mass + to, _mass(x, top, tl.load(number + MIN_P), here), mask=here)
            tl.store(list_id + to, token, mask=here)


def narrow(
    logits_NV: Tensor,
    rows: Rows,
    at_N: Tensor,
    index_N: Tensor,
    seen_SV: Seen | None,
    flags_NC: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Scaled logits [N, V] in float64, of greedy rows the logits, after all that changes them; then each row's largest,
    and the value and id of the last token that top_k and top_p leave (unset where they are off). Fills `flags_NC`."""
    (num_rows, vocab_size), chunks = logits_NV.shape, flags_NC.shape[1]
    options = launch_options(logits_NV.device)
    grid, both = (num_rows, chunks), dict(V=vocab_size, CHUNK=chunk, num_warps=4, **options)
    parts = both | dict(C_BLOCK=padded(chunks), BINS=BINS)
    params = at_N, rows.floats, rows.ints

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits_NV.new_empty((num_rows, *shape), dtype=dtype)

    scaled_NV, list_x_NV = empty(torch.float64, vocab_size), empty(torch.float64, vocab_size)
    list_mass_NV, list_id_NV = empty(torch.int64, vocab_size), empty(torch.int32, vocab_size)
    peaks_NC, sums_NC, finites_NC = (
        empty(torch.float64, chunks),
        empty(torch.float64, chunks),
        empty(torch.int32, chunks),
    )
    tops_N, narrowness_N, cut_at_N = empty(torch.float64), empty(torch.float64), empty(torch.float64)
    cut_id_N, head_N4 = empty(torch.int32), empty(torch.int64, 4)
    counts_NCJ, masses_NCJ = empty(torch.int32, chunks, BINS), empty(torch.int64, chunks, BINS)
    num_biases, num_ends = rows.bias.shape[1], rows.end_ids.shape[1]
    _prepare[grid](
        scaled_NV, peaks_NC, sums_NC, finites_NC, flags_NC, logits_NV, logits_NV.stride(0), at_N, index_N,
        rows.floats, rows.ints, rows.bias_ids, rows.bias, rows.end_ids, *(seen_SV or (flags_NC, flags_NC)),
        BIASES=num_biases, BIAS_BLOCK=padded(num_biases), ENDS=num_ends, ENDS_BLOCK=padded(num_ends),
        PENALIZED=seen_SV is not None, enable_fp_fusion=False, **both,
    )  # fmt: skip
    _weigh[grid](
        tops_N, narrowness_N, counts_NCJ, masses_NCJ, scaled_NV, peaks_NC, sums_NC, finites_NC, *params, **parts
    )  # fmt: skip
    _gather[grid](
        list_x_NV, list_mass_NV, list_id_NV, head_N4, scaled_NV, tops_N, narrowness_N, counts_NCJ, masses_NCJ, *params,
        **parts,
    )  # fmt: skip
    find_cut[(num_rows,)](
        cut_at_N, cut_id_N, list_x_NV, list_mass_NV, list_id_NV, head_N4, *params,
        V=vocab_size, BLOCK=BLOCK, num_warps=16, **options,
    )  # fmt: skip
    return scaled_NV, (tops_N, cut_at_N, cut_id_N)
