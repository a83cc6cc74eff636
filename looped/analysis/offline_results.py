"""What the offline bench finds, as values. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SteadyResult:
    """A scheduler in the steady window, as in `ModeResult`; `tok_s` is the median of `runs`."""

    tok_s: float
    spread: float
    runs: tuple[float, ...]
    speedup: float | None
    s_e2e: float | None
    realised: float | None
    mean_depth: float
    prefill_share: float
    core_launches: int
    occupancy: float | None


@dataclass(frozen=True)
class ModeResult:
    """One scheduler. `tok_s` is the median of `runs`, `spread` their range divided by it.

    What follows `realised` is of the median run. Comparisons are None where `cb` was not run. `launches` counts those
    of each stage; `ideal_core_launches` would run the loop steps of all tokens in batches of W, and `occupancy` is
    their ratio. `allowed_tok_s` is the speed of the schedule with the stages' measured latencies and no host.
    `gpu_idle` is the share of a profile's steady steps in which nothing ran.
    """

    tok_s: float
    spread: float
    runs: tuple[float, ...]
    speedup: float | None
    realised: float | None
    mean_core_batch: float
    stage_seconds: dict[str, float]
    prefill_share: float | None = None
    launches: dict[str, int] | None = None
    ideal_core_launches: float | None = None
    occupancy: float | None = None
    steady: SteadyResult | None = None
    joules_per_token: float | None = None
    allowed_tok_s: float | None = None
    of_allowed: float | None = None
    gpu_idle: float | None = None
    preemptions: int = 0
    prompt_tok_s: float | None = None
    """Prompt tokens by the time of the prefills alone."""
    prompt_mean_depth: float | None = None
    """Of a ragged prefill; None after dense ones."""
    kv_rows_share: float | None = None
    """Core K/V rows kept, of those that all tokens would keep with R planes each."""
    engine: str = ""


@dataclass(frozen=True)
class DecodeOnly:
    """The bound with first tokens left out of the mean depth: they belong to the prefill. Never below the paper's."""

    s_dec: float
    s_e2e: float | None
    realised: float | None


@dataclass(frozen=True)
class OfflineResult:
    """The bench's result.

    `mean_depth` is over decode tokens; `s_dec` uses `mean_depth_with_first`, in which each request's first token counts
    at R, as the paper does. `prefill_share` is measured under cb. `realised` is the refill scheduler's share of
    `s_e2e` (of the last mode run, if that is another). `agreement` says how the schedulers' tokens were compared.
    `s_dec_attention` counts the FLOPs of attention as well.
    """

    modes: dict[str, ModeResult]
    mean_depth: float
    mean_depth_with_first: float
    depth_counts: tuple[int, ...]
    prefill_share: float | None
    s_dec: float
    s_e2e: float | None
    realised: float | None
    decode_only: DecodeOnly
    tokens: int
    prompt_tokens: int
    rounds: int
    agreement: str
    settings: dict[str, str | int | float | None]
    s_dec_attention: float | None = None
    s_e2e_attention: float | None = None
    energy_ratio: float | None = None
    """Joules a token of the last mode over those of cb."""
