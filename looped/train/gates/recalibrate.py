"""`looped train-gate --calibrate`: thresholds of a gate that exists, found anew on other data or for other wishes."""

from __future__ import annotations

import dataclasses

from looped.errors import LoopedError
from looped.gates.card import read_card, write_card
from looped.gates.checkpoint import read_gate
from looped.gates.protocol import stored_layout
from looped.kv import get_layout
from looped.train.gates.card import chosen_threshold, metrics_of
from looped.train.gates.options import Options, wanted
from looped.train.gates.output import rounded
from looped.train.gates.report import GateReport, evaluate
from looped.train.gates.setup import load_teacher, make_trial, open_data
from looped.train.gates.teaching import Deployment
from looped.train.gates.token_table import TokenTable


def calibrate_again(options: Options) -> GateReport:
    """Score a saved gate under the options and put thresholds and metrics into its `gate.json`."""
    folder = options.calibrate
    assert folder is not None
    if options.output is not None or options.resume:
        raise LoopedError("--calibrate changes the gate in its folder; leave --output and --resume out")
    card, gate = read_card(folder), read_gate(folder)
    layout = get_layout(options.kv or card.layout)
    model = load_teacher(options)
    wanted(options).check(model.config.max_loops)
    gate = gate.bind(model)
    if options.prefill == "ragged" and gate.uses_carry:
        raise LoopedError(f"the {gate.name} gate needs the token before, so it cannot run in a ragged prefill")
    deployment = Deployment.of(model, layout, options.prefill == "ragged", options.context_thresholds)
    trial = make_trial(options, model, deployment, open_data(options, model))
    report = evaluate(model, {folder.name: gate}, trial, TokenTable(), {})[0]
    changed = dataclasses.replace(
        card,
        layout=stored_layout(layout.name),
        prefill=options.prefill,
        threshold=chosen_threshold(options, report),
        thresholds=rounded(report.thresholds),
        metrics=metrics_of(report),
        calibration=rounded(report.calibration),
    )
    try:
        write_card(changed, folder)
    except OSError as error:
        raise LoopedError(f"cannot write {folder}: {error.strerror or error}; the gate is as it was") from error
    return report
