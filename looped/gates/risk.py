"""Thresholds with a bound on what exits lose: Learn then Test (Angelopoulos et al., 2021), as CALM uses it for exits.

Of a list of thresholds, ordered from the most careful one on, each is tested against "its risk is above the bound" by a
Hoeffding-Bentkus p-value on held-out losses. Fixed-sequence testing stops at the first that cannot be rejected, so with
the stated confidence all accepted thresholds keep the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Bounded(NamedTuple):
    """A threshold that keeps a bound, and the p-value of the test that it passed."""

    threshold: float
    p_value: float


def hoeffding_bentkus(mean: float, num: int, bound: float) -> float:
    """p-value of "the mean loss is above `bound`" for `num` independent losses in 0..1 with this sample mean.

    min(exp(-n kl(min(mean, bound), bound)), e P(Bin(n, bound) <= ceil(n mean))).
    """
    if not 0 < bound < 1 or num < 1:
        return 0.0 if bound >= 1 and num >= 1 else 1.0
    hoeffding = math.exp(-num * _bernoulli_kl(min(mean, bound), bound))
    successes = math.ceil(num * mean - 1e-9)
    return min(1.0, hoeffding, math.e * _binomial_cdf(successes, num, bound))


def _bernoulli_kl(a: float, b: float) -> float:
    first = a * math.log(a / b) if a > 0 else 0.0
    second = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return first + second


def _binomial_cdf(successes: int, num: int, share: float) -> float:
    """P(Bin(num, share) <= successes), summed from logarithms of the terms."""
    log_p, log_q = math.log(share), math.log1p(-share)
    whole = math.lgamma(num + 1)
    terms = (
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(num - k + 1) + k * log_p + (num - k) * log_q)
        for k in range(min(successes, num) + 1)
    )
    return min(1.0, math.fsum(terms))


def bounded_threshold(
    thresholds: Iterable[float], losses: Callable[[float], tuple[float, int]], bound: float, confidence: float
) -> Bounded | None:
    """The last of `thresholds`, from the most careful on, that is shown to keep the mean loss at or below `bound`.

    `losses` gives mean and number of independent held-out losses in 0..1 at a threshold. None where not even the first
    can be shown to keep the bound: it is too tight for so few losses.
    """
    accepted = None
    for threshold in thresholds:
        mean, num = losses(threshold)
        p_value = hoeffding_bentkus(mean, num, bound)
        if p_value > 1 - confidence:
            break
        accepted = Bounded(threshold, p_value)
    return accepted
