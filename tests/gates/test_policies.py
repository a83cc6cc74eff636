"""Gate decisions against hand-computed distributions, driven the way every caller drives them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.gates import (
    Carry,
    ConvergenceGate,
    DelayGate,
    Entry,
    FixedGate,
    Gate,
    LookaheadGate,
    OuroGate,
    Params,
    PreLoopGate,
    ReplayGate,
    get_gate,
    load_gate,
    native_gate,
)
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

LOOPS = 4


def drive(
    gate: Gate, states: list[Tensor], threshold: float, min_depth: int = 1, carry: Carry | None = None, index: int = 1
) -> list[int]:
    """Exit depths of rows whose readouts are states[0] (before the loop), states[1], ..., states[R]."""
    rows = states[0].shape[0]
    ones = torch.ones(rows, dtype=torch.long)
    params = Params(torch.full((rows,), threshold).double(), ones * min_depth, ones * LOOPS)
    entry = Entry(states[0], None, carry, torch.arange(rows), ones * index)
    state, ahead = gate.start(entry, params)
    depths = torch.zeros(rows, dtype=torch.long)
    for step in range(1, LOOPS + 1):
        state, decision = gate.step(state, states[step], ones * step, params)
        leaving = decision if gate.latency == 0 else ahead
        leaving = (leaving | (step == params.max_depth)) & (depths == 0)
        depths[leaving] = step
        ahead = decision
    return depths.tolist()


def hazard_states(hazards: list[list[float]]) -> list[Tensor]:
    """Readouts of width 1 whose sigmoid is the hazard of that step, one list of R hazards a row."""
    table = torch.tensor(hazards).double()
    return [torch.zeros(len(hazards), 1).double(), *(torch.logit(table[:, r : r + 1]) for r in range(LOOPS))]


def unit_ouro() -> OuroGate:
    return OuroGate(torch.ones(1).double(), torch.zeros(1).double())


def test_ouro_exits_where_the_cumulative_probability_crosses() -> None:
    # C = .5 .75 .875 | .1 .19 .271 | .3 .65 .825
    states = hazard_states([[0.5, 0.5, 0.5, 0.5], [0.1, 0.1, 0.1, 0.9], [0.3, 0.5, 0.5, 0.5]])
    assert drive(unit_ouro(), states, 0.6) == [2, 4, 2]
    assert drive(unit_ouro(), states, 0.2) == [1, 3, 1]
    assert drive(unit_ouro(), states, 0.8) == [3, 4, 3]
    assert drive(unit_ouro(), states, 0.0) == [1, 1, 1]
    assert drive(unit_ouro(), states, 1.0) == [4, 4, 4]


def test_min_depth_folds_the_mass_below_it() -> None:
    states = hazard_states([[0.5, 0.01, 0.01, 0.5]])
    assert drive(unit_ouro(), states, 0.4, min_depth=2) == [2]  # C(2) holds the mass of depth 1
    assert drive(unit_ouro(), states, 0.4, min_depth=3) == [3]


def test_threshold_one_never_exits_early_in_half_precision() -> None:
    states = [s.bfloat16() for s in hazard_states([[0.9999] * 4])]
    gate = OuroGate(torch.ones(1), torch.zeros(1))
    assert drive(gate, states, 1.0) == [4]
    assert drive(gate, states, 0.99) == [1]


def head(weight: Tensor, bias: Tensor, kind: type) -> LookaheadGate | PreLoopGate:
    made = kind(weight, bias, hidden_size=1, max_loops=LOOPS, teacher="t", revision="r")
    assert isinstance(made, LookaheadGate | PreLoopGate)
    return made


def test_lookahead_predicts_the_next_step() -> None:
    gate = head(torch.ones(2, 1).double(), torch.zeros(2).double(), LookaheadGate)
    # z_1 predicts lambda_2, z_2 predicts lambda_3: C(2) = .5, C(3) = .75
    states = hazard_states([[0.5, 0.5, 0.5, 0.5], [0.1, 0.9, 0.5, 0.5]])
    assert gate.latency == 1 and gate.min_depth == 2
    assert drive(gate, states, 0.4, min_depth=2) == [2, 3]
    assert drive(gate, states, 0.7, min_depth=2) == [3, 3]
    assert drive(gate, states, 0.95, min_depth=2) == [4, 4]
    assert drive(gate, states, 0.4, min_depth=3) == [3, 3]


def test_lookahead_uses_the_head_of_the_step() -> None:
    gate = head(torch.zeros(2, 1).double(), torch.logit(torch.tensor([0.1, 0.8]).double()), LookaheadGate)
    states = hazard_states([[0.5] * 4])
    assert drive(gate, states, 0.5, min_depth=2) == [3]  # C(2) = .1, C(3) = .82


@pytest.mark.parametrize(("threshold", "depth"), [(0.05, 1), (0.3, 2), (0.6, 3), (0.9, 4)])
def test_pre_loop_picks_the_first_depth(threshold: float, depth: int) -> None:
    hazards = torch.tensor([0.2, 0.25, 0.5]).double()  # C = .2 .4 .7
    gate = head(torch.zeros(3, 5).double(), torch.logit(hazards), PreLoopGate)
    states = hazard_states([[0.5] * 4])
    assert drive(gate, states, threshold) == [depth]


def test_pre_loop_sees_the_token_before() -> None:
    weight = torch.zeros(3, 5).double()
    weight[0, 3] = 4.0  # the surprisal of the last token opens the first exit
    gate = head(weight, torch.tensor([-2.0, -9.0, -9.0]).double(), PreLoopGate)
    calm, surprised = (Carry(torch.zeros(1, 1), torch.zeros(1), torch.tensor([s]), torch.ones(1)) for s in (0.0, 3.0))
    states = hazard_states([[0.5] * 4])
    assert gate.uses_carry
    assert drive(gate, states, 0.5, carry=calm) == [4]
    assert drive(gate, states, 0.5, carry=surprised) == [1]
    assert drive(gate, states, 0.5, carry=None) == [4]


def test_delay_takes_effect_one_step_later() -> None:
    states = [torch.tensor([[x]]).double() for x in (1.0, 2.0, 2.2, 2.21, 2.2101)]
    gate = DelayGate(ConvergenceGate())
    assert (gate.latency, gate.min_depth, gate.name) == (1, 3, "delayed-convergence")
    assert drive(gate, states, 0.1, min_depth=3) == [3]
    assert drive(gate, states, 0.01, min_depth=3) == [4]
    assert drive(gate, states, 0.6, min_depth=2) == [2]
    with pytest.raises(LoopedError, match="known one step ahead already"):
        DelayGate(FixedGate(2))


def test_fixed_and_replay() -> None:
    states = hazard_states([[0.5] * 4] * 2)
    assert drive(FixedGate(3), states, 0.0) == [3, 3]
    assert drive(FixedGate(9), states, 0.0) == [4, 4]
    assert drive(ReplayGate([4, 2, 3]), states, 0.0, index=1) == [2, 2]
    assert drive(ReplayGate([[4, 1], [4, 3]]), states, 0.0, index=1) == [1, 3]
    assert drive(ReplayGate([[4, 1], [4, 3]]), states, 0.0, index=5) == [4, 4]
    for bad in (lambda: FixedGate(0), lambda: ReplayGate([2, 0]), lambda: ReplayGate([])):
        with pytest.raises(LoopedError, match="at least 1"):
            bad()


def test_carry() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 20.0]])
    carry = unit_ouro().finish(torch.zeros(2, 1), logits, torch.tensor([0, 1]), torch.tensor([2, 3]))
    torch.testing.assert_close(carry.entropy, torch.tensor([2.0, 1.0]).log(), atol=1e-4, rtol=0)
    torch.testing.assert_close(carry.surprisal, torch.tensor([2.0, 1.0]).log(), atol=1e-4, rtol=0)
    assert carry.depth.tolist() == [2, 3]


def test_names() -> None:
    ouro, huginn = micro_ouro(), micro_huginn()
    assert native_gate(ouro).name == "ouro" and native_gate(huginn).name == "convergence"
    for name in ("ouro", "convergence", "fixed-3", "delayed-ouro", "delayed-convergence"):
        assert get_gate(name, ouro).name == name == load_gate(name).name
    with pytest.raises(LoopedError, match="did you mean 'convergence'"):
        load_gate("convergense")
    with pytest.raises(LoopedError, match="has no exit gate of its own"):
        get_gate("ouro", huginn)
    with pytest.raises(LoopedError, match="no lookahead gate ships"):
        get_gate("lookahead", ouro)


def test_a_gate_is_bound_to_its_teacher() -> None:
    ouro = micro_ouro()
    for gate in (random_lookahead(ouro), random_pre_loop(ouro)):
        assert gate.bind(ouro).kind == gate.kind
        with pytest.raises(LoopedError, match="was made for random-ouro"):
            gate.bind(micro_ouro(seed=5))
        with pytest.raises(LoopedError, match="was made for random-ouro"):
            gate.bind(micro_huginn())


def test_threshold_ranges() -> None:
    for gate, bad in ((unit_ouro(), 1.5), (unit_ouro(), -0.1), (ConvergenceGate(), -1.0), (unit_ouro(), float("nan"))):
        with pytest.raises(LoopedError, match="outside the range"):
            gate.check_threshold(bad)
    assert ConvergenceGate().check_threshold(3.0) == 3.0


def test_another_layout_is_said() -> None:
    gate = random_lookahead(micro_ouro())
    gate.layout, gate.prefill = "ragged", "dense"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.check_layout("last-exited", "dense")
    with pytest.warns(UserWarning, match="trained under layout ragged"):
        gate.check_layout("shared", "dense")
