"""How a decode row's keys are split, who computes which split, and how the parts of a row become one result.

A row's earlier keys are cut into splits by its own length alone, and their results are folded in order. So a row's
output is the same whatever else is in the batch and whatever `max_len` a captured graph was made for. The splits of
all rows are listed once a batch, on the device, and programs take one after another off the list: a long row among
short ones keeps nobody waiting.
"""

# N rows, H query heads, G KV heads, S splits, K head dim
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.lookup import padded
from looped.model.kernels.launch import after_previous, launch_options

# Keys of a split, and how many splits a row has at most (longer rows get longer splits).
SPLIT_KEYS = 192
MAX_SPLITS = 32
# Programs for every multiprocessor, so that loads of some hide the waiting of others: as many as fit on one.
PROGRAMS_PER_SM = 9
# Splits of a row are numbered below this in the list.
_NUMBERED = tl.constexpr(256)


@triton.jit
def split_keys(num_keys, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of one split of a row with `num_keys` earlier keys: close to SPLIT_KEYS, and as good as equal in a row."""
    splits = tl.minimum(tl.maximum((num_keys + SPLIT_KEYS // 2) // SPLIT_KEYS, 1), MAX_SPLITS)
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, splits), 16), 1) * 16


@triton.jit
def _list(
    items, num_items, positions, num_rows, num_splits,
    SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: the splits of all rows, in order, and how many there are."""
    after_previous(OVERLAP)
    listed = tl.full([], 0, dtype=tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < num_rows
        position = tl.load(positions + rows, mask=inside, other=0).to(tl.int32)
        used = tl.maximum(tl.cdiv(position, split_keys(position, SPLIT_KEYS, MAX_SPLITS)), 1)
        used = tl.where(inside, used, 0)
        start = listed + tl.cumsum(used, 0) - used
        for split in range(0, num_splits):
            tl.store(items + start + split, rows * _NUMBERED + split, mask=split < used)
        listed += tl.sum(used, 0)
    tl.store(num_items, listed)


@triton.jit
def listed_split(items, at):
    """Row (int64) and split of the list's entry `at`."""
    item = tl.load(items + at)
    return (item // _NUMBERED).to(tl.int64), item % _NUMBERED


@triton.jit
def next_item(taken, num_items):
    """The entry to take after the present one; the first `num_programs` have an owner from the start.

    Asked once for each entry, early, so that nobody waits for the answer. Resets the counter for the next launch.
    """
    before = tl.atomic_add(taken, 1, sem="relaxed", scope="gpu")
    if before == num_items - 1:
        tl.store(taken, 0)
    return before + tl.num_programs(0)


@triton.jit
def last_to_arrive(counter, arrivals):
    """Whether every other split of a row and head has its parts stored; they can be read then.

    Resets the counter for the next launch.
    """
    tl.debug_barrier()  # every thread's stores come before this split is counted
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == arrivals - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


class Scratch(NamedTuple):
    """The splits of a batch and where their parts go. One for all layers: they run one after another."""

    items: Tensor
    """int32 [N * S]: row and split of each entry, the first `num_items` of them."""
    num_items: Tensor
    """int32 [1]."""
    taken: Tensor
    """int32 [1], zero between launches."""
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
    """Programs that share the entries of all KV heads. More than fit at once do no harm: they find nothing left."""


def make_scratch(
    positions_N: Tensor,
    num_heads: int,
    kv: Tensor,
    max_len: int,
    num_sms: int,
    split_keys: int = SPLIT_KEYS,
    max_splits: int = MAX_SPLITS,
) -> Scratch:
    """Scratch for rows at `positions_N` over a pool's layer `kv` [rows, 2, G, K], with its list filled on the device.

    Right for all lengths up to `max_len`, also where a graph replays it with other positions in the same tensor.
    """
    num_rows, device = len(positions_N), kv.device
    kv_heads, head_dim = kv.shape[-2:]
    num_splits = min(max((max_len - 1 + split_keys // 2) // split_keys, 1), max_splits)
    dtype = torch.promote_types(kv.dtype, torch.float32)
    scratch = Scratch(
        torch.empty(num_rows * num_splits, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.empty((num_rows, num_heads, num_splits, head_dim), dtype=dtype, device=device),
        torch.empty((num_rows, num_heads, num_splits, 2), dtype=dtype, device=device),
        torch.zeros((num_rows, num_heads), dtype=torch.int32, device=device),
        num_splits,
        split_keys,
        max_splits,
        min(num_sms * PROGRAMS_PER_SM, num_rows * kv_heads * num_splits),
    )
    _list[(1,)](
        scratch.items, scratch.num_items, positions_N, num_rows, num_splits,
        SPLIT_KEYS=split_keys, MAX_SPLITS=max_splits, ROWS=min(padded(num_rows, least=16), 1024),
        **launch_options(device),
    )  # fmt: skip
    return scratch
