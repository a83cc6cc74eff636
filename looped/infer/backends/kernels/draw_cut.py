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
def _equals(list_x, weights, length, value, BLOCK: tl.constexpr):
    """How many of a list's tokens have a value, and what each of them weighs."""
    count, weight = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        same = (i < length) & (tl.load(list_x + i, mask=i < length, other=0.0) == value)
        count += same.to(tl.int32)
        weight = tl.maximum(weight, tl.load(weights + i, mask=same, other=0))
    return tl.sum(count, 0), tl.max(weight, 0)


@triton.jit
def _equal(list_x, list_id, length, value, number, BLOCK: tl.constexpr):
    """The id of the token that is `number`-th, from 0, of those of a value; a list is in the order of ids."""
    before, token = tl.zeros((), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        same = (i < length) & (tl.load(list_x + i, mask=i < length, other=0.0) == value)
        this = same & (before + tl.cumsum(same.to(tl.int32), 0) == number + 1)
        token += tl.load(list_id + i, mask=this, other=0)
        before += tl.sum(same.to(tl.int32), 0)
    return tl.sum(token, 0)


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

    It holds of the list's first token. Bounds are always values of the list, so every round comes closer.
    """
    low, high = _span(list_x, length, BLOCK)
    heavier = tl.zeros((), tl.int64)
    while low < high:
        middle = 0.5 * low + 0.5 * high
        middle = tl.where((middle >= low) & (middle < high), middle, low)
        weight, above, below = _split(list_x, weights, length, middle, COUNTS, BLOCK)
        holds = (before + weight).to(tl.float64) < limit
        low, high, heavier = tl.where(holds, low, above), tl.where(holds, below, high), tl.where(holds, weight, heavier)
    # Of the tokens of that value each weighs the same.
    count, weight = _equals(list_x, weights, length, high, BLOCK)
    if COUNTS:
        weight = tl.full((), 1, tl.int64)
    number, most = tl.zeros((), tl.int32), count - 1
    while number < most:
        middle = number + (most - number + 1) // 2
        holds = (before + heavier + middle.to(tl.int64) * weight).to(tl.float64) < limit
        number, most = tl.where(holds, middle, number), tl.where(holds, most, middle - 1)
    return high, _equal(list_x, list_id, length, high, number, BLOCK)


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
