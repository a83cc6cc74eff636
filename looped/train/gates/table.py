"""What `looped train-gate` says at its end: gates side by side, and beside what they have to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from looped.columns import aligned
from looped.train.gates.report import GateReport


def table(reports: Sequence[GateReport], saved: str) -> str:
    """Quality and dial of gates, for people; `saved` says what is where."""
    first = reports[0]
    lines = [
        f"{first.positions} held-out tokens; contexts leave at the {first.teacher} gate's exits at "
        f"{first.teacher_threshold:g}; every gate at the threshold that gives the teacher's mean depth",
        "",
    ]
    header = ("gate", "threshold", "depth", "agrees", "kappa", "within 1", "CE", "regret", "same token", "on its own")
    lines += aligned([header, *map(_row, reports)])
    for floor in dict.fromkeys(report.floor for report in reports):
        lines += ["", *_baselines(next(report for report in reports if report.floor == floor))]
    for report in reports:
        lines += [f"{report.gate}: {said(entry)}" for entry in report.calibration]
    return "\n".join([*lines, "", saved])


def _row(report: GateReport) -> tuple[str, ...]:
    return (
        report.gate,
        f"{report.threshold:.4g}",
        f"{report.mean_depth:.3f}",
        f"{report.agreement:.1%}",
        f"{report.kappa:.3f}",
        f"{report.within_one:.1%}",
        f"{report.ce:.4f}",
        f"{report.ce_regret:+.4f}",
        f"{report.same_token:.1%}",
        f"{report.deployed_ce:.4f} at {report.deployed_mean_depth:.3f}",
    )


def _baselines(report: GateReport) -> list[str]:
    teacher = report.teacher_exits
    rows = [("teacher" if report.floor == 1 else f"teacher from depth {report.floor}", teacher)]
    rows += sorted(report.baselines.items(), key=lambda item: -item[1].agreement)
    header = ("to compare", "depth", "agrees", "kappa", "CE", "regret", "same token")
    lines = [
        (
            name,
            f"{exits.mean_depth:.3f}",
            f"{exits.agreement:.1%}",
            f"{exits.kappa:.3f}",
            f"{exits.ce:.4f}",
            f"{exits.ce_regret:+.4f}",
            f"{exits.same_token:.1%}",
        )
        for name, exits in rows
    ]
    full = f"at full depth CE is {report.full_depth_ce:.4f}"
    if report.raw_mean_depth != report.teacher_mean_depth:
        full += f"; the teacher as it is has mean depth {report.raw_mean_depth:.3f}"
    return [*aligned([header, *lines]), full]


def said(entry: dict[str, Any]) -> str:
    """A calibrated threshold in words."""
    if entry["for"] == "mean-depth":
        return f"mean depth {entry['wanted']:g}: threshold {entry['threshold']:.4g} gives {entry['mean_depth']:.3f}"
    what = "tokens changed" if entry["for"] == "lost-tokens" else "nats lost"
    if not entry["shown"]:
        return (
            f"at most {entry['wanted']:g} {what}: cannot be shown with {entry['confidence']:.0%} confidence on "
            f"{entry['units']} {entry['unit']}s, so threshold {entry['threshold']:g}, which never exits; more "
            "--eval-tokens help"
        )
    return (
        f"at most {entry['wanted']:g} {what}, with {entry['confidence']:.0%} confidence: threshold "
        f"{entry['threshold']:.4g}, mean depth {entry['mean_depth']:.3f}; {entry['lost']:.4f} on {entry['units']} "
        f"held-out {entry['unit']}s"
    )
