"""The latency model's fits recover what made the numbers, and floors are what a hand calculation gives."""

from __future__ import annotations

import pytest

from looped.analysis.fits import fit_depths, fit_steps
from looped.analysis.floors import Ceilings, Demand, Work
from looped.analysis.shapes import SHAPES
from tests.analysis.test_bounds import HUGINN, OURO_1B4
from tests.models import huginn_config, ouro_config


def test_a_line_through_depths() -> None:
    fit = fit_depths({1: 1.5, 2: 2.5, 4: 4.5})
    assert fit is not None
    assert (fit.once, fit.step, fit.r2) == pytest.approx((0.5, 1.0, 1.0))
    assert fit_depths({4: 1.0}) is None


def test_a_plane_through_batches_and_contexts() -> None:
    # The paper's Ouro: delta 5.4 ms, B* about 140 at L = 128.
    delta, gamma, alpha = 5.4e-3, 26e-6, 100e-9
    points = [(b, c, delta + (gamma + alpha * c) * b) for b in (1, 8, 64, 256) for c in (128, 2048, 8192)]
    fit = fit_steps(points)
    assert fit is not None
    assert (fit.delta, fit.gamma, fit.alpha, fit.r2) == pytest.approx((delta, gamma, alpha, 1.0))
    assert fit.saturation[128] == pytest.approx(delta / (gamma + 128 * alpha))
    assert fit.saturation[8192] == pytest.approx(6.38, abs=0.01)


def test_one_context_has_no_slope_in_it() -> None:
    fit = fit_steps([(1, 128, 2.0), (2, 128, 3.0), (4, 128, 5.0)])
    assert fit is not None
    assert (fit.delta, fit.gamma, fit.alpha) == pytest.approx((1.0, 1.0, 0.0))
    assert fit_steps([(1, 128, 2.0), (1, 256, 3.0), (1, 512, 3.0)]) is None
    falling = fit_steps([(1, 128, 3.0), (2, 128, 2.0), (4, 128, 1.0)])
    assert falling is not None
    assert falling.saturation == {128: None}


def test_floors_of_the_public_shapes() -> None:
    # Ouro-1.4B at 4.3 TB/s, in milliseconds: 2.467 GB of weights and 25.2 MB of K/V a row at context 128.
    ceilings = Ceilings(4.3e12, 8e14)
    core = Demand(SHAPES["ouro-1.4b"], 2).core
    for batch, milliseconds in ((1, 0.58), (16, 0.67), (64, 0.95), (128, 1.33), (256, 2.08)):
        assert 1e3 * core(batch, 128).floor(ceilings) == pytest.approx(milliseconds, rel=0.01)
    huginn = Demand(SHAPES["huginn-3.5b"], 2).core
    for batch, milliseconds in ((1, 0.76), (64, 0.92)):
        assert 1e3 * huginn(batch, 128).floor(ceilings) == pytest.approx(milliseconds, rel=0.01)


def test_public_shapes_have_the_sizes_of_the_bounds() -> None:
    for name, config in (("ouro-1.4b", OURO_1B4), ("huginn-3.5b", HUGINN)):
        assert SHAPES[name].core_params == config.core_params
        assert SHAPES[name].boundary_params == config.boundary_params
        assert SHAPES[name].max_loops == config.max_loops


@pytest.mark.parametrize("config", [ouro_config(), huginn_config()])
def test_stages_add_up(config) -> None:  # type: ignore[no-untyped-def]
    demand = Demand(config, 4)
    rows, context, depth = 3, 17, 2
    whole = demand.decode(rows, context, depth)
    params = config.boundary_params - config.hidden_size + depth * config.core_params  # the last norm is left out
    keys = rows * context * 2 * config.num_kv_heads * config.head_dim
    layers = config.num_layers - config.num_core_layers + depth * config.num_core_layers
    looked_up = rows * config.hidden_size
    assert whole.num_bytes == 4 * (params + keys * layers + looked_up)
    assert whole.flops == 2 * params * rows + 4 * config.num_heads * config.head_dim * rows * context * layers


def test_the_slower_of_the_two_is_the_floor() -> None:
    assert Work(10, 1).floor(Ceilings(5, 1)) == 2
    assert Work(10, 8).floor(Ceilings(5, 2)) == 4
