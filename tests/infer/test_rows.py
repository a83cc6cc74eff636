"""The kernels around the stages do what PyTorch does to the rows. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # must stand before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from looped.infer import rowops
from looped.infer.backends import triton  # noqa: F401  (makes the interpreter ready)
from looped.infer.backends.kernels import rows as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TICK = torch.tensor([77], device=DEVICE)


def make_state(num_slots: int, width: int = 20, dense: bool = False) -> SimpleNamespace:
    """Slots in all phases; slot 0 idle."""
    torch.manual_seed(num_slots)

    def ints(high: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (num_slots,), device=DEVICE)

    state = SimpleNamespace(
        num_slots=num_slots,
        token=ints(50),
        position=ints(30),
        step=ints(4),
        index=ints(9),
        phase=ints(4),
        since=ints(6),
        max_len=ints(40, 5),
        max_depth=ints(5, 1),
        ahead=ints(2).bool(),
        h=torch.randn(num_slots, width, device=DEVICE),
        exit_h=torch.randn(num_slots, width, device=DEVICE) if dense else None,
        depth=ints(5, 1) if dense else None,
    )
    for name in ("token", "position", "step", "index", "phase", "since"):
        getattr(state, name)[0] = 0
    return state


def batch(num_slots: int, num_rows: int) -> Tensor:
    """Slots in any order, between and behind them padding."""
    at = torch.zeros(num_rows, dtype=torch.long)
    at[torch.randperm(num_rows)[: num_slots - 1]] = torch.randperm(num_slots - 1) + 1
    return at.to(DEVICE)


def same(state: SimpleNamespace, other: SimpleNamespace) -> None:
    """Equal but for what slot 0 holds: padding rows write there in any order."""
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            assert torch.equal(value[1:], getattr(other, name)[1:]), name
    assert int(state.phase[0]) == int(other.phase[0]) == rowops.IDLE
    assert int(state.step[0]) == int(other.step[0]) == 0


SIZES = [(2, 1), (4, 5), (9, 16), (40, 70)]


@pytest.mark.parametrize(("num_slots", "num_rows"), SIZES)
@pytest.mark.parametrize("gate", ["none", "now", "late"])
def test_a_core_step(num_slots: int, num_rows: int, gate: str) -> None:
    state = make_state(num_slots)
    other, at = copy.deepcopy(state), batch(num_slots, num_rows)
    planes = torch.tensor([0, 0, 1, 2, 3], device=DEVICE)
    outs = rowops.begin(state, planes, at), kernels.begin(other, planes, at)  # type: ignore[arg-type]
    for mine, theirs in zip(*outs, strict=True):
        assert torch.equal(mine, theirs)
    h, said = torch.randn_like(outs[0][3]), torch.rand(num_rows, device=DEVICE) < 0.5
    args = (TICK, at, outs[0][1], h, None if gate == "none" else said, gate == "late")
    assert torch.equal(rowops.leave(state, *args), kernels.leave(other, *args))  # type: ignore[arg-type]
    same(state, other)


@pytest.mark.parametrize(("num_slots", "num_rows"), SIZES)
@pytest.mark.parametrize("dense", [False, True])
def test_rows_of_a_queue(num_slots: int, num_rows: int, dense: bool) -> None:
    state, at = make_state(num_slots, dense=dense), batch(num_slots, num_rows)
    for name in ("outcome", "fresh"):
        mine, theirs = getattr(rowops, name)(state, at), getattr(kernels, name)(state, at)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
        phase = rowops.CODA if name == "outcome" else rowops.PRELUDE
        assert mine[0].tolist() == [slot if int(state.phase[slot]) == phase else 0 for slot in at.tolist()]


@pytest.mark.parametrize(("num_slots", "num_rows"), SIZES)
@pytest.mark.parametrize("num_ends", [1, 3, 66])
def test_new_tokens(num_slots: int, num_rows: int, num_ends: int) -> None:
    state = make_state(num_slots)
    other, at = copy.deepcopy(state), batch(num_slots, num_rows)
    tokens, depths = (torch.randint(0, 6, (num_rows,), device=DEVICE) for _ in range(2))
    ok = torch.rand(num_rows, device=DEVICE) < 0.9
    ends = torch.randint(-1, 6, (num_slots, num_ends), device=DEVICE)
    min_tokens = torch.randint(0, 9, (num_slots, 4), device=DEVICE)[:, -1]
    args = (TICK, at, tokens, ok, state.position[at], depths, ends, min_tokens)
    assert torch.equal(rowops.land(state, *args), kernels.land(other, *args))  # type: ignore[arg-type]
    same(state, other)


@pytest.mark.parametrize(("num_slots", "num_rows"), SIZES)
def test_entering(num_slots: int, num_rows: int) -> None:
    state = make_state(num_slots)
    other, at = copy.deepcopy(state), batch(num_slots, num_rows)
    h = torch.randn(num_rows, state.h.shape[1], device=DEVICE)
    rowops.enter(state, TICK, at, h)  # type: ignore[arg-type]
    kernels.enter(other, TICK, at, h)
    same(state, other)


@pytest.mark.parametrize("num_slots", [2, 9, 40, 300])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_queues(num_slots: int, rows: int) -> None:
    state = make_state(num_slots)
    assert torch.equal(rowops.tally(state), kernels.tally(state))  # type: ignore[arg-type]
    for phase in (rowops.PRELUDE, rowops.CORE, rowops.CODA):
        rows = min(rows, num_slots)
        mine, theirs = rowops.select(state, phase, rows), kernels.select(state, phase, rows)  # type: ignore[arg-type]
        assert torch.equal(mine, theirs)
