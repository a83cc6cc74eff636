"""From a gate's report to its `gate.json`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from looped.gates import Gate
from looped.gates.card import GateCard
from looped.gates.checkpoint import inputs_of
from looped.gates.protocol import stored_layout
from looped.model import LoopedLM
from looped.train.gates.output import rounded
from looped.train.gates.report import GateReport
from looped.train.gates.spec import Spec

if TYPE_CHECKING:
    from looped.train.gates.options import Options

# Of a report: what the card says elsewhere, and what `report.json` alone holds.
_ELSEWHERE = ("gate", "kind", "threshold", "thresholds", "calibration")
_LONG = ("depth_curve", "reliability_teacher", "reliability_oracle")


def chosen_threshold(options: Options, report: GateReport) -> float:
    """The gate's own threshold: for the teacher's mean depth, or for the first mean depth or bound asked for."""
    if options.threshold_from == "teacher":
        return report.threshold
    for entry in report.calibration:
        if (entry["for"] == "mean-depth") == (options.threshold_from == "mean-depth"):
            return float(entry["threshold"])
    raise ValueError(f"nothing was calibrated for {options.threshold_from}")


def metrics_of(report: GateReport) -> dict[str, Any]:
    """A report as the card holds it."""
    metrics: dict[str, Any] = rounded(dataclasses.asdict(report))
    return {name: value for name, value in metrics.items() if name not in (*_ELSEWHERE, *_LONG)}


def card_of(
    model: LoopedLM, gate: Gate, spec: Spec, report: GateReport, layout: str, prefill: str, threshold: float
) -> GateCard:
    """The card of a trained gate."""
    return GateCard(
        kind=gate.name,
        teacher=model.name,
        teacher_revision=model.revision,
        hidden_size=model.config.hidden_size,
        max_loops=model.config.max_loops,
        latency=gate.latency,
        min_depth=gate.min_depth,
        layout=stored_layout(layout),
        prefill=prefill,
        threshold=threshold,
        thresholds=rounded(report.thresholds),
        metrics=metrics_of(report),
        inputs=inputs_of(gate),
        loss=spec.loss,
        target=spec.target,
        calibration=rounded(report.calibration),
    )
