"""The options of `looped train-gate`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from looped.errors import LoopedError
from looped.options import option

if TYPE_CHECKING:
    from looped.train.gates.calibrate import Wanted
    from looped.train.gates.spec import Spec


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
    from looped.train.gates.calibrate import Wanted

    return Wanted(options.mean_depths, options.max_lost, options.confidence, options.lost, options.lost_unit)


def specs(options: Options) -> list[Spec]:
    """The students asked for. Raises LoopedError for unknown ones, and for those that the prefill cannot run."""
    from looped.train.gates.spec import parse_specs

    found = parse_specs(options.gate, options.hidden, options.loss)
    for spec in found:
        if options.prefill == "ragged" and spec.needs_token_before:
            raise LoopedError(f"the {spec.text} gate needs the token before, so it cannot run in a ragged prefill")
    return found
