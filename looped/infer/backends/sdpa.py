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

from looped.infer.backends.base import DecodeBatch, Piece, PrefillBatch
from looped.infer.pool import Pool
from looped.model.attention import Attend

# Bytes of gathered K/V a group may have on a CPU: small enough for its caches, large enough to keep calls few.
GROUP_BYTES = 2 << 20


class _Group(NamedTuple):
    """Rows of a decode batch that are attended together, trimmed to the longest of them."""

    members: Tensor | None
    """Their indices in the batch; None for all of them."""
    length: int
    rows: Tensor
    """Pool rows of their keys, [rows * length]; row 0 (padding) past a row's own length."""
    bias: Tensor
    """0 or -inf, [rows, 1, 1, length]."""


class _Keys(NamedTuple):
    """What a piece of a prompt reads from the pool; None where its own rows are all there is."""

    rows: Tensor
    mask_QL: Tensor


class SdpaBackend:
    """See the module. Any page size, any device, any dtype."""

    name = "sdpa"
    pads_prefill = True
    by_rows = 32

    def check(self, page_size: int, head_dim: int, dtype: torch.dtype, device_type: str) -> None:
        """Nothing is refused."""

    def describe(self) -> str:
        return "sdpa (gathered pages, torch scaled_dot_product_attention)"

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        new_rows = pool.rows(batch.slots, batch.planes, batch.positions)
        groups = _decode_groups(pool, batch)

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            kv.index_copy_(0, new_rows, torch.stack((k_NGK, v_NGK), 1))
            if len(groups) == 1 and groups[0].members is None:
                return _attend_group(kv, q_NHK, groups[0])
            out = torch.empty_like(q_NHK)
            for group in groups:
                out[group.members] = _attend_group(kv, q_NHK[group.members], group)
            return out

        return attend

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        planes = torch.full_like(batch.slots, plane)
        new_rows = pool.rows(batch.slots, planes, batch.positions)
        keys = [_keys(pool, piece, batch, plane) for piece in batch.pieces]

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            kv.index_copy_(0, new_rows, torch.stack((k_NGK, v_NGK), 1))
            out = torch.empty_like(q_NHK)
            for piece, read in zip(batch.pieces, keys, strict=True):
                own = slice(piece.start, piece.stop)
                out[own] = _attend_piece(kv, q_NHK[own], k_NGK[own], v_NGK[own], read)
            return out

        return attend


def _decode_groups(pool: Pool, batch: DecodeBatch) -> list[_Group]:
    """The batch's key rows, built once for all layers of a step."""
    device = pool.data.device
    if device.type != "cpu":
        return [_group(pool, batch, None, batch.max_len)]
    lens = batch.positions + 1
    order = lens.argsort(stable=True)
    ordered = lens[order].tolist()
    cuts = _split(ordered, pool)
    if len(cuts) == 1:
        return [_group(pool, batch, None, ordered[-1])]
    return [_group(pool, batch, order[start:stop], ordered[stop - 1]) for start, stop in cuts]


def _group(pool: Pool, batch: DecodeBatch, members: Tensor | None, length: int) -> _Group:
    slots, planes, positions = batch.slots, batch.planes, batch.positions
    if members is not None:
        slots, planes, positions = slots[members], planes[members], positions[members]
    at = torch.arange(length, device=slots.device)
    inside_NL = at <= positions[:, None]
    rows_NL = pool.rows(slots[:, None], planes[:, None], at[None]) * inside_NL
    bias_NL = torch.zeros(rows_NL.shape, dtype=pool.data.dtype, device=slots.device)
    bias_NL.masked_fill_(~inside_NL, -torch.inf)
    return _Group(members, length, rows_NL.reshape(-1), bias_NL[:, None, None])


def _split(lens: Sequence[int], pool: Pool) -> list[tuple[int, int]]:
    """Cut rows in order of length into groups whose gathered K/V fit the cache."""
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


def _keys(pool: Pool, piece: Piece, batch: PrefillBatch, plane: int) -> _Keys | None:
    if piece.first == 0 and piece.contiguous:
        return None
    at = torch.arange(piece.end, device=pool.data.device)
    rows = pool.rows(torch.full_like(at, piece.slot), torch.full_like(at, plane), at)
    return _Keys(rows, at <= batch.positions[piece.start : piece.stop, None])


def _attend_piece(kv: Tensor, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, keys: _Keys | None) -> Tensor:
    """Causal attention of one piece of a prompt: over itself, or over all that its sequence has stored."""
    if keys is not None:
        k_NGK, v_NGK = kv[keys.rows].unbind(1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_NGK, v_NGK))
    grouped = q.shape[1] != k.shape[1]
    mask = None if keys is None else keys.mask_QL
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=keys is None, enable_gqa=grouped)
    return out[0].transpose(0, 1)
