"""How much faster adaptive depth can be at most: the FLOP bound and its correction for prefill.

Continuous depth batching, section 5: eq. 1 bounds the speedup of decode, eq. 2 the speedup of a whole run.
"""

from __future__ import annotations

from collections.abc import Iterable

from looped.config import ModelConfig
from looped.errors import LoopedError


def decode_bound(config: ModelConfig, mean_depth: float) -> float:
    """S_dec = (F_0 + R F_r) / (F_0 + d F_r), eq. 1, with parameters as the measure of FLOPs.

    F_r is one application of the core to a token, F_0 what runs once a token; attention over the context is left out.
    Raises `LoopedError` for a mean depth outside 1..R.
    """
    if not 1.0 <= mean_depth <= config.max_loops:
        raise LoopedError(f"a mean depth lies between 1 and max_loops = {config.max_loops}, got {mean_depth}")
    return config.speedup_bound(mean_depth)


def attention_bound(config: ModelConfig, passes: Iterable[tuple[int, int]]) -> float:
    """Eq. 1 with the FLOPs of attention counted: `passes` are the (exit depth, context) of each token.

    A layer spends 2 FLOPs a parameter, and 4 H K on each key that a token reads, its own included.
    """
    per_key = 4 * config.num_heads * config.head_dim
    outer, core = (config.num_layers - config.num_core_layers) * per_key, config.num_core_layers * per_key
    full = adaptive = 0.0
    for depth, context in passes:
        once, step = 2 * config.boundary_params + outer * context, 2 * config.core_params + core * context
        full += once + config.max_loops * step
        adaptive += once + depth * step
    return full / adaptive if adaptive else 1.0


def end_to_end_bound(prefill_share: float, s_dec: float) -> float:
    """S_e2e = 1 / (a + (1 - a) / S_dec), eq. 2: only the share of time that is not prefill gets faster.

    `prefill_share` is measured at full depth. Raises `LoopedError` for a share outside 0..1 or an S_dec below 1.
    """
    if not 0.0 <= prefill_share <= 1.0:
        raise LoopedError(f"the prefill's share of time lies between 0 and 1, got {prefill_share}")
    if s_dec < 1.0:
        raise LoopedError(f"a bound on speedup is at least 1, got {s_dec}")
    return 1.0 / (prefill_share + (1.0 - prefill_share) / s_dec)


def realised(speedup: float, s_e2e: float) -> float:
    """The share of the end-to-end bound that a measured speedup reaches."""
    return speedup / s_e2e
