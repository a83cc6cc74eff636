"""What lets gates run inside CUDA graphs, on batches padded with slots that hold no sequence: nothing waits for the
device, shapes follow from the number of rows, and no stale value makes a gate raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from looped.errors import LoopedError
from looped.gates import (
    Carry,
    DelayGate,
    Entry,
    FixedGate,
    Gate,
    HybridGate,
    OuroGate,
    Params,
    ReplayGate,
)
from looped.gates.criteria import CRITERIA
from looped.gates.trained import Hidden, TrainedGate
from tests import trained
from tests.models import micro_ouro, random_lookahead, random_pre_loop

MODEL = micro_ouro()
WIDTH, VOCAB, ROWS = MODEL.config.hidden_size, MODEL.config.vocab_size, 3


def with_hidden(gate: TrainedGate, layers: int) -> TrainedGate:
    heads, features = gate.weight_NF.shape
    gate.hidden = Hidden(torch.ones(layers, 2, features), torch.ones(layers, 2), torch.ones(heads, 2))
    return gate


GATES: dict[str, Callable[[], Gate]] = {
    "ouro": OuroGate,
    "delayed-ouro": lambda: DelayGate(OuroGate()),
    **{kind.kind: kind for kind in CRITERIA},
    **{f"delayed-{kind.kind}": lambda kind=kind: DelayGate(kind()) for kind in CRITERIA},
    "fixed": lambda: FixedGate(2),
    "replay, one list": lambda: ReplayGate([4, 2, 3]),
    "replay, a list each": lambda: ReplayGate([[4, 1], [4, 3]]),
    "lookahead": lambda: random_lookahead(MODEL),
    "lookahead with a hidden layer": lambda: with_hidden(random_lookahead(MODEL), 2),
    "pre-loop": lambda: random_pre_loop(MODEL),
    "pre-loop with a hidden layer": lambda: with_hidden(random_pre_loop(MODEL), 1),
    "hybrid": lambda: HybridGate(random_pre_loop(MODEL), random_lookahead(MODEL)),
    **{name: lambda make=make: make(MODEL) for name, (make, _) in trained.ALL.items()},
}


@pytest.fixture(params=list(GATES))
def gate(request: pytest.FixtureRequest) -> Gate:
    return GATES[request.param]().bind(MODEL)


def moved(value: Any, device: str) -> Any:
    """A gate, or what it holds, with every tensor on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Hidden):
        return Hidden(*(x.to(device) for x in value))
    if isinstance(value, Gate):
        other = copy.copy(value)
        for name, item in vars(value).items():
            setattr(other, name, moved(item, device))
        return other
    return value


class NoCopiesFromTheHost(TorchFunctionMode):
    """Raises where a tensor is made of Python values, which on a GPU is a copy that waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy), f"{func} was called"
        return func(*args, **(kwargs or {}))


def trip(gate: Gate, device: str, z: Tensor, whole: Tensor, params: Params, with_carry: bool) -> None:
    """One token of every row through start, R steps and finish, with `whole` numbers for all that is counted."""
    numbers = torch.full((ROWS,), 1.0, dtype=torch.float64, device=device)
    carry = Carry(z, numbers, numbers, numbers) if with_carry else None
    state, ahead = gate.start(Entry(z, None, carry, whole, whole), params)
    shapes = [x.shape for x in state]
    seen = z[:, :1].expand(ROWS, VOCAB) if gate.needs_logits else z
    for _ in range(MODEL.config.max_loops):
        assert ahead.shape == (ROWS,) and ahead.dtype == torch.bool
        state, ahead = gate.step(state, seen, whole, params)
        assert [x.shape for x in state] == shapes and all(len(shape) and shape[0] == ROWS for shape in shapes)
    left = gate.finish(z, torch.zeros(ROWS, VOCAB, device=device), whole.clamp(0, VOCAB - 1), whole)
    assert left.depth.shape == (ROWS,)


@pytest.mark.parametrize("with_carry", [True, False])
def test_nothing_waits_for_the_device(gate: Gate, with_carry: bool) -> None:
    """Meta tensors hold no values, so whatever would read one raises."""
    whole = torch.ones(ROWS, dtype=torch.long, device="meta")
    z = torch.zeros(ROWS, WIDTH, dtype=torch.float64, device="meta")
    params = Params(torch.zeros(ROWS, dtype=torch.float64, device="meta"), whole, whole)
    with NoCopiesFromTheHost():
        trip(moved(gate, "meta"), "meta", z, whole, params, with_carry)


def test_the_check_finds_what_it_looks_for() -> None:
    rows = torch.zeros(3, device="meta")
    for waits in (lambda: int(rows.max()), lambda: bool((rows > 0).any()), lambda: rows[rows > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
    with pytest.raises(AssertionError), NoCopiesFromTheHost():
        torch.tensor([1.0], device="meta")


@pytest.mark.parametrize("value", [-(1 << 40), -1, 0, 99, 1 << 40])
def test_stale_rows_never_raise(gate: Gate, value: int) -> None:
    whole = torch.tensor([value, 1, value])
    z = torch.tensor([torch.nan, 0.5, torch.inf], dtype=torch.float64)[:, None].expand(ROWS, WIDTH)
    trip(gate, "cpu", z, whole, Params(torch.tensor([torch.nan, 0.5, 2.0]).double(), whole, whole), True)


def test_requests_without_recorded_depths_are_refused_beforehand() -> None:
    two = ReplayGate([[4, 1], [4, 3]])
    two.check_request(1)
    for gate in (two, two.bind(MODEL)):
        with pytest.raises(LoopedError, match="holds depths of 2 requests; more were given"):
            gate.check_request(2)
    ReplayGate([4, 1]).check_request(5)
    DelayGate(OuroGate()).check_request(5)
