"""Signs that a run does not use its depth, read from figures that were logged or from one batch."""

# R loop steps

from __future__ import annotations

from torch import Tensor

LEAST_GAIN = 0.01
"""Nats between the first and the last depth, from GAIN_FROM of the run on."""
GAIN_FROM = 0.3
LEAST_SHARE = 0.02
"""Mean exit probability of a depth."""
CORRELATION_FROM = 0.1
"""Part of the run from which deeper exits must go where depth gains more."""
LEAST_DRIFT = 0.03
"""Relative change that the second loop makes."""


def warnings(last: dict[str, float], loops: int) -> list[str]:
    """Sentences about logged figures of a model of R = `loops`; a figure that is missing warns of nothing."""
    if "pi_1" not in last:
        return []
    found = []
    kind = "direct_ce" if "direct_ce_1" in last else "ce"
    gain = last.get(f"{kind}_1", LEAST_GAIN) - last.get(f"{kind}_{loops}", 0.0)
    if loops > 1 and last["progress"] > GAIN_FROM and gain < LEAST_GAIN:
        found.append("WARN depth gains nothing")
    if min(last.get(f"pi_{d}", 1.0) for d in range(1, loops + 1)) < LEAST_SHARE:
        found.append("WARN an exit is unused")
    if last["progress"] > CORRELATION_FROM and last["gain_correlation"] <= 0:
        found.append("WARN exits go the wrong way")
    if last.get("drift_2", 1.0) < LEAST_DRIFT:
        found.append("WARN loop 2 does nothing")
    return found


def depth_is_idle(progress: float, gain: Tensor, correlation: Tensor, drift: Tensor | None) -> Tensor:
    """The same of one batch, as a bool tensor: gain CE_1 - CE_R, correlation of exits with it, drift of loop 2.

    An exit that is not used is no reason: the KL to the prior is what brings it back.
    """
    idle = correlation <= 0 if progress > CORRELATION_FROM else gain != gain
    if progress > GAIN_FROM:
        idle = idle | (gain < LEAST_GAIN)
    return idle if drift is None else idle | (drift < LEAST_DRIFT)
