"""Exits, matched thresholds and agreement from cached cumulative probabilities."""

from __future__ import annotations

import pytest
import torch

from looped.gates import OuroGate, Params
from looped.gates.calibration import (
    GRID,
    agreement,
    curve,
    exit_depths,
    mean_depth,
    threshold_for,
    threshold_table,
    weighted_kappa,
)
from looped.gates.losses import fold


def random_hazards(n: int = 500, columns: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("min_depth", [1, 2, 3])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_exits_are_those_the_gate_protocol_takes(min_depth: int, threshold: float) -> None:
    z = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gate = OuroGate(torch.linspace(-1, 1, 8, dtype=torch.float64), torch.tensor([-0.5], dtype=torch.float64))
    mine = exit_depths(curve(gate.hazard(z), 1).from_depth(min_depth), threshold)
    params = Params(
        torch.full((200,), threshold, dtype=torch.float64), torch.full((200,), min_depth), torch.full((200,), 4)
    )
    state, depth = (torch.ones(200, dtype=torch.float64),), torch.full((200,), 4)
    for step in (1, 2, 3):
        state, decision = gate.step(state, z[:, step - 1], torch.full((200,), step), params)
        depth = torch.where(decision & (depth == 4), step, depth)
    assert torch.equal(mine, depth)


def test_folding_first_or_later_is_the_same() -> None:
    hazards = random_hazards()
    late, early = curve(hazards, 1).from_depth(2), curve(fold(hazards, 2), 2)
    torch.testing.assert_close(late.cumulative, early.cumulative)
    assert late.max_depth == early.max_depth == 4


def test_mean_depth_rises_from_the_floor_to_all_loops() -> None:
    gate = curve(random_hazards(), 1).from_depth(2)
    means = [mean_depth(gate, q / 20) for q in range(21)]
    assert means == sorted(means)
    assert means[0] == 2
    assert means[-1] == 4


@pytest.mark.parametrize("wanted", [2.0, 2.4, 3.1, 3.9, 4.0])
def test_bisection_finds_the_threshold_of_a_mean_depth(wanted: float) -> None:
    gate = curve(random_hazards(), 1).from_depth(2)
    assert mean_depth(gate, threshold_for(gate, wanted)) == pytest.approx(wanted, abs=1 / 250)


def test_kappa_is_one_for_equal_zero_for_chance_and_falls_with_the_square_of_the_distance() -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(1, 5, (20_000,), generator=generator)
    assert weighted_kappa(a, a, 4) == 1
    assert weighted_kappa(a, a[torch.randperm(len(a), generator=generator)], 4) == pytest.approx(0, abs=0.03)
    near, far = torch.tensor([1, 2, 3, 4, 2, 3]), torch.tensor([1, 2, 3, 4, 3, 2])
    assert weighted_kappa(near, far, 4) == pytest.approx(1 - 2 / (2 * 5.5))
    constant = torch.full((10,), 2)
    assert weighted_kappa(constant, constant, 4) == 1


def test_the_table_matches_mean_depths() -> None:
    teacher = curve(random_hazards(), 1).from_depth(2)
    student = curve((fold(random_hazards(), 2) * 0.8).clamp(0, 1), 2)
    rows = threshold_table(student, teacher)
    assert [row["threshold"] for row in rows] == [*GRID]
    for row in rows:
        assert row["mean_depth"] >= row["teacher_mean_depth"]  # smaller hazards leave later
        assert row["matched_mean_depth"] == pytest.approx(row["teacher_mean_depth"], abs=1 / 250)
        assert row["matched_threshold"] <= row["threshold"] + 1e-9
        exits = exit_depths(student, row["matched_threshold"])
        assert row["matched_agreement"] == agreement(exits, exit_depths(teacher, row["threshold"]))
