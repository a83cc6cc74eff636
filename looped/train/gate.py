"""`looped train-gate`: distil exit gates on a frozen teacher, find their thresholds, write their checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from looped.errors import LoopedError
from looped.options import option

if TYPE_CHECKING:
    from looped.model import LoopedLM
    from looped.train.distill import Deployment, Plan
    from looped.train.distill_report import GateReport
    from looped.train.students import Student

RESUME_PLAN, RESUME_STATE = "unfinished.json", "unfinished.safetensors"
_DEFAULT_THRESHOLD = 0.5
# What a resumed run may change.
_FREE = ("output", "overwrite", "resume", "json", "save_minutes", "eval_tokens")


@dataclass(frozen=True)
class Options:
    """Distil an exit gate from a looped model's own gate, under the KV layout and prefill it will run with.

    Several gates can be trained on one forward of the teacher; each then gets a folder of its own inside the output
    folder. `lookahead` decides one loop step ahead, from the second on; `pre-loop` before the first; `hybrid` decides
    about the first step before it and about the others one step ahead.
    """

    teacher: str = option("tiny-ouro", "model with an exit gate of its own: name, hub id or folder")
    gate: tuple[str, ...] = option(
        ("lookahead",), "gates to train: lookahead, pre-loop, hybrid; all: lookahead and pre-loop"
    )
    output: Path | None = option(None, "folder for the gate checkpoint")
    kv: str | None = option(None, "KV layout the gate will run under; the model's own when left out")
    prefill: Literal["dense", "ragged"] = option("dense", "whether prompt tokens run at full depth or exit too")
    threshold_target: float | None = option(
        None, "teacher threshold whose mean depth the gate's own threshold gives; the model card's when left out"
    )
    context_thresholds: tuple[float, float] = option(
        (0.1, 0.9), "teacher thresholds between which the tokens of each document exit while training"
    )
    hidden: int = option(0, "units of a hidden layer beside the linear heads; 0 means none")
    loss: Literal["kl", "paper"] = option("kl", "survival-weighted hazard loss, or the authors' recipe")
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
    optimizer: Literal["auto", "adamw", "lbfgs"] = option(
        "auto", "lbfgs fits all features at once; auto: where they fit memory and the loss is kl, else adamw"
    )
    steps: int | None = option(None, "optimiser steps; when left out, enough")
    batch_tokens: int = option(4096, "tokens in a forward of the teacher, and positions in an optimiser step")
    lr: float = option(3e-3, "peak learning rate of AdamW; falls to zero by a cosine")
    ridge: float = option(5.0, "cost of the squared weights, in nats over all positions; against learning by heart")
    seed: int = option(0, "seed of documents, their order and thresholds")
    device: str | None = option(None, "cpu or cuda; the first GPU when there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = option("auto", "auto: bfloat16 on a GPU")
    save_minutes: float = option(5.0, "minutes between saved states of a run whose features do not fit memory")
    resume: bool = option(False, "go on from the saved state in the output folder")
    overwrite: bool = option(False, "replace the run in the output folder")
    json: bool = option(False, "end with one line of JSON")


def run(options: Options) -> int:
    """Distil, score, save; prints a table. Raises LoopedError for a mistake in the options."""
    from looped.progress import last_json

    begun = time.monotonic()
    check(options)
    folder = check_output(options)
    reports = train_gates(options, folder)
    result = summary(options, reports, time.monotonic() - begun)
    print(table(reports, folder))
    if options.json:
        last_json(result)
    return 0


def check(options: Options) -> None:
    """Refuse numbers out of their range."""
    for name in ("tokens", "eval_tokens", "batch_tokens", "max_length", "shuffle"):
        least = 4 if name == "max_length" else 1
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise LoopedError(f"--{flag} must be at least {least}, got {getattr(options, name)}")
    if not -(1 << 31) <= options.seed < 1 << 31:  # it is multiplied by the number of documents
        raise LoopedError(f"--seed must fit in 32 bits, got {options.seed}")
    if options.steps is not None and options.steps < 1:
        raise LoopedError(f"--steps must be at least 1, got {options.steps}")
    if not 0 < options.lr < float("inf"):
        raise LoopedError(f"--lr must be above 0, got {options.lr}")
    if options.hidden < 0:
        raise LoopedError(f"--hidden must be 0 or more, got {options.hidden}")
    if not 0 <= options.ridge < float("inf"):
        raise LoopedError(f"--ridge must be 0 or more, got {options.ridge}")
    if options.save_minutes <= 0:
        raise LoopedError(f"--save-minutes must be above 0, got {options.save_minutes}")
    low, high = options.context_thresholds
    if not 0 <= low <= high <= 1:
        raise LoopedError(f"--context-thresholds must be two numbers in order between 0 and 1, got {low},{high}")
    if options.threshold_target is not None and not 0 <= options.threshold_target <= 1:
        raise LoopedError(f"--threshold-target must be between 0 and 1, got {options.threshold_target}")


def check_output(options: Options) -> Path:
    """The output folder, refused where it holds a run that is neither replaced nor resumed."""
    folder = options.output
    if folder is None:
        raise LoopedError("--output is missing: give a folder for the gate checkpoint")
    if folder.exists() and not folder.is_dir():
        raise LoopedError(f"{folder} is a file; give a folder for the gate checkpoint")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(above, os.W_OK):
        raise LoopedError(f"cannot write in {above}; give another folder for the gate checkpoint")
    plan = folder / RESUME_PLAN
    if options.resume:
        if not plan.is_file() or not (folder / RESUME_STATE).is_file():
            raise LoopedError(f"{folder} holds no unfinished run to resume; leave --resume out to start one there")
        _check_same(json.loads(plan.read_text(encoding="utf-8")), _plain(options))
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        if not (plan.is_file() or any(folder.glob("gate.json")) or any(folder.glob("*/gate.json"))):
            raise LoopedError(f"{folder} is not empty and holds no gate; give another folder")
        if not options.overwrite:
            saved = (folder / RESUME_STATE).is_file()
            how = "continue it with --resume or replace it with" if saved else "replace it with"
            raise LoopedError(f"{folder} already holds a run; {how} --overwrite")
    return folder


def _plain(options: Options) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    return {name: value for name, value in plain.items() if name not in _FREE}


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = ["--" + name.replace("_", "-") for name in new if old.get(name) != new[name]]
    if changed:
        raise LoopedError(f"the run to resume was begun with other values of {', '.join(changed)}; use those")


def load_teacher(options: Options) -> LoopedLM:
    """The frozen teacher. Raises LoopedError where it has no exit gate of its own."""
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
    model = load(options.teacher, device=device, dtype=dtype)
    if model.exit_gate is None:
        raise LoopedError(f"{model.name} has no exit gate of its own, so there is nothing to distil from it")
    return model


def train_gates(options: Options, folder: Path) -> list[GateReport]:
    """Train, score and save every gate asked for; the folder changes only when all of it is done."""
    from looped.kv import get_layout
    from looped.train.distill import Deployment, Plan, Teaching
    from looped.train.distill_data import Corpus
    from looped.train.students import new_students, student_kinds

    layout = None if options.kv is None else get_layout(options.kv)
    for kind in student_kinds(options.gate):
        if options.prefill == "ragged" and kind != "lookahead":
            raise LoopedError(f"the {kind} gate needs the token before, so it cannot run in a ragged prefill")
    model = load_teacher(options)
    students = new_students(options.gate, model, options.hidden)
    layout = layout or get_layout(model.config.default_layout)
    deployment = Deployment(layout, options.prefill == "ragged", *options.context_thresholds)
    plan = Plan(
        options.tokens,
        options.steps,
        options.batch_tokens,
        options.lr,
        options.loss,
        options.seed,
        options.optimizer,
        options.ridge,
    )
    corpus = Corpus(options.data, model, options.seed, options.max_length)
    held_out = corpus.held_out(options.eval_tokens)
    teaching = Teaching(model, students, deployment, plan)
    _train(options, folder, teaching, corpus)
    target = _target_threshold(options, model)
    reports = [_report(model, student, held_out, deployment, target, plan) for student in students]
    try:
        _replace(folder, lambda new: _save_all(model, students, reports, layout.name, options.prefill, new))
    except OSError as error:
        raise LoopedError(f"cannot write {folder}: {error.strerror or error}") from error
    return reports


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Put a folder in the place of `folder` when `write` has filled it; until then nothing changes there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
        new = Path(partial) / "new"
        write(new)
        if folder.exists():
            folder.rename(Path(partial) / "old")
        new.rename(folder)


def _save_all(
    model: LoopedLM, students: list[Student], reports: list[GateReport], layout: str, prefill: str, folder: Path
) -> None:
    for student, report in zip(students, reports, strict=True):
        where = folder / student.kind if len(students) > 1 else folder
        _save(model, student, report, layout, prefill, where)


def _train(options: Options, folder: Path, teaching: Any, corpus: Any) -> None:
    from looped.train.distill_fit import Unfinished, distil

    if teaching.cached and options.resume:
        raise LoopedError("this run keeps its features in memory and is over in minutes; start it without --resume")
    if not teaching.cached and not options.resume:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESUME_STATE).unlink(missing_ok=True)
        (folder / RESUME_PLAN).write_text(json.dumps(_plain(options), indent=2) + "\n", encoding="utf-8")
    distil(teaching, corpus, Unfinished(folder / RESUME_STATE, options.save_minutes * 60, options.resume))


def _target_threshold(options: Options, model: LoopedLM) -> float:
    """The teacher threshold whose mean depth the gates are to give: asked for, the model card's, or one half."""
    if options.threshold_target is not None:
        return options.threshold_target
    return model.config.exit_threshold if model.config.exit_threshold < 1 else _DEFAULT_THRESHOLD


