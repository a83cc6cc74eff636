"""The curve of a gate, read for all tokens at once, exits as the gate itself does when it is driven step by step."""

from __future__ import annotations

import pytest
import torch

from looped.errors import LoopedError
from looped.gates import (
    Carry,
    ConvergenceGate,
    DelayGate,
    Entry,
    FixedGate,
    Gate,
    HybridGate,
    OuroGate,
    Params,
)
from looped.gates.calibration import exit_depths, mean_depth, threshold_for
from looped.gates.dial import Curve, Seen, curve_of, hazards_of
from tests import trained
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

MODEL = micro_ouro()
NUM, LOOPS, WIDTH = 50, MODEL.config.max_loops, MODEL.config.hidden_size

GATES = {
    "ouro": (OuroGate, 0.6),
    "convergence": (ConvergenceGate, 1.2),
    "delayed-convergence": (lambda: DelayGate(ConvergenceGate()), 1.2),
    "delayed-ouro": (lambda: DelayGate(OuroGate()), 0.6),
    "lookahead": (lambda: random_lookahead(MODEL), 0.5),
    "pre-loop": (lambda: random_pre_loop(MODEL), 0.6),
    "hybrid": (lambda: HybridGate(random_pre_loop(MODEL), random_lookahead(MODEL)), 0.5),
    **{name: ((lambda make=make: make(MODEL)), q) for name, (make, q) in trained.ALL.items()},
}


def tokens(num: int = NUM) -> Seen:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    carry = Carry(noise(num, WIDTH), noise(num).abs(), noise(num).abs(), torch.ones(num, dtype=torch.float64))
    idle = torch.zeros(num, dtype=torch.long)
    states = [noise(num, WIDTH)]
    for _ in range(LOOPS):
        states.append(states[-1] + noise(num, WIDTH))
    return Seen(Entry(states[0], None, carry, idle, idle), states[1:])


def driven(gate: Gate, seen: Seen, threshold: float, min_depth: int) -> torch.Tensor:
    """Exit depths as the reference decoder takes them."""
    floor = torch.full((NUM,), min_depth)
    params = Params(torch.full((NUM,), threshold, dtype=torch.float64), floor, torch.full((NUM,), LOOPS))
    state, ahead = gate.start(seen.entry, params)
    depths = torch.full((NUM,), LOOPS)
    for step, z in enumerate(seen.readouts, 1):
        state, said = gate.step(state, z, torch.full((NUM,), step), params)
        leaving = said if gate.latency == 0 else ahead
        depths = torch.where(leaving & (depths == LOOPS), step, depths)
        ahead = said
    return depths


@pytest.mark.parametrize("name", [name for name in GATES if name != "delayed-ouro"])
@pytest.mark.parametrize("raised", [0, 1])
def test_exits_are_those_of_the_gate(name: str, raised: int) -> None:
    make, threshold = GATES[name]
    gate, seen = make().bind(MODEL), tokens()
    floor = min(gate.min_depth + raised, LOOPS - 1)
    curve = curve_of(gate, seen, floor)
    assert (curve.min_depth, curve.max_depth) == (floor, LOOPS)
    spread = set()
    for q in (0.0, threshold / 2, threshold, threshold * 1.3, 1.0):
        wanted = driven(gate, seen, q, floor)
        assert torch.equal(exit_depths(curve, q), wanted)
        spread |= set(wanted.tolist())
    assert len(spread) > 1
    assert (hazards_of(gate, seen) is None) == curve.below


def test_thresholds_of_gates_that_exit_below_them() -> None:
    curve = curve_of(ConvergenceGate(), tokens(400))
    means = [mean_depth(curve, q / 10) for q in range(12)]
    assert curve.below and means == sorted(means, reverse=True)
    for wanted in (2.0, 2.5, 3.3, 4.0):
        assert mean_depth(curve, threshold_for(curve, wanted)) == pytest.approx(wanted, abs=0.01)


def test_gates_without_a_dial() -> None:
    for gate in (FixedGate(2), DelayGate(OuroGate()).bind(MODEL)):
        with pytest.raises(LoopedError, match="no dial"):
            curve_of(gate, tokens())


def test_huginn_compares_with_its_noise_and_sees_its_injection() -> None:
    model, seen = micro_huginn(), tokens()
    other = seen._replace(entry=seen.entry._replace(injection=seen.entry.z0.flip(0)))
    gate = random_pre_loop(model).bind(model)
    assert not torch.equal(curve_of(gate, seen).cumulative, curve_of(gate, other).cumulative)
    change = curve_of(ConvergenceGate(), seen, 1)
    assert torch.equal(change.cumulative, curve_of(ConvergenceGate(), other, 1).cumulative)
    assert isinstance(change, Curve) and change.max_depth == LOOPS
