"""Causal attention within stretches of one row of tokens: FlashAttention on a GPU, plain PyTorch elsewhere.

PyTorch's own FlashAttention takes stretches of any lengths in one launch, in bfloat16 and float16. Elsewhere the
stretches are attended one after another, or all at once where they are of one length.
"""

# N tokens of all stretches, S stretches, T tokens of one, H heads, G key/value heads, K head dimension

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from looped.model.attention import dense_causal
from looped.train.gates.sequences import Bounds

_HALVES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_DIM = 256
_QUERY_BLOCK = 256


def causal(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
    """Each token sees those of its stretch up to itself: q [N, H, K], k and v [N, G, K] to [N, H, K]."""
    if _served(q):
        return _flash(q, k, v, bounds)[0]
    return torch.cat([dense_causal(0, *part).flatten(0, 1) for part in _by_stretch((q, k, v), bounds)])


def causal_own(q: Tensor, kept_k: Tensor, kept_v: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
    """Each token sees what earlier ones of its stretch kept, and its own key and value of now.

    q [N, H, K], keys and values [N, G, K], to [N, H, K]. Attention to earlier tokens is causal attention of queries
    that stand one place further back; the own key joins by the logarithm of the sum that the others' weights had.
    """
    group = q.shape[1] // k.shape[1]
    own_k, own_v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[0] = own_v[0]
    if len(q) == 1:
        return out
    last = len(q) - 1
    shifted = Bounds(bounds.starts.clamp(max=last), tuple(min(cut, last) for cut in bounds.cuts))
    earlier, log_sum = _attend(q[1:], kept_k[:-1], kept_v[:-1], shifted)
    # The query that starts a stretch was taken for the last of the stretch before it: nothing is earlier than it.
    log_sum.index_fill_(0, (bounds.starts[1:-1] - 1).long(), -torch.inf)
    scores = (q[1:] * own_k[1:]).sum(-1, dtype=log_sum.dtype) * q.shape[-1] ** -0.5
    share = torch.sigmoid(scores - log_sum).to(q.dtype)
    torch.lerp(earlier, own_v[1:], share[..., None], out=out[1:])
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Causal attention [N, H, K] and the logarithm of each query's sum of weights [N, H], at least float32."""
    if _served(q):
        return _flash(q, k, v, bounds)
    group = q.shape[1] // k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    parts = [_square(*part) for part in _by_stretch((q, k, v), bounds)]
    out, log_sum = (torch.cat([part[i].flatten(0, 1) for part in parts]) for i in range(2))
    return out, log_sum


def _served(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in _HALVES and q.shape[-1] <= _FLASH_HEAD_DIM and q.shape[-1] % 8 == 0


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    longest = bounds.longest
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, bounds.starts, bounds.starts, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5
    )
    return out, log_sum.transpose(0, 1)


def _by_stretch(qkv: tuple[Tensor, ...], bounds: Bounds) -> list[list[Tensor]]:
    """Queries, keys and values of stretches [S, T, ..., K]: of all where they are of one length, else one by one."""
    spans = [(begin, end) for begin, end in itertools.pairwise(bounds.cuts) if end > begin]
    lengths = {end - begin for begin, end in spans}
    if len(lengths) == 1:
        return [[x.reshape(len(spans), -1, *x.shape[1:]) for x in qkv]]
    return [[x[None, begin:end] for x in qkv] for begin, end in spans]


def _square(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`_attend` of stretches of one length: [S, T, H, K] to [S, T, H, K] and [S, T, H]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads_k, heads_v = (x.transpose(1, 2).to(wide) for x in (k, v))
    outs, sums = [], []
    for first in range(0, q.shape[1], _QUERY_BLOCK):
        block = q[:, first : first + _QUERY_BLOCK].transpose(1, 2).to(wide) * q.shape[-1] ** -0.5
        end = first + block.shape[2]
        scores = block @ heads_k[:, :, :end].transpose(-1, -2)
        ahead = torch.ones(block.shape[2], end, dtype=torch.bool, device=q.device).triu(first + 1)
        scores.masked_fill_(ahead, -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1) @ heads_v[:, :, :end]).to(q.dtype))
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)
