"""The parameters that the drawing kernels read, by slot."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

# Columns of the parameters, see `looped.sampling.Knobs`.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(column) for column in range(6))
SEED, TOP_K, MIN_TOKENS = (tl.constexpr(column) for column in range(3))
# What is known of a chunk: NaN or infinity among its logits; one that is not minus infinity; the same after all else.
BAD, FINITE, LEFT = (tl.constexpr(flag) for flag in (1, 2, 4))


@triton.jit
def row_knobs(floats, ints, slot):
    """Where the numbers of a slot stand."""
    return floats + slot * 6, ints + slot * 3


@triton.jit
def row_cuts(number, whole, V):
    """Whether the row is drawn at random with a cut; top_k (V: none) and top_p (1: none)."""
    top_k, top_p = tl.load(whole + TOP_K), tl.load(number + TOP_P)
    top_k = tl.where((top_k > 0) & (top_k < V), top_k, V)
    return (tl.load(number + TEMPERATURE) > 0) & ((top_k < V) | (top_p < 1)), top_k, top_p
