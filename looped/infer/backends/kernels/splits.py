"""How a decode row's keys are split, and how the parts of a row become one result.

A row's earlier keys are cut into splits by its own length alone, and their results are folded in order. So a row's
output is the same whatever else is in the batch and whatever `max_len` a captured graph was made for.
"""

# N rows, H query heads, S splits, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Keys of a split, and how many splits a row has at most (longer rows get longer splits).
SPLIT_KEYS = 256
MAX_SPLITS = 32
# Programs wanted on every multiprocessor, so that loads of some hide the waiting of others.
PROGRAMS_PER_SM = 8


@triton.jit
def split_keys(num_keys, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one split of a row with `num_keys` earlier keys."""
    return SPLIT_KEYS * tl.maximum(tl.cdiv(num_keys, SPLIT_KEYS * MAX_SPLITS), 1)


@triton.jit
def last_to_arrive(counter, arrivals):
    """Whether every other program of a row and head has stored its parts; they can be read then.

    Resets the counter for the next launch.
    """
    tl.debug_barrier()  # every thread's stores come before this program is counted
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == arrivals - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


class Scratch(NamedTuple):
    """Where the programs of a row leave their parts. One for all layers of a batch: they run one after another."""

    acc: Tensor
    """Unnormalised outputs [N, H, S, K]."""
    stats: Tensor
    """Maximum (base-2 logarithm) and sum of weights [N, H, S, 2]."""
    arrived: Tensor
    """int32 [N, H], zero between launches."""
    num_splits: int
    """S, which no row of at most `max_len` keys exceeds."""
    split_keys: int
    """Keys of a split, in rows of at most `max_splits` of them."""
    max_splits: int
    num_programs: int
    """Programs a row and KV head; each takes every num_programs-th split."""


def make_scratch(
    num_rows: int,
    num_heads: int,
    kv: Tensor,
    max_len: int,
    num_sms: int,
    split_keys: int = SPLIT_KEYS,
    max_splits: int = MAX_SPLITS,
) -> Scratch:
    """Scratch for N rows over a pool's layer `kv` [rows, 2, G, K]. Right for all lengths up to `max_len`."""
    kv_heads, head_dim = kv.shape[-2:]
    num_splits = min(max(-(-(max_len - 1) // split_keys), 1), max_splits)
    wanted = -(-num_sms * PROGRAMS_PER_SM // max(num_rows * kv_heads, 1))
    dtype = torch.promote_types(kv.dtype, torch.float32)
    return Scratch(
        torch.empty((num_rows, num_heads, num_splits, head_dim), dtype=dtype, device=kv.device),
        torch.empty((num_rows, num_heads, num_splits, 2), dtype=dtype, device=kv.device),
        torch.zeros((num_rows, num_heads), dtype=torch.int32, device=kv.device),
        num_splits,
        split_keys,
        max_splits,
        max(min(num_splits, wanted), 1),
    )