def _report(
    model: LoopedLM, student: Student, held_out: list[Any], deployment: Deployment, target: float, plan: Plan
) -> GateReport:
    from looped.train.distill_report import evaluate

    return evaluate(model, student, held_out, deployment, target, plan.batch_tokens)


def _save(model: LoopedLM, student: Student, report: GateReport, layout: str, prefill: str, where: Path) -> None:
    from looped.gates.checkpoint import GateCard, save_gate
    from looped.gates.protocol import stored_layout

    gate = student.gate(model)
    metrics = _rounded(dataclasses.asdict(report))
    for name in ("gate", "threshold", "thresholds"):
        metrics.pop(name)
    card = GateCard(
        kind=gate.kind,
        teacher=model.name,
        teacher_revision=model.revision,
        hidden_size=model.config.hidden_size,
        max_loops=model.config.max_loops,
        latency=gate.latency,
        min_depth=gate.min_depth,
        layout=stored_layout(layout),
        prefill=prefill,
        threshold=report.threshold,
        thresholds=_rounded(report.thresholds),
        metrics=metrics,
    )
    save_gate(gate, card, where)


def summary(options: Options, reports: list[GateReport], seconds: float) -> dict[str, Any]:
    """What `--json` prints: the report of the first gate, and all of them by name where there are several."""
    plain = [_rounded(dataclasses.asdict(report)) for report in reports]
    result: dict[str, Any] = dict(plain[0])
    if len(reports) > 1:
        result["gates"] = {report["gate"]: report for report in plain}
    return result | {"teacher": options.teacher, "output": str(options.output), "seconds": round(seconds, 1)}


