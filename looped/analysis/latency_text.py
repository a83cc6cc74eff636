"""The result of `looped bench step` for a terminal. No torch."""

from __future__ import annotations

from looped.analysis.latency import Point, StepResult

_SHOWN = ("core", "decode", "prelude", "coda", "prefill")
_NAMES = {"core": "core step", "decode": "whole decode step", "coda": "coda and sampling"}


def table(result: StepResult) -> str:
    """The result for a terminal."""
    told = result.settings
    lines = [
        f"{told['model']} (R {told['max_loops']}), {told['kv']} layout, {told['device']}, {told['dtype']}, "
        f"{told['backend']}",
        f"measured ceilings: {result.bytes_s / 1e12:.3g} TB/s, {result.flops_s / 1e12:.3g} TFLOP/s; medians of "
        f"{told['repeats']}, ± is their range",
        "",
    ]
    for stage in _SHOWN:
        points = result.of(stage)
        if points:
            lines += [_heading(stage, result.fused), *map(_row, points), ""]
    return "\n".join([*lines, *_fit_lines(result), *_kernel_lines(result)])


def _heading(stage: str, fused: bool) -> str:
    name = _NAMES.get(stage, stage)
    if fused and stage == "core":
        name = "core step with coda and prelude"
    size = "tokens" if stage == "prefill" else "batch"
    columns = f"{size:>6} {'context':>8} {'depth':>6} {'ms':>9} {'±':>6} {'floor':>8} {'ratio':>6} {'TB/s':>6}"
    return f"{name}\n{columns} {'TFLOP/s':>8}"


def _row(p: Point) -> str:
    return (
        f"{p.batch:>6} {p.context:>8} {p.depth:>6} {1e3 * p.seconds:>9.3f} {p.spread:>6.1%} {1e3 * p.floor:>8.3f} "
        f"{p.ratio:>6.2f} {p.tb_s:>6.2f} {p.tflop_s:>8.1f}"
    )


def _fit_lines(result: StepResult) -> list[str]:
    lines = []
    if result.depth_fits:
        worst = min(line.fit.r2 for line in result.depth_fits)
        lines.append(f"tau(r) = tau_0 + tau_r r, over depths (R^2 at least {worst:.4f})")
        lines.append(f"{'batch':>6} {'context':>8} {'tau_0 ms':>9} {'tau_r ms':>9}")
        for line in result.depth_fits:
            fit = line.fit
            lines.append(f"{line.batch:>6} {line.context:>8} {1e3 * fit.once:>9.3f} {1e3 * fit.step:>9.3f}")
        lines.append("")
    fit_all = result.step_fit
    if fit_all is not None:
        stars = ", ".join(
            f"{context}: {'none' if star is None else f'{star:.0f}'}" for context, star in fit_all.saturation.items()
        )
        lines.append(
            f"loop step t(B, L) = {1e3 * fit_all.delta:.3f} ms + ({1e6 * fit_all.gamma:.3f} us + "
            f"{1e9 * fit_all.alpha:.3f} ns L) B, R^2 {fit_all.r2:.4f}; B* by context: {stars}"
        )
    if result.left_out:
        lines.append(f"left out, no room: {', '.join(result.left_out)}")
    return lines


def _kernel_lines(result: StepResult) -> list[str]:
    lines = []
    for batch, context in dict.fromkeys((kernel.batch, kernel.context) for kernel in result.kernels):
        mine = [kernel for kernel in result.kernels if (kernel.batch, kernel.context) == (batch, context)]
        lines += [
            "",
            f"kernels of a whole decode step, batch {batch}, context {context}",
            f"{'us':>9} {'calls':>7}  name",
        ]
        lines += [f"{1e6 * kernel.seconds:>9.1f} {kernel.calls:>7.1f}  {kernel.name[:90]}" for kernel in mine]
    return lines
