"""Thresholds with a bound: p-values against what they promise, and the fixed sequence of tests."""

from __future__ import annotations

import math
import random

import pytest

from looped.gates.risk import bounded_threshold, hoeffding_bentkus


def test_without_a_loss_the_p_value_is_the_chance_of_none() -> None:
    # Hoeffding at a mean of 0: exp(n log(1 - bound)) = (1 - bound)^n
    assert hoeffding_bentkus(0.0, 40, 0.1) == pytest.approx(0.9**40)


@pytest.mark.parametrize("num", [30, 200])
def test_it_is_the_smaller_of_both_bounds(num: int) -> None:
    mean, bound = 3 / num, 0.2
    kl = mean * math.log(mean / bound) + (1 - mean) * math.log((1 - mean) / (1 - bound))
    binomial = sum(math.comb(num, k) * bound**k * (1 - bound) ** (num - k) for k in range(4))
    expected = min(math.exp(-num * kl), math.e * binomial)
    assert hoeffding_bentkus(mean, num, bound) == pytest.approx(expected)


def test_means_at_or_above_the_bound_are_never_rejected() -> None:
    for mean in (0.1, 0.3, 1.0):
        assert hoeffding_bentkus(mean, 50, 0.1) > 0.5
    assert hoeffding_bentkus(0.0, 50, 0.0) == 1
    assert hoeffding_bentkus(0.0, 0, 0.5) == 1


def test_p_values_are_valid() -> None:
    """Losses whose true mean is the bound are rejected at 10 % no more often than that."""
    dice, bound, rejected = random.Random(0), 0.15, 0
    for _ in range(600):
        losses = [1.0 if dice.random() < bound else 0.0 for _ in range(60)]
        rejected += hoeffding_bentkus(sum(losses) / 60, 60, bound) <= 0.1
    assert 0 < rejected <= 60


def test_tests_go_on_until_the_first_that_fails() -> None:
    asked = []

    def losses(threshold: float) -> tuple[float, int]:
        asked.append(threshold)
        return {1.0: 0.0, 0.9: 0.01, 0.8: 0.2, 0.7: 0.0}[threshold], 200

    found = bounded_threshold([1.0, 0.9, 0.8, 0.7], losses, 0.05, 0.95)
    assert found is not None
    assert found.threshold == 0.9
    assert found.p_value <= 0.05
    assert asked == [1.0, 0.9, 0.8], "what comes behind a failed test is not tried"


def test_too_few_losses_show_nothing() -> None:
    assert bounded_threshold([1.0, 0.5], lambda _: (0.0, 5), 0.05, 0.95) is None
