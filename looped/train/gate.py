"""`looped train-gate`: distil exit gates on a frozen teacher, find their thresholds, write their checkpoints."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looped.errors import LoopedError
from looped.options import option

if TYPE_CHECKING:
    from looped.gates import Gate
    from looped.kv import KVLayout
    from looped.model import LoopedLM
    from looped.train.distill import Deployment, Plan, Teaching
    from looped.train.distill_data import Documents
    from looped.train.distill_report import GateReport, Trial
    from looped.train.gate_calibrate import Wanted
    from looped.train.student_spec import Spec

_DEFAULT_THRESHOLD = 0.5
RANDOM = "random:"


@dataclass(frozen=True)
class Options:
    """Distil an exit gate from a looped model's own gate, under the KV layout and prefill it will run with.

    Any number of gates can be trained on one forward of the teacher; each then gets a folder of its own inside the
    output folder. `lookahead` decides one loop step ahead, from the second on; `pre-loop` before the first; `hybrid`
    decides about the first step before it and about the others one step ahead; `stage2` learns from how much loops
    lower the loss and decides about the step just run; `same-step` copies the teacher. For a model without a gate
    `lookahead` foresees its convergence criterion; `convergence` and `delayed-convergence` get a threshold only.

    Words behind a colon say more: `lookahead:mlp=64:shared:change`, `pre-loop:embedding+depth`, `stage2:prospective`.
    Heads are per-step, shared (a bias a step) or single (none); linear, or mlp; change adds z_r - z_{r-1}. A pre-loop
    gate sees what is named of embedding, state, entropy, surprisal, depth; softmax makes its heads depths. Losses: kl,
    bce, cdf, hard, ordinal, paper. prospective and retrospective learn from losses in place of a teacher.
    """

    teacher: str = option(
        "tiny-ouro", "model: name, hub id or folder; random:ouro-1.4b: random weights of that shape, on random tokens"
    )
    gate: tuple[str, ...] = option(
        ("lookahead",),
        "gates to train: lookahead, pre-loop, hybrid, stage2, same-step, convergence, delayed-convergence, with words "
        "behind colons; all: lookahead and pre-loop",
    )
    output: Path | None = option(None, "folder for the gate checkpoint")
    calibrate: Path | None = option(None, "folder of a gate whose thresholds are found anew; nothing is trained")
    kv: str | None = option(None, "KV layout the gate will run under; the model's own when left out")
    prefill: Literal["dense", "ragged"] = option("dense", "whether prompt tokens run at full depth or exit too")
    threshold_target: float | None = option(
        None, "teacher threshold whose mean depth the gate's own threshold gives; the model card's when left out"
    )
    mean_depths: tuple[float, ...] = option((), "mean depths that thresholds are found for besides")
    max_lost: tuple[float, ...] = option((), "bounds on what early exits lose that thresholds are found for besides")
    lost: Literal["tokens", "ce"] = option("tokens", "what is lost: the last loop's tokens, a share; ce: nats a token")
    lost_unit: Literal["document", "token"] = option("document", "what is independent of each other for the bounds")
    confidence: float = option(0.95, "confidence of the bounds")
    threshold_from: Literal["teacher", "mean-depth", "max-lost"] = option(
        "teacher", "what the gate's own threshold is for: the teacher's mean depth, or the first of those asked for"
    )
    context_thresholds: tuple[float, float] | None = option(
        None,
        "teacher thresholds between which the tokens of each document exit while training; 0.1,0.9, or around the "
        "threshold of a convergence criterion, when left out",
    )
    hidden: int = option(0, "units of a hidden layer beside the linear heads; 0 means none")
    loss: Literal["kl", "bce", "cdf", "hard", "ordinal", "paper"] = option(
        "kl",
        "kl: hazards weighted by survival; cdf: exits over a grid of thresholds; hard, ordinal: at one; paper: "
        "the authors' recipe",
    )
    data: str = option(
        "auto",
        "embedded: the generator; files: a path, folder or glob; a hub data set: name[:config][:split+split]; auto: "
        "embedded for models with the shipped tokenizer, else nvidia/Nemotron-Post-Training-Dataset-v2",
    )
    columns: tuple[str, ...] = option(
        (), "the data's columns: messages; prompt and completion; or a text; found by their names when left out"
    )
    chat_template: str = option(
        "auto", "how chats become text; auto: the tokenizer's template, else none; none: Q and A lines; a .jinja file"
    )
    reasoning: Literal["drop", "keep"] = option("drop", "rows marked as reasoning, and <think> parts of answers")
    shuffle: int = option(10_000, "documents that are shuffled at once")
    tokens: int = option(40_000, "tokens that the teacher reads")
    eval_tokens: int = option(6_000, "tokens of held-out documents")
    max_length: int = option(1024, "tokens a document is cut to")
    pack: Literal["auto", "on", "off"] = option(
        "auto", "several documents in a row of max-length; auto: on a GPU, where the layout lets a row be one pass"
    )
    optimizer: Literal["auto", "adamw", "lbfgs"] = option(
        "auto", "lbfgs fits all features at once; auto: where they fit memory and no loss is paper, else adamw"
    )
    steps: int | None = option(None, "optimiser steps; when left out, enough")
    batch_tokens: int = option(4096, "tokens in a forward of the teacher, and positions in an optimiser step")
    lr: float = option(3e-3, "peak learning rate of AdamW; falls by a cosine")
    final_lr: float = option(0.0, "share of the peak rate at the end")
    warmup: int = option(0, "steps in which the rate rises")
    weight_decay: float = option(0.0, "of AdamW")
    clip: float | None = option(None, "bound on the norm of each gate's gradient")
    standardise: bool = option(True, "weights act on inputs of mean 0 and spread 1")
    ridge: float = option(5.0, "cost of the squared weights, in nats over all positions; against learning by heart")
    seed: int = option(0, "seed of documents, their order and thresholds")
    device: str | None = option(None, "cpu or cuda; the first GPU when there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option("auto", "auto: bfloat16 on a GPU")
    save_minutes: float = option(5.0, "minutes between saved states of a run whose features do not fit memory")
    resume: bool = option(False, "go on from the saved state in the output folder")
    overwrite: bool = option(False, "replace the run in the output folder")
    dry_run: bool = option(False, "measure the speed and memory of a few steps, write nothing")
    json: bool = option(False, "end with one line of JSON")


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


def check(options: Options) -> None:
    """Refuse numbers out of their range, and gates that cannot be trained."""
    for name in ("tokens", "eval_tokens", "batch_tokens", "max_length", "shuffle"):
        least = 4 if name == "max_length" else 1
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise LoopedError(f"--{flag} must be at least {least}, got {getattr(options, name)}")
    if not -(1 << 31) <= options.seed < 1 << 31:  # it is multiplied by the number of documents
        raise LoopedError(f"--seed must fit in 32 bits, got {options.seed}")
    if options.steps is not None and options.steps < 1:
        raise LoopedError(f"--steps must be at least 1, got {options.steps}")
    for name in ("lr", "save_minutes"):
        if not 0 < getattr(options, name) < float("inf"):
            raise LoopedError(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
    for name in ("hidden", "warmup", "ridge", "weight_decay"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise LoopedError(f"--{name.replace('_', '-')} must be 0 or more, got {getattr(options, name)}")
    if not 0 <= options.final_lr <= 1:
        raise LoopedError(f"--final-lr is a share of the peak, between 0 and 1, got {options.final_lr}")
    if options.clip is not None and not options.clip > 0:
        raise LoopedError(f"--clip must be above 0, got {options.clip}")
    low, high = options.context_thresholds or (0.1, 0.9)
    if not 0 <= low <= high <= 1:
        raise LoopedError(f"--context-thresholds must be two numbers in order between 0 and 1, got {low},{high}")
    if options.threshold_target is not None and not 0 <= options.threshold_target <= 1:
        raise LoopedError(f"--threshold-target must be between 0 and 1, got {options.threshold_target}")
    wanted(options).check()
    for name, flag, given in (
        ("mean-depth", "mean-depths", options.mean_depths),
        ("max-lost", "max-lost", options.max_lost),
    ):
        if options.threshold_from == name and not given:
            raise LoopedError(f"--threshold-from {name} needs --{flag}")
    specs(options)


def wanted(options: Options) -> Wanted:
    """What thresholds are to be found for besides the teacher's mean depth."""
    from looped.train.gate_calibrate import Wanted

    return Wanted(options.mean_depths, options.max_lost, options.confidence, options.lost, options.lost_unit)


def specs(options: Options) -> list[Spec]:
    """The students asked for. Raises LoopedError for unknown ones, and for those that the prefill cannot run."""
    from looped.train.student_spec import parse_specs

    found = parse_specs(options.gate, options.hidden, options.loss)
    for spec in found:
        if options.prefill == "ragged" and spec.needs_token_before:
            raise LoopedError(f"the {spec.text} gate needs the token before, so it cannot run in a ragged prefill")
    return found


def load_teacher(options: Options) -> LoopedLM:
    """The frozen teacher."""
    import torch

    from looped.model import load

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        gpu = torch.device(device).type == "cuda"
    except RuntimeError:
        raise LoopedError(f"--device {device!r} is no device; use cpu, or cuda") from None
    if gpu and not torch.cuda.is_available():
        raise LoopedError(f"--device {device}: torch sees no GPU here; use --device cpu")
    dtype = options.dtype if options.dtype != "auto" else "bfloat16" if gpu else "float32"
    if options.teacher.startswith(RANDOM):
        from looped.analysis.shapes import random_model, shape

        name = options.teacher.removeprefix(RANDOM)
        return random_model(shape(name), name, device, dtype)
    return load(options.teacher, device=device, dtype=dtype)


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
