"""The offline bench's result for a terminal. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from looped.analysis.offline_results import ModeResult, OfflineResult


def table(result: OfflineResult) -> str:
    """Settings, a line for each scheduler, and the bounds."""
    told = result.settings
    gate = told["gate"] or "no gate"
    if told["gate"] and told["gate"] != "replay":
        gate = f"{gate} gate at {told['threshold']:g}"
    lines = [
        f"{told['model']} (R {told['max_loops']}), {told['kv']} layout, {gate}, exits {told['exits']}, "
        f"{told['device']}, {told['dtype']}, {told['threads']} threads",
        f"{told['num_requests']} requests ({told['work_list']}), {result.prompt_tokens} prompt tokens, {result.tokens} "
        f"generated, W {told['max_num_seqs']}, K {told['min_coda_batch']}, {result.rounds} rounds",
        "",
        f"{'scheduler':<10} {'tok/s':>8} {'spread':>7} {'x cb':>6} {'of S_e2e':>9} {'core batch':>11}",
    ]
    for name, mode in result.modes.items():
        batch = f"{mode.mean_core_batch:.1f}"
        compared = f"{_times(mode.speedup):>6} {_percent(mode.realised):>9}"
        lines.append(f"{name:<10} {mode.tok_s:>8.1f} {mode.spread:>7.1%} {compared} {batch:>11}")
    return "\n".join([*lines, "", *_steady(result), *_launches(result), *_bounds(result)])


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _steady(result: OfflineResult) -> list[str]:
    """The steady window, of the schedulers that had one."""
    lines = []
    for name, mode in result.modes.items():
        steady = mode.steady
        if steady is not None:
            lines.append(
                f"{name:<10} {steady.tok_s:>8.1f} {steady.spread:>7.1%} {_times(steady.speedup):>6} "
                f"{_percent(steady.realised):>9} {_percent(steady.occupancy):>11}"
            )
    if not lines:
        return []
    head = f"{'steady':<10} {'tok/s':>8} {'spread':>7} {'x cb':>6} {'of S_e2e':>9} {'core full':>11}"
    return [head, *lines, ""]


def _launches(result: OfflineResult) -> list[str]:
    """Launches and what else was measured of each scheduler."""
    lines = []
    for name, mode in result.modes.items():
        launches = mode.launches or {}
        parts = [", ".join(f"{count} {stage}" for stage, count in launches.items())]
        if mode.ideal_core_launches is not None and mode.occupancy is not None:
            parts.append(f"ideal {mode.ideal_core_launches:.0f} core, {mode.occupancy:.0%} full")
        lines.append(f"{name:<10} launches: {'; '.join([*parts, *_more(mode)])}")
    return [*lines, ""]


def _more(mode: ModeResult) -> list[str]:
    parts = []
    if mode.prefill_share is not None:
        parts.append(f"prefill {mode.prefill_share:.1%}")
    if mode.prompt_tok_s is not None:
        depth = "" if mode.prompt_mean_depth is None else f" at mean depth {mode.prompt_mean_depth:.2f}"
        parts.append(f"{mode.prompt_tok_s:.0f} prompt tok/s{depth}")
    if mode.kv_rows_share is not None and mode.kv_rows_share < 1:
        parts.append(f"K/V rows {mode.kv_rows_share:.0%} of N R")
    if mode.joules_per_token is not None:
        parts.append(f"{1e3 * mode.joules_per_token:.1f} mJ/token")
    if mode.gpu_idle is not None:
        parts.append(f"GPU idle {mode.gpu_idle:.1%}")
    if mode.allowed_tok_s is not None and mode.of_allowed is not None:
        parts.append(f"{mode.of_allowed:.1%} of the {mode.allowed_tok_s:.0f} tok/s that the stages' latencies allow")
    if mode.preemptions:
        parts.append(f"{mode.preemptions} preemptions")
    return parts


def _bounds(result: OfflineResult) -> list[str]:
    total = max(1, sum(result.depth_counts))
    counts = enumerate(result.depth_counts)
    exits = ", ".join(f"{depth}: {count / total:.0%}" for depth, count in counts if count)
    lines = [
        f"mean depth {result.mean_depth:.2f} ({result.mean_depth_with_first:.2f} with first tokens); exits at {exits}",
        f"S_dec {result.s_dec:.3f}",
    ]
    if result.s_e2e is not None and result.prefill_share is not None:
        lines[1] = (
            f"prefill takes {result.prefill_share:.1%} of cb's time, so S_dec {result.s_dec:.3f} becomes "
            f"S_e2e {result.s_e2e:.3f}"
        )
        strict = result.decode_only
        lines.append(
            f"without first tokens (the prefill's own): S_dec {strict.s_dec:.3f}, S_e2e {strict.s_e2e or 0:.3f}, "
            f"realised {strict.realised or 0:.0%}"
        )
    if result.s_dec_attention is not None:
        end = "" if result.s_e2e_attention is None else f", S_e2e {result.s_e2e_attention:.3f}"
        lines.append(f"with the FLOPs of attention: S_dec {result.s_dec_attention:.3f}{end}")
    if result.energy_ratio is not None:
        lines.append(f"energy a token: {result.energy_ratio:.2f} of cb's")
    return [*lines, result.agreement]
