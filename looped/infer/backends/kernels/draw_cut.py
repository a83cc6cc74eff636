"""The cut of top_k and top_p in a list of tokens, by bisection: see `draw_narrow`."""

# N rows, V vocabulary
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

from looped.infer.backends.kernels.draw_params import row_cuts, row_knobs
from looped.model.kernels.launch import after_previous

# Tokens that a program looks at in one go.
BLOCK = 4096
_INF = tl.constexpr(float("inf"))
# Beyond every token.
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def _split(list_x, weights, length, at, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of a list's values above `at`, the least of these, and the largest of the others."""
    total = tl.zeros((BLOCK,), tl.int64)
    above, below = tl.full((BLOCK,), _INF, tl.float64), tl.full((BLOCK,), -_INF, tl.float64)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < length
        x = tl.load(list_x + i, mask=inside, other=-_INF)
        over = inside & (x > at)
        if COUNTS:
            total += over.to(tl.int64)
        else:
            total += tl.load(weights + i, mask=over, other=0)
        above = tl.minimum(above, tl.where(over, x, _INF))
        below = tl.maximum(below, tl.where(over, -_INF, x))
    return tl.sum(total, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _split_ids(list_x, list_id, weights, length, value, at, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a list's tokens of one value: the weight of ids up to `at`, the largest of these, the least of the others."""
    total = tl.zeros((BLOCK,), tl.int64)
    upto, after = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), _NOBODY, tl.int32)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        same = (tl.load(list_x + i, mask=i < length, other=0.0) == value) & (i < length)
        token = tl.load(list_id + i, mask=same, other=0)
        if COUNTS:
            total += (same & (token <= at)).to(tl.int64)
        else:
            total += tl.load(weights + i, mask=same & (token <= at), other=0)
        upto = tl.maximum(upto, tl.where(same & (token <= at), token, -1))
        after = tl.minimum(after, tl.where(same & (token > at), token, _NOBODY))
    return tl.sum(total, 0), tl.max(upto, 0), tl.min(after, 0)


@triton.jit
def _span(list_x, length, BLOCK: tl.constexpr):
    """The least and the largest value of a list."""
    least, most = tl.full((BLOCK,), _INF, tl.float64), tl.full((BLOCK,), -_INF, tl.float64)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < length
        least = tl.minimum(least, tl.load(list_x + i, mask=inside, other=_INF))
        most = tl.maximum(most, tl.load(list_x + i, mask=inside, other=-_INF))
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _last(list_x, list_id, weights, length, before, limit, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The last token of a list before which less than `limit` weighs, `before` included: its value and id.

    It holds of the list's first token. Bounds are always values (ids) of the list, so every round comes closer.
    """
    low, high = _span(list_x, length, BLOCK)
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where((middle >= low) & (middle < high), middle, low)
        weight, above, below = _split(list_x, weights, length, middle, COUNTS, BLOCK)
        holds = (before + weight).to(tl.float64) < limit
        low, high = tl.where(holds, low, above), tl.where(holds, below, high)
    weight, _, _ = _split(list_x, weights, length, high, COUNTS, BLOCK)
    before += weight
    _, _, first = _split_ids(list_x, list_id, weights, length, high, -1, COUNTS, BLOCK)
    _, last, _ = _split_ids(list_x, list_id, weights, length, high, _NOBODY - 1, COUNTS, BLOCK)
    while first < last:
        middle = first + (last - first) // 2
        weight, upto, after = _split_ids(list_x, list_id, weights, length, high, middle, COUNTS, BLOCK)
        holds = (before + weight).to(tl.float64) < limit
        first, last = tl.where(holds, after, first), tl.where(holds, last, upto)
    return high, first


@triton.jit
def _mass_upto(list_x, list_id, list_mass, length, value, token, BLOCK: tl.constexpr):
    """The mass of a list's tokens up to one."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < length
        x = tl.load(list_x + i, mask=inside, other=-_INF)
        kept = (x > value) | ((x == value) & (tl.load(list_id + i, mask=inside, other=0) <= token))
        total += tl.load(list_mass + i, mask=inside & kept, other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def find_cut(
    cut_at, cut_id, list_x, list_mass, list_id, head, slots, floats, ints,
    V, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N,)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    number, whole = row_knobs(floats, ints, tl.load(slots + row))
    cuts, top_k, top_p = row_cuts(number, whole, V)
    if cuts:
        list_x += row * V
        list_mass += row * V
        list_id += row * V
        head += row * 4
        length = tl.load(head).to(tl.int32)
        mass_before, total = tl.load(head + 2), tl.load(head + 3)
        value, token = tl.full((), -_INF, tl.float64), tl.full((), -1, tl.int32)
        if top_k < V:
            limit = top_k.to(tl.float64)
            value, token = _last(list_x, list_id, list_mass, length, tl.load(head + 1), limit, True, BLOCK)
            if top_p < 1:
                total = mass_before + _mass_upto(list_x, list_id, list_mass, length, value, token, BLOCK)
        if top_p < 1:
            # What top_k leaves out has all of the total before it.
            limit = top_p * total.to(tl.float64)
            value, token = _last(list_x, list_id, list_mass, length, mass_before, limit, False, BLOCK)
        tl.store(cut_at + row, value)
        tl.store(cut_id + row, token)
