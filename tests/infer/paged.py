"""Paged attention cases for backends: pools with random tables, NaN wherever nothing was stored, a dense reference."""

# N rows, L keys, H heads, G key/value heads, K head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.infer.backends.base import Backend, DecodeBatch, Piece, PrefillBatch, piece_table

LAYERS = 2


@dataclass
class PagedPool:
    """What a backend uses of a pool: rows in shuffled pages, slot 0 and page 0 for padding."""

    data: Tensor
    table_SPB: Tensor
    page_size: int

    def layer(self, layer: int) -> Tensor:
        return self.data[layer]

    def rows(self, slots_N: Tensor, planes_N: Tensor, positions_N: Tensor) -> Tensor:
        page = self.table_SPB[slots_N, planes_N, positions_N // self.page_size]
        return page.long() * self.page_size + positions_N % self.page_size


class Shape(NamedTuple):
    """Query heads, key/value heads and head dim."""

    heads: int
    kv_heads: int
    head_dim: int


def make_pool(
    shape: Shape, page_size: int, num_slots: int, num_planes: int, max_len: int, dtype: torch.dtype, device: str
) -> PagedPool:
    """A pool full of NaN but for page 0."""
    blocks = -(-max_len // page_size)
    num_pages = num_slots * num_planes * blocks
    table = torch.zeros((num_slots + 1, num_planes, blocks), dtype=torch.int32)
    table[1:] = (torch.randperm(num_pages) + 1).view(num_slots, num_planes, blocks)
    data = torch.full(
        (LAYERS, (num_pages + 1) * page_size, 2, shape.kv_heads, shape.head_dim), torch.nan, dtype=dtype, device=device
    )
    data[:, :page_size] = 0
    return PagedPool(data, table.to(device), page_size)


def fill(pool: PagedPool, slot: int, plane: int, positions: Tensor) -> None:
    """Random K/V for tokens of a sequence, as if stored earlier."""
    where = torch.full_like(positions, slot), torch.full_like(positions, plane), positions
    rows = pool.rows(*(x.to(pool.data.device) for x in where))
    pool.data[:, rows] = torch.randn((LAYERS, len(rows), *pool.data.shape[2:])).to(pool.data)


def projections(count: int, shape: Shape, pool: PagedPool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of `count` rows, cut out of one tensor as a model's are."""
    heads, kv_heads, head_dim = shape
    packed = torch.randn(count, heads + 2 * kv_heads, head_dim).to(pool.data)
    q, k, v = packed.split([heads, kv_heads, kv_heads], 1)
    return q, k, v


def dense(pool: PagedPool, layer: int, q_HK: Tensor, slot: int, plane: int, position: int) -> Tensor:
    """Attention of one query to all stored keys up to its position, in float64."""
    at = torch.arange(position + 1, device=q_HK.device)
    rows = pool.rows(torch.full_like(at, slot), torch.full_like(at, plane), at)
    k_LGK, v_LGK = pool.data[layer, rows].double().unbind(1)
    group = q_HK.shape[0] // k_LGK.shape[1]
    k_LHK, v_LHK = k_LGK.repeat_interleave(group, 1), v_LGK.repeat_interleave(group, 1)
    scores = torch.einsum("hk,lhk->hl", q_HK.double(), k_LHK) * q_HK.shape[-1] ** -0.5
    return torch.einsum("hl,lhk->hk", scores.softmax(-1), v_LHK)


class Decode(NamedTuple):
    """A decode batch over a filled pool; `real` rows come before the padding."""

    pool: PagedPool
    batch: DecodeBatch
    real: int


def decode_case(
    shape: Shape,
    page_size: int,
    lens: list[int],
    dtype: torch.dtype,
    device: str = "cpu",
    padding: int = 2,
    max_len: int | None = None,
) -> Decode:
    """One new token a sequence of each length in `lens` (itself included), every second one in another plane."""
    torch.manual_seed(0)
    max_len = max_len or max(lens)
    pool = make_pool(shape, page_size, len(lens), 2, max_len, dtype, device)
    slots = torch.randperm(len(lens)) + 1
    planes = torch.arange(len(lens)) % 2
    for slot, plane, length in zip(slots.tolist(), planes.tolist(), lens, strict=True):
        fill(pool, slot, plane, torch.arange(length - 1))
    nothing = torch.zeros(padding, dtype=torch.int64)
    rows = (torch.cat((x, nothing)).to(device) for x in (slots, planes, torch.tensor(lens) - 1))
    return Decode(pool, DecodeBatch(*rows, max_len=max_len), len(lens))


def assert_decode(
    backend: Backend, case: Decode, shape: Shape, tolerance: float, layers: tuple[int, ...] = (1,)
) -> None:
    """Outputs against the dense reference; the pool changed where the batch's tokens lie (and in page 0) alone."""
    pool, batch, real = case
    attend = backend.decode(pool, batch)  # type: ignore[arg-type]
    for layer in layers:
        before = pool.layer(layer).clone()
        q, k, v = projections(len(batch.slots), shape, pool)
        out = attend(layer, q, k, v)
        assert_stored(pool, layer, before, batch.slots[:real], batch.planes[:real], batch.positions[:real], k, v)
        assert_rows(pool, layer, out, q, batch.slots[:real], batch.planes[:real], batch.positions[:real], tolerance)
        assert out.shape == q.shape and out.isfinite().all()


def assert_rows(
    pool: PagedPool, layer: int, out: Tensor, q: Tensor, slots: Tensor, planes: Tensor, positions: Tensor, tol: float
) -> None:
    where = zip(slots.tolist(), planes.tolist(), positions.tolist(), strict=True)
    wanted = torch.stack([dense(pool, layer, q[row], *at) for row, at in enumerate(where)])
    torch.testing.assert_close(out[: len(wanted)].double(), wanted, rtol=tol, atol=tol)


def assert_stored(
    pool: PagedPool, layer: int, before: Tensor, slots: Tensor, planes: Tensor, positions: Tensor, k: Tensor, v: Tensor
) -> None:
    rows = pool.rows(slots, planes, positions)
    before[rows] = torch.stack((k[: len(rows)], v[: len(rows)]), 1)
    size = pool.page_size
    torch.testing.assert_close(pool.layer(layer)[size:], before[size:], rtol=0, atol=0, equal_nan=True)


class Part(NamedTuple):
    """A piece of a prompt: what is stored before it, and the positions of its rows."""

    past: int
    positions: list[int]


def prefill_case(
    shape: Shape, page_size: int, parts: list[Part], dtype: torch.dtype, device: str = "cpu"
) -> tuple[PagedPool, PrefillBatch]:
    """Packed pieces in plane 1. Tokens between the rows of a piece with holes are stored, as those that left are."""
    torch.manual_seed(0)
    longest = max(part.positions[-1] for part in parts) + 1
    pool = make_pool(shape, page_size, len(parts), 2, longest, dtype, device)
    pieces, slots, positions = [], [], []
    for slot, part in enumerate(parts, start=1):
        rows = part.positions
        stored = sorted(set(range(rows[-1])) - set(rows))
        fill(pool, slot, 1, torch.tensor(stored, dtype=torch.int64))
        pieces.append(Piece(slot, len(slots), len(slots) + len(rows), rows[0], rows[-1] + 1))
        slots += [slot] * len(rows)
        positions += rows
    return pool, PrefillBatch.of(*(torch.tensor(x, device=device) for x in (slots, positions)), pieces)


def assert_prefill(
    backend: Backend,
    pool: PagedPool,
    batch: PrefillBatch,
    shape: Shape,
    tolerance: float,
    layers: tuple[int, ...] = (1,),
) -> None:
    """As `assert_decode`, for a prompt batch in plane 1."""
    attend = backend.prefill(pool, batch, 1)  # type: ignore[arg-type]
    planes, real = torch.ones_like(batch.slots), int((batch.slots > 0).sum())
    for layer in layers:
        before = pool.layer(layer).clone()
        q, k, v = projections(len(batch.slots), shape, pool)
        out = attend(layer, q, k, v)
        at = [x[:real] for x in (batch.slots, planes, batch.positions)]
        assert_stored(pool, layer, before, *at, k, v)
        assert_rows(pool, layer, out, q, *at, tolerance)
        assert out.shape == q.shape and out.isfinite().all()


def padded(batch: PrefillBatch, size: int, places: int, max_len: int) -> PrefillBatch:
    """With `size` rows, room for `places` pieces, and bounds as loose as a graph's."""
    count = len(batch.slots)
    pieces = (*batch.pieces, Piece(0, count, size, 0, 1)) if count < size else batch.pieces
    slots, positions = (torch.nn.functional.pad(x, (0, size - count)) for x in (batch.slots, batch.positions))
    table = torch.from_numpy(piece_table(pieces, places)).to(slots.device)
    return PrefillBatch(slots, positions, table, pieces, size, max_len)


def edge_lens(page_size: int) -> list[int]:
    """Lengths around a page's edges, and an odd one."""
    return sorted({1, 2, max(page_size - 1, 1), page_size, page_size + 1, 2 * page_size, 37})


def parts(page_size: int) -> list[Part]:
    """Whole prompts, chunks behind a past, holes, and single rows."""
    return [
        Part(0, list(range(page_size + 1))),
        Part(0, [0]),
        Part(21, list(range(21, 58))),
        Part(0, [0, 1, 5, 6, 7, 20, 40]),
        Part(17, [19, 23, 24, 50]),
        Part(63, [63]),
    ]


def copied_planes(pool: PagedPool, slots: Tensor, positions: Tensor, depths: Tensor, leaving: Tensor) -> Tensor:
    """The pool's data after the missing planes of rows that leave were copied from their last one."""
    data = pool.data.clone()
    num_planes = pool.table_SPB.shape[1]
    for row in range(len(slots)):
        if not leaving[row]:
            continue
        at = [x[row : row + 1] for x in (slots, positions)]
        source = pool.rows(at[0], depths[row : row + 1] - 1, at[1])
        for plane in range(int(depths[row]), num_planes):
            data[:, pool.rows(at[0], torch.full_like(at[0], plane), at[1])] = pool.data[:, source]
    return data
