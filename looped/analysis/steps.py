"""The demo's first and third step, how much every step does, and what the steps agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from looped.analysis import worklist
from looped.analysis.offline import measure
from looped.analysis.offline_results import OfflineResult
from looped.analysis.offline_summary import Setup
from looped.analysis.results import Distilled
from looped.gates import load_gate, native_gate
from looped.gates.trained import TrainedGate
from looped.model import LoopedLM

TASK, DRILLS = "wordmath", "wordmath-drills"
MAX_NEW_TOKENS = 96
HALF = 0.5


@dataclass(frozen=True)
class Effort:
    """How much the demo does: teacher tokens and optimiser steps of the gates (None: train-gate's own), problems of the
    scores and the seconds after which no further setting is begun, the bench's work list, questions of each kind to
    the server."""

    gate_tokens: int = 20_000
    gate_steps: int | None = None
    gate_eval_tokens: int = 4_000
    num_problems: int = 48
    score_seconds: float = 110.0
    num_drills: int = 64
    drill_seconds: float = 55.0
    full_grid: bool = True
    bench_requests: int = 24
    bench_output: int | None = None
    bench_repeats: int = 5
    bench_seconds: float = 60.0
    questions: int = 2


QUICK = Effort(
    gate_tokens=3_000,
    gate_steps=60,
    gate_eval_tokens=800,
    num_problems=8,
    score_seconds=30.0,
    num_drills=8,
    drill_seconds=15.0,
    full_grid=False,
    bench_requests=4,
    bench_output=8,
    bench_repeats=1,
    questions=1,
)


def threshold_of(model: LoopedLM) -> float:
    """The native gate's threshold in the model's config, or a half where that never exits."""
    return model.config.exit_threshold if model.config.exit_threshold < 1 else HALF


def distil(model: LoopedLM, name: str, folder: Path, effort: Effort) -> tuple[Distilled, ...]:
    """Train both gates on the frozen model into `folder`/lookahead and `folder`/pre-loop."""
    from looped.train.gates.options import Options
    from looped.train.gates.report import CONSTANT
    from looped.train.gates.train import train_gates

    options = Options(
        teacher=name,
        gate=("all",),
        output=folder,
        data="embedded",
        device=str(model.device),
        tokens=effort.gate_tokens,
        steps=effort.gate_steps,
        eval_tokens=effort.gate_eval_tokens,
    )
    reports = train_gates(options, folder)
    trained = [load_gate(folder / report.gate) for report in reports]
    return tuple(
        Distilled(
            gate=report.gate,
            parameters=made.weight_NF.numel() + made.bias_N.numel() if isinstance(made, TrainedGate) else 0,
            min_depth=made.min_depth,
            threshold=report.threshold,
            mean_depth=report.mean_depth,
            teacher_threshold=report.teacher_threshold,
            teacher_mean_depth=report.teacher_mean_depth,
            agreement=report.agreement,
            constant_agreement=report.baselines[CONSTANT].agreement,
            kappa=report.kappa,
            positions=report.positions,
        )
        for report, made in zip(reports, trained, strict=True)
    )


def bench(model: LoopedLM, effort: Effort) -> OfflineResult:
    """The three schedulers with the native gate on word problems."""
    work = worklist.build(model, effort.bench_requests, output_len=effort.bench_output)
    setup = Setup(model, work, gate=native_gate(model), threshold=threshold_of(model))
    return measure(setup, repeats=effort.bench_repeats, max_seconds=effort.bench_seconds)
