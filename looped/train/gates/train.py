"""Trains, scores and saves the gates that options ask for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from looped.errors import LoopedError
from looped.files import write_text
from looped.gates import Gate
from looped.gates.checkpoint import save_gate
from looped.kv import KVLayout, get_layout
from looped.model import LoopedLM
from looped.progress import last_json
from looped.train.gates import speed
from looped.train.gates.card import card_of, chosen_threshold
from looped.train.gates.documents import Documents
from looped.train.gates.fit import distil
from looped.train.gates.options import Options, specs, wanted
from looped.train.gates.output import REPORT, STATE, begin, replace, rounded
from looped.train.gates.plot import write_plot
from looped.train.gates.report import LINEAR, GateReport, evaluate
from looped.train.gates.saved_state import Unfinished
from looped.train.gates.setup import load_teacher, make_deployment, make_plan, make_trial, open_data
from looped.train.gates.spec import Spec, parse_specs
from looped.train.gates.students import new_students
from looped.train.gates.teaching import Teaching


def measure(options: Options) -> int:
    """Print how fast a few steps are, and what they need."""
    model = load_teacher(options)
    deployment = make_deployment(options, model)
    plan = make_plan(options, model, deployment.layout)
    teaching = Teaching(model, new_students(specs(options), model), deployment, plan)
    found = speed.measure(teaching, open_data(options, model))
    print(speed.text(found, model.name))
    if options.json:
        last_json(speed.as_json(found, teacher=options.teacher, gates=options.gate))
    return 0


def train_gates(options: Options, folder: Path) -> list[GateReport]:
    """Train, score and save every gate asked for; the folder changes only when all of it is done."""
    if options.kv is not None:
        get_layout(options.kv)  # refused by name before a model is loaded
    asked = specs(options)
    model = load_teacher(options)
    wanted(options).check(model.config.max_loops)
    students = new_students(asked, model)
    linear = new_students(parse_specs(("pre-loop:embedding:linear",)), model) if model.exit_gate is not None else []
    deployment = make_deployment(options, model)
    layout = deployment.layout
    documents = open_data(options, model)
    trial = make_trial(options, model, deployment, documents)
    for student in students:
        student.standardise, student.threshold = options.standardise, trial.teacher_threshold
    teaching = Teaching(model, students, deployment, make_plan(options, model, layout), linear)
    _train(options, folder, teaching, documents)
    gates = {spec.name: student.gate(model) for spec, student in zip(asked, students, strict=True)}
    baselines = {name: student.gate(model) for name, student in zip((LINEAR,), linear, strict=False)}
    reports = evaluate(model, gates, trial, teaching.table, baselines)
    replace(folder, lambda new: _save_all(options, model, asked, gates, reports, layout, new))
    return reports


def _train(options: Options, folder: Path, teaching: Teaching, documents: Documents) -> None:
    if teaching.cached and options.resume:
        raise LoopedError("this run keeps its features in memory and is over in minutes; start it without --resume")
    if not teaching.cached and not options.resume:
        begin(folder, options)
    distil(teaching, documents, Unfinished(folder / STATE, options.save_minutes * 60, options.resume))


def _save_all(
    options: Options,
    model: LoopedLM,
    asked: list[Spec],
    gates: dict[str, Gate],
    reports: list[GateReport],
    layout: KVLayout,
    folder: Path,
) -> None:
    for spec, report in zip(asked, reports, strict=True):
        gate = gates[spec.name]
        card = card_of(model, gate, spec, report, layout.name, options.prefill, chosen_threshold(options, report))
        save_gate(gate, card, folder / spec.name if len(asked) > 1 else folder)
    plain = {report.gate: rounded(dataclasses.asdict(report)) for report in reports}
    write_text(folder / REPORT, json.dumps(plain, indent=1) + "\n")
    write_plot(reports, model.config.max_loops, folder / "report.svg")
