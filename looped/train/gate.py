"""`looped train-gate`: distil exit gates on a frozen teacher, find their thresholds, write their checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looped.errors import LoopedError
from looped.train.gate_options import Options, check, specs, wanted

if TYPE_CHECKING:
    from looped.gates import Gate
    from looped.kv import KVLayout
    from looped.model import LoopedLM
    from looped.train.distill import Deployment, Plan, Teaching
    from looped.train.distill_data import Documents
    from looped.train.distill_report import GateReport, Trial
    from looped.train.student_spec import Spec

__all__ = ["Options", "check", "run", "train_gates"]

_DEFAULT_THRESHOLD = 0.5
RANDOM = "random:"


def run(options: Options) -> int:
    """Distil, score, save; prints a table. Raises LoopedError for a mistake in the options."""
    from looped.progress import last_json
    from looped.train.gate_output import check_output
    from looped.train.gate_print import table

    begun = time.monotonic()
    check(options)
    if options.dry_run:
        return measure(options)
    if options.calibrate is not None:
        from looped.train.gate_again import calibrate_again

        reports, folder = [calibrate_again(options)], options.calibrate
        saved = f"thresholds and metrics are in {folder / 'gate.json'}"
    else:
        folder = check_output(options.output, options.resume, options.overwrite, options)
        reports = train_gates(options, folder)
        saved = f"saved to {folder}, with report.json and report.svg"
    print(table(reports, saved))
    if options.json:
        last_json(summary(options, reports, folder, time.monotonic() - begun))
    return 0


def load_teacher(options: Options) -> LoopedLM:
    """The frozen teacher."""
    from looped.analysis.chosen import choose_model

    dtype = None if options.dtype == "auto" else options.dtype
    if options.teacher.startswith(RANDOM):
        return choose_model(None, options.teacher.removeprefix(RANDOM), options.device, dtype)
    return choose_model(options.teacher, None, options.device, dtype)


def measure(options: Options) -> int:
    """Print how fast a few steps are, and what they need."""
    from looped.progress import last_json
    from looped.train import distill_speed
    from looped.train.distill import Teaching
    from looped.train.students import new_students

    model = load_teacher(options)
    deployment = make_deployment(options, model)
    plan = make_plan(options, model, deployment.layout)
    teaching = Teaching(model, new_students(specs(options), model), deployment, plan)
    speed = distill_speed.measure(teaching, open_data(options, model))
    print(distill_speed.text(speed, model.name))
    if options.json:
        last_json(distill_speed.as_json(speed, teacher=options.teacher, gates=options.gate))
    return 0


def make_deployment(options: Options, model: LoopedLM) -> Deployment:
    """What the gates will run under."""
    from looped.kv import get_layout
    from looped.train.distill import Deployment

    layout = get_layout(model.config.default_layout if options.kv is None else options.kv)
    return Deployment.of(model, layout, options.prefill == "ragged", options.context_thresholds)


def train_gates(options: Options, folder: Path) -> list[GateReport]:
    """Train, score and save every gate asked for; the folder changes only when all of it is done."""
    from looped.kv import get_layout
    from looped.train.distill import Teaching
    from looped.train.distill_report import LINEAR, evaluate
    from looped.train.gate_output import replace
    from looped.train.student_spec import parse_specs
    from looped.train.students import new_students

    if options.kv is not None:
        get_layout(options.kv)  # refused by name before a model is loaded
    asked = specs(options)
    model = load_teacher(options)
    wanted(options).check(model.config.max_loops)
    students = new_students(asked, model)
    linear = new_students(parse_specs(("pre-loop:embedding:linear",)), model) if model.exit_gate is not None else []
    deployment = make_deployment(options, model)
    layout = deployment.layout
    trial = make_trial(options, model, deployment)
    for student in students:
        student.standardise, student.threshold = options.standardise, trial.teacher_threshold
    teaching = Teaching(model, students, deployment, make_plan(options, model, layout), linear)
    _train(options, folder, teaching, open_data(options, model))
    gates = {spec.name: student.gate(model) for spec, student in zip(asked, students, strict=True)}
    baselines = {name: student.gate(model) for name, student in zip((LINEAR,), linear, strict=False)}
    reports = evaluate(model, gates, trial, teaching.table, baselines)
    replace(folder, lambda new: _save_all(options, model, asked, gates, reports, layout, new))
    return reports


def make_plan(options: Options, model: LoopedLM, layout: KVLayout) -> Plan:
    """How long and how fast to train."""
    from looped.train.distill import Plan

    if options.pack == "on" and layout.cut_sensitive:
        raise LoopedError(f"--pack on: layout {layout.name} takes documents token by token; leave it out")
    pack = options.pack == "on" or (options.pack == "auto" and model.device.type == "cuda" and not layout.cut_sensitive)
    return Plan(
        tokens=options.tokens,
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        width=min(options.max_length, model.config.max_positions) if pack else None,
        lr=options.lr,
        seed=options.seed,
        optimizer=options.optimizer,
        ridge=options.ridge,
        warmup=options.warmup,
        final_lr=options.final_lr,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )


def make_trial(options: Options, model: LoopedLM, deployment: Deployment) -> Trial:
    """What gates are scored on."""
    from looped.train.distill_report import Trial

    documents = open_data(options, model).held_out(options.eval_tokens)
    target = target_threshold(options, model)
    return Trial(documents, deployment, target, options.batch_tokens, wanted(options))


def open_data(options: Options, model: LoopedLM) -> Documents:
    """The documents to learn from and to be scored on."""
    from looped.train.distill_data import DataOptions, open_corpus

    how = DataOptions(options.columns, options.chat_template, options.reasoning == "keep", options.shuffle)
    return open_corpus(options.data, model, options.seed, options.max_length, how)


def _train(options: Options, folder: Path, teaching: Teaching, documents: Documents) -> None:
    from looped.train.distill_fit import distil
    from looped.train.distill_keep import Unfinished
    from looped.train.gate_output import STATE, begin

    if teaching.cached and options.resume:
        raise LoopedError("this run keeps its features in memory and is over in minutes; start it without --resume")
    if not teaching.cached and not options.resume:
        begin(folder, options)
    distil(teaching, documents, Unfinished(folder / STATE, options.save_minutes * 60, options.resume))


def target_threshold(options: Options, model: LoopedLM) -> float:
    """The teacher threshold whose mean depth the gates are to give: asked for, the model card's, or one half."""
    if options.threshold_target is not None:
        return options.threshold_target
    return model.config.exit_threshold if model.config.exit_threshold < 1 else _DEFAULT_THRESHOLD


