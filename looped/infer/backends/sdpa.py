"""Paged attention through PyTorch's scaled_dot_product_attention: the reference backend, and the one for CPUs.

Pages are gathered into contiguous K/V first. On a CPU that copy would go to memory and back, so a decode batch is
taken in groups of rows whose K/V fit the cache: gather, attend while it is warm, next group.
"""

# N rows, L keys, H heads, G key/value heads, Q = H / G, K head dim

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.infer.backends.base import DecodeBatch, PrefillBatch
from looped.infer.pages import Pool
from looped.infer.scheduler import Chunk
from looped.model.attention import Attend

# Bytes of gathered K/V a group may have on a CPU: small enough for its caches, large enough to keep calls few.
GROUP_BYTES = 2 << 20


class _Group(NamedTuple):
    """Rows `start` to `stop` of a decode batch, trimmed to the longest of them."""

    start: int
    stop: int
    length: int
    rows: Tensor
    """Pool rows of their keys, [rows * length]; row 0 (padding) past a row's own length."""
    bias: Tensor | None
    """0 or -inf, [rows, 1, 1, length]; None where all rows have the same length."""


class _Past(NamedTuple):
    """What a later piece of a prompt reads of the earlier ones."""

    rows: Tensor
    mask_QL: Tensor


class SdpaBackend:
    """See the module. Any page size, any device, any dtype."""

    name = "sdpa"

    def check(self, page_size: int, device_type: str) -> None:
        """Nothing is refused."""

    def describe(self) -> str:
        return "sdpa (gathered pages, torch scaled_dot_product_attention)"

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        new_rows = pool.rows(batch.slots, batch.planes, batch.positions)
        groups = _decode_groups(pool, batch)

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            kv.index_copy_(0, new_rows, torch.stack((k_NGK, v_NGK), 1))
            out = [_attend_group(kv, q_NHK[group.start : group.stop], group) for group in groups]
            return out[0] if len(out) == 1 else torch.cat(out)

        return attend

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        planes = torch.full_like(batch.slots, plane)
        new_rows = pool.rows(batch.slots, planes, batch.positions)
        pasts = [_past(pool, chunk, plane) if chunk.start else None for chunk in batch.chunks]
        lengths = [chunk.length for chunk in batch.chunks]

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            kv.index_copy_(0, new_rows, torch.stack((k_NGK, v_NGK), 1))
            out = torch.empty_like(q_NHK)
            start = 0
            for past, length in zip(pasts, lengths, strict=True):
                piece = slice(start, start + length)
                out[piece] = _attend_piece(kv, q_NHK[piece], k_NGK[piece], v_NGK[piece], past)
                start += length
            return out

        return attend


def _decode_groups(pool: Pool, batch: DecodeBatch) -> list[_Group]:
    """The batch's key rows, built once for all layers of a step."""
    longest = batch.lens[-1]
    size = pool.page_size
    table = pool.table_SPB[batch.slots, batch.planes, : -(-longest // size)]
    at = torch.arange(longest, device=table.device)
    rows_NL = table.long() if size == 1 else table.long()[:, at // size] * size + at % size
    inside_NL = at < (batch.positions + 1)[:, None]
    rows_NL = rows_NL * inside_NL
    bias_NL = torch.zeros(rows_NL.shape, dtype=pool.data.dtype, device=table.device)
    bias_NL.masked_fill_(~inside_NL, -torch.inf)
    groups = []
    for start, stop in _split(batch.lens, pool):
        length = batch.lens[stop - 1]
        even = batch.lens[start] == length
        bias = None if even else bias_NL[start:stop, None, None, :length]
        groups.append(_Group(start, stop, length, rows_NL[start:stop, :length].reshape(-1), bias))
    return groups


def _split(lens: Sequence[int], pool: Pool) -> list[tuple[int, int]]:
    """Cut rows in order of length into groups whose gathered K/V fit the cache. A GPU takes all rows at once."""
    if pool.data.device.type != "cpu":
        return [(0, len(lens))]
    row_bytes = pool.data[0, 0].numel() * pool.data.element_size()
    cuts, start = [], 0
    for stop in range(1, len(lens) + 1):
        following = lens[stop] if stop < len(lens) else 0
        if stop == len(lens) or (stop + 1 - start) * following * row_bytes > GROUP_BYTES:
            cuts.append((start, stop))
            start = stop
    return cuts


def _attend_group(kv: Tensor, q_NHK: Tensor, group: _Group) -> Tensor:
    """One query a row over its gathered keys; the query heads of a KV head stand where queries stand."""
    num_kv_heads, head_dim = kv.shape[-2:]
    gathered = kv.view(kv.shape[0], -1).index_select(0, group.rows)
    k, v = gathered.view(-1, group.length, 2, num_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    q_NGQK = q_NHK.reshape(q_NHK.shape[0], num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(q_NGQK, k, v, attn_mask=group.bias)
    return out.reshape(q_NHK.shape)


def _past(pool: Pool, chunk: Chunk, plane: int) -> _Past:
    at = torch.arange(chunk.start + chunk.length, device=pool.data.device)
    before = at[: chunk.start]
    rows = pool.rows(torch.full_like(before, chunk.slot), torch.full_like(before, plane), before)
    return _Past(rows, at <= at[chunk.start :, None])


def _attend_piece(kv: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, past: _Past | None) -> Tensor:
    """Causal attention of one piece of a prompt, behind its past if it has one."""
    if past is not None:
        stored = kv[past.rows]
        k_NGK, v_NGK = torch.cat((stored[:, 0], k_NGK)), torch.cat((stored[:, 1], v_NGK))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
    grouped = q.shape[1] != k.shape[1]
    mask = None if past is None else past.mask_QL
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past is None, enable_gqa=grouped)
    return out[0].transpose(0, 1)
