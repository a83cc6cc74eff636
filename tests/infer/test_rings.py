"""The kernels that change a ragged pool's tables do what PyTorch does. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # must stand before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from looped.infer import planes
from looped.infer.backends.kernels import rings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tables(num_slots: int, num_planes: int, width: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_slots)
    table = torch.randint(1, 1000, (num_slots, num_planes, width), dtype=torch.int32, device=DEVICE)
    ring = torch.randint(1, 1000, (num_slots, 8), dtype=torch.int32, device=DEVICE)
    table[0] = ring[0] = 0
    return table, ring, torch.randint(0, 30, (num_slots,), device=DEVICE)


def rows(num_slots: int, num_rows: int, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots in any order, between and behind them padding."""
    at = torch.zeros(num_rows, dtype=torch.long)
    at[torch.randperm(num_rows)[: num_slots - 1]] = torch.randperm(num_slots - 1) + 1
    return at.to(DEVICE), (torch.randint(0, width, (num_rows,)) * (at > 0)).to(DEVICE)


@pytest.mark.parametrize(("num_slots", "num_rows"), [(2, 1), (4, 5), (9, 16), (200, 300)])
def test_taking_pages(num_slots: int, num_rows: int) -> None:
    table, ring, taken = tables(num_slots, 3)
    at, positions = rows(num_slots, num_rows)
    steps = torch.randint(1, 4, (num_rows,), device=DEVICE)
    expected = table.clone(), taken.clone()
    planes.take_pages(expected[0], ring, expected[1], at, positions, steps)
    rings.take_pages(table, ring, taken, at, positions, steps)
    assert torch.equal(table, expected[0]) and torch.equal(taken[1:], expected[1][1:])


@pytest.mark.parametrize("num_planes", [1, 2, 4, 5])
@pytest.mark.parametrize(("num_slots", "num_rows"), [(2, 1), (9, 16), (200, 300)])
def test_aliases(num_slots: int, num_rows: int, num_planes: int) -> None:
    table, _, _ = tables(num_slots, num_planes)
    at, positions = rows(num_slots, num_rows)
    depths = torch.randint(1, num_planes + 1, (num_rows,), device=DEVICE)
    leaving = torch.rand(num_rows, device=DEVICE) < 0.6
    depths[at == 0] = 0  # padding may say anything
    expected = table.clone()
    planes.alias_planes(expected, at, positions, depths, leaving)
    rings.alias_planes(table, at, positions, depths, leaving)
    assert torch.equal(table, expected)
