"""The largest logit of each row in two steps: of blocks of the vocabulary, many at once, then of these.

A logit and its id make one number, so that "largest, and of equal ones the first" is a plain maximum, exact and the
same in any order:

    key = value * 2^32 + (2^31 - 1 - id)

`value` is the logit's 16 bits as a whole number that orders as the logits do: its magnitude with its sign, where both
zeros are 0 and every NaN is the largest.
"""

# N rows, V vocabulary, C candidates of a row
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.model.kernels.launch import after_previous, launch_options, padded

# The bits of infinity.
INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
# Logits of a program: their local ids take 16 bits.
CHUNK = 4096
_NONE = tl.constexpr(-(2**31))


@triton.jit
def _peaks(keys, logits, logits_row, V: tl.constexpr, CHUNK: tl.constexpr, INF: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (N, C)."""
    after_previous(OVERLAP)
    row, chunk, local = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, CHUNK)
    inside = chunk * CHUNK + local < V
    bits = tl.load(logits + row * logits_row + chunk * CHUNK + local, mask=inside, other=0.0)
    bits = bits.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    value = tl.where(bits < 0, -magnitude, magnitude)
    value = tl.where(magnitude > INF, 0x7FFF, value)
    best = tl.max(tl.where(inside, value * 65536 + (65535 - local), _NONE), 0)
    token = chunk * CHUNK + 65535 - (best & 65535)
    key = (best >> 16).to(tl.int64) * 4294967296 + (2147483647 - token).to(tl.int64)
    tl.store(keys + row * tl.num_programs(1) + chunk, key)


@triton.jit
def _join(tokens, ok, keys, C: tl.constexpr, BLOCK: tl.constexpr, INF: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid (N,)."""
    after_previous(OVERLAP)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + row * C + at, mask=at < C, other=-(2**63)), 0)
    value = key >> 32
    tl.store(tokens + row, 2147483647 - (key & 0xFFFFFFFF))
    tl.store(ok + row, (value < INF) & (value > -INF))


def largest_of(logits_NV: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The first largest logit of each row [N], and whether it is finite (NaN counts as largest); half precision."""
    num_rows, vocab_size = logits_NV.shape
    chunk = min(padded(vocab_size), chunk)
    keys_NC = torch.empty((num_rows, -(-vocab_size // chunk)), dtype=torch.long, device=logits_NV.device)
    _peaks[(num_rows, keys_NC.shape[1])](
        keys_NC, logits_NV, logits_NV.stride(0), V=vocab_size, CHUNK=chunk, INF=INFINITY[logits_NV.dtype],
        num_warps=min(max(chunk // 1024, 1), 16), **launch_options(logits_NV.device),
    )  # fmt: skip
    return join_keys(keys_NC, logits_NV.dtype)


def join_keys(keys_NC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of the candidates of each row, the first largest [N], and whether its logit is finite."""
    num_rows, candidates = keys_NC.shape
    tokens_N = torch.empty(num_rows, dtype=torch.long, device=keys_NC.device)
    ok_N = torch.empty(num_rows, dtype=torch.bool, device=keys_NC.device)
    block = padded(candidates)
    _join[(num_rows,)](
        tokens_N, ok_N, keys_NC, C=candidates, BLOCK=block, INF=INFINITY[dtype],
        num_warps=min(max(block // 64, 1), 8), **launch_options(keys_NC.device),
    )  # fmt: skip
    return tokens_N, ok_N
