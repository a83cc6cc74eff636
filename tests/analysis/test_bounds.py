"""The speedup bounds against numbers worked out by hand and against what the paper says of its two models."""

from __future__ import annotations

import pytest

from looped.analysis.bounds import decode_bound, end_to_end_bound, realised
from looped.config import ModelConfig
from looped.errors import LoopedError
from tests.models import huginn_config, ouro_config

OURO_1B4 = ouro_config(
    vocab_size=49_152,
    hidden_size=2048,
    intermediate_size=5632,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    num_core_layers=24,
)
HUGINN = huginn_config(
    vocab_size=65_536,
    hidden_size=5280,
    intermediate_size=17_920,
    num_heads=55,
    num_kv_heads=55,
    head_dim=96,
    num_prelude_layers=2,
    num_core_layers=4,
    num_coda_layers=2,
    max_loops=16,
    trained_loops=32,
)


def test_ouro_by_hand() -> None:
    # A layer: 4 D^2 + 3 D F + 4 norms = 16,777,216 + 34,603,008 + 8,192 = 51,388,416; 24 of them: 1,233,321,984.
    # Outside the loop: head 49,152 * 2,048 = 100,663,296, final norm 2,048.
    # d = 2.45, in millions: (100.7 + 4 * 1233.3) / (100.7 + 2.45 * 1233.3) = 5,033,953,280 / 3,122,304,204.8
    assert decode_bound(OURO_1B4, 2.45) == pytest.approx(1.612256, abs=1e-6)


def test_huginn_by_hand() -> None:
    # A layer: 4 D^2 + 3 D F + 4 norms + qk bias = 111,513,600 + 283,852,800 + 21,120 + 10,560 = 395,398,080.
    # Core: 4 layers + adapter 2 D^2 = 1,581,592,320 + 55,756,800 = 1,637,349,120.
    # Outside: 4 layers + head 346,030,080 + norm 5,280 = 1,927,627,680.
    # d = 8, in millions: (1927.6 + 16 * 1637.3) / (1927.6 + 8 * 1637.3) = 28,125,213,600 / 15,026,420,640
    assert decode_bound(HUGINN, 8) == pytest.approx(1.871718, abs=1e-6)


def test_sizes_that_the_paper_states() -> None:
    assert OURO_1B4.core_params == pytest.approx(1.2e9, rel=0.03)  # "1.2B in 24 narrow layers"
    assert HUGINN.core_params == pytest.approx(1.6e9, rel=0.03)  # "1.6B parameters in four wide layers"
    assert HUGINN.boundary_params / HUGINN.core_params == pytest.approx(1.2, abs=0.05)  # tau_0 is about 1.2 tau_r


@pytest.mark.parametrize("config", [OURO_1B4, HUGINN])
def test_bound_is_one_at_full_depth_and_below_the_depth_ratio(config: ModelConfig) -> None:
    assert decode_bound(config, config.max_loops) == 1.0
    for mean_depth in (1.0, 1.5, 3.0):
        assert 1.0 < decode_bound(config, mean_depth) < config.max_loops / mean_depth


def test_a_fully_looped_model_is_nearer_the_depth_ratio() -> None:
    share_ouro = decode_bound(OURO_1B4, 2) / (4 / 2)
    share_huginn = decode_bound(HUGINN, 8) / (16 / 8)
    assert share_ouro > share_huginn > 0.9


def test_end_to_end_by_hand() -> None:
    assert end_to_end_bound(0.2, 1.5) == pytest.approx(15 / 11)  # 1 / (0.2 + 0.8 / 1.5) = 1 / 0.7333
    assert end_to_end_bound(0.0, 1.7) == pytest.approx(1.7)
    assert end_to_end_bound(1.0, 1.7) == 1.0
    # With the paper's largest prefill share, 36 %: 1 / (0.36 + 0.64 / 1.612256) = 1 / 0.756959.
    assert end_to_end_bound(0.36, 1.612256) == pytest.approx(1.321076, abs=1e-5)
    assert realised(1.3, 1.4) == pytest.approx(0.928571, abs=1e-6)


@pytest.mark.parametrize("mean_depth", [0.9, 4.1, float("nan")])
def test_impossible_depths_are_refused(mean_depth: float) -> None:
    with pytest.raises(LoopedError, match="between 1 and max_loops = 4"):
        decode_bound(OURO_1B4, mean_depth)


@pytest.mark.parametrize(("share", "s_dec"), [(-0.1, 1.5), (1.1, 1.5), (0.5, 0.9)])
def test_impossible_shares_are_refused(share: float, s_dec: float) -> None:
    with pytest.raises(LoopedError):
        end_to_end_bound(share, s_dec)