def _save_all(
    options: Options,
    model: LoopedLM,
    asked: list[Spec],
    gates: dict[str, Gate],
    reports: list[GateReport],
    layout: KVLayout,
    folder: Path,
) -> None:
    from looped.files import write_text
    from looped.gates.checkpoint import save_gate
    from looped.train.gate_card import card_of, chosen_threshold
    from looped.train.gate_output import REPORT, rounded
    from looped.train.gate_plot import write_plot

    for spec, report in zip(asked, reports, strict=True):
        gate = gates[spec.name]
        card = card_of(model, gate, spec, report, layout.name, options.prefill, chosen_threshold(options, report))
        save_gate(gate, card, folder / spec.name if len(asked) > 1 else folder)
    plain = {report.gate: rounded(dataclasses.asdict(report)) for report in reports}
    write_text(folder / REPORT, json.dumps(plain, indent=1) + "\n")
    write_plot(reports, model.config.max_loops, folder / "report.svg")


def summary(options: Options, reports: list[GateReport], folder: Path, seconds: float) -> dict[str, Any]:
    """What `--json` prints: the report of the first gate, and all of them by name where there are several."""
    from looped.train.gate_output import rounded

    plain = [rounded(dataclasses.asdict(report)) for report in reports]
    result: dict[str, Any] = dict(plain[0])
    if len(reports) > 1:
        result["gates"] = {report["gate"]: report for report in plain}
    return result | {"teacher": options.teacher, "output": str(folder), "seconds": round(seconds, 1)}