def _rounded(value: Any) -> Any:
    """Floats to six places, which is more than held-out tokens can tell."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def table(reports: list[GateReport], folder: Path) -> str:
    """Quality and dial of the gates, for people."""
    lines = []
    for report in reports:
        lines += [
            f"{report.gate}: threshold {report.threshold:.3f} gives mean depth {report.mean_depth:.3f}; the teacher at "
            f"{report.teacher_threshold:g} gives {report.teacher_mean_depth:.3f} ({report.positions} held-out tokens)",
            f"  agreement {report.agreement:.3f}, kappa {report.kappa:.3f}; constant depth "
            f"{report.constant_agreement:.3f}, the previous token's depth {report.previous_agreement:.3f}; "
            f"raw teacher {report.raw_agreement:.3f}",
            f"  loss at exit {report.ce:.4f}, teacher {report.teacher_ce:.4f}, full depth {report.full_depth_ce:.4f}; "
            f"on its own: {report.deployed_ce:.4f} at mean depth {report.deployed_mean_depth:.3f}",
            "  threshold  teacher depth  gate depth  agreement  matched threshold",
        ]
        lines += [
            f"  {row['threshold']:9.1f}  {row['teacher_mean_depth']:13.3f}  {row['mean_depth']:10.3f}  "
            f"{row['agreement']:9.3f}  {row['matched_threshold']:17.3f}"
            for row in report.thresholds
        ]
    return "\n".join([*lines, f"saved to {folder}"])
