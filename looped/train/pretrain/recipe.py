"""What a pretraining run is made of. One dataclass per part; `recipes/*.yaml` and flags fill them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Literal

from looped.config import ModelConfig
from looped.data.embedded import EMBEDDED
from looped.data.mixture import Mix
from looped.errors import LoopedError
from looped.kv import get_layout
from looped.options import option


@dataclass(frozen=True)
class Shape:
    """Size of the model to build."""

    family: Literal["ouro", "huginn"] = option("ouro", "model family")
    width: int = option(320, "hidden size")
    ffn: int = option(896, "width of the gated MLP")
    heads: int = option(5, "attention heads, each of width / heads dimensions")
    layers: tuple[int, int, int] = option((0, 5, 0), "transformer layers in prelude, core, coda")
    loops: int = option(4, "R, the loop steps the model is trained for")
    vocab: int | None = option(None, "rows of the embedding and the head; the tokenizer's when left out, never fewer")
    rope_theta: float = option(1e4, "base of the rotary positions")
    loop_norm: bool = option(True, "final norm after every loop step, as released Ouro")


@dataclass(frozen=True)
class Init:
    """Where the weights come from: a checkpoint, or random ones of these scales."""

    checkpoint: str | None = option(
        None,
        "model to go on from (name, hub id or folder): its weights, shape and tokenizer; the model part of the recipe "
        "is then what --dry-run reckons with where the checkpoint is out of reach",
    )
    embed_std: float = option(0.02, "token embedding")
    linear_std: float = option(0.02, "all matrices but the head")
    head_std: float = option(0.02, "LM head, where it is not tied")
    branch_gain: float = option(0.02, "gain of the norm that ends each residual branch (Ouro)")
    gate_bias: float = option(-1.1, "bias of the exit gate, whose weight starts at zero")


Sampling = Literal["fixed", "uniform", "lognormal-poisson"]


@dataclass(frozen=True)
class TokenWeights:
    """What tokens weigh in the mean that a loss is."""

    question_weight: float = option(1.0, "loss weight of tokens outside answers")
    number_weight: float = option(1.0, "loss weight of the digits of final answers; other tokens of answers weigh 1")


@dataclass(frozen=True)
class LayoutAware(TokenWeights):
    """Steps trained on the K/V that tokens leave under a KV layout; what the two families' objectives share."""

    kv_prompt: float = option(
        0.0, "in those steps a prompt, run in parallel at full depth, takes up to this share of each window"
    )
    kv_passes: int = option(
        1, "forwards that find what tokens leave where planes are overwritten; as many as tokens would be exact"
    )
    kv_gradient: bool = option(
        True, "where planes are overwritten, gradients also reach what earlier tokens wrote, at the cost of a forward"
    )


@dataclass(frozen=True)
class Objective(LayoutAware):
    """The loss of a fully looped model with an exit gate (Ouro)."""

    prior: Literal["poisson", "geometric", "uniform"] = option("poisson", "wanted distribution of exit depths")
    prior_rate: float | None = option(
        None, "poisson's rate (2.1 when left out), or the chance by which geometric stops at every depth (0.3)"
    )
    kl: Literal["global", "local"] = option("global", "hold the prior on the batch mean, or on every token")
    kl_tokens: Literal["all", "groups"] = option(
        "all", "tokens the mean runs over: all of them, or answers and the rest as two means that both meet the prior"
    )
    beta: float = option(0.1, "final weight of the KL to the prior")
    beta_schedule: Literal["flat", "cosine", "paper"] = option(
        "flat", "constant after 2 % of the run, one cosine over beta-ramp, or the paper's slow rise in three parts"
    )
    beta_ramp: tuple[float, float] = option((0.0, 0.25), "parts of the run between which cosine raises beta from 0")
    beta_pause: bool = option(False, "no KL in steps whose batch says that depth is not being used (the guards)")
    floor: float = option(0.05, "share of the loss weights spread over all depths")
    depth_cost: float = option(0.0, "cost per expected loop, to break ties towards shallow exits")
    depth_budget: float | None = option(None, "mean depth above which every expected loop costs budget-cost")
    budget_cost: float = option(1.0, "nats for a loop of mean depth above depth-budget")
    sampling: Sampling = option("fixed", "loops of a dense step: R, or drawn for each micro-batch; the last one exits")
    mean: float = option(3.0, "mean number of loops of lognormal-poisson before cutting to 1..R")
    sigma: float = option(0.5, "spread of its log-normal part")
    backprop: int = option(0, "loops of a dense step that get gradients, counted from the last; 0 means all")
    kv: str = option("ragged", "KV layout the model learns to live with: ragged, shared, first-shared, modulo-2, ...")
    aware: Literal["alternate", "counterfactual", "reinforce"] = option(
        "alternate",
        "how: a loss at sampled exits, every depth of every token against committed exits, or credit for what an exit "
        "does to later tokens",
    )
    ragged_from: float = option(0.5, "part of the run after which steps under that layout begin; 1 turns them off")
    kv_share: float = option(0.5, "share of the steps from there on that are under that layout (reinforce: all)")
    commit_threshold: float = option(0.5, "threshold of the exits that counterfactual commits")
    trajectories: int = option(1, "K, sampled exits of a batch in a step of reinforce")
    ragged_weight: float = option(1.0, "weight of the loss at sampled exits beside the dense one in reinforce")
    score_weight: float = option(0.01, "weight of the score term in reinforce")


@dataclass(frozen=True)
class Recurrence(LayoutAware):
    """How many loop steps a training step of a prelude-core-coda model (Huginn) runs."""

    sampling: Sampling = option("lognormal-poisson", "distribution of steps")
    mean: float = option(5.0, "mean number of steps before cutting to 1..R")
    sigma: float = option(0.5, "spread of the log-normal part")
    least: int = option(1, "fewest steps a loss is taken after; smaller numbers that are drawn become this one")
    backprop: int = option(0, "steps that get gradients, counted from the last; 0 means all")
    shallow_weight: float = option(0.0, "weight of a second loss, at a smaller number of steps of the same forward")
    kv: str = option("shared", "KV layout the model learns to live with; tokens leave in the later half of the steps")
    kv_share: float = option(0.0, "share of steps trained under that layout")
    kv_from: float = option(0.5, "part of the run after which those steps begin")


@dataclass(frozen=True)
class Optim:
    """AdamW and its schedule."""

    lr: float = option(1.5e-3, "peak learning rate")
    min_lr: float = option(0.1, "share of the peak that the cosine ends at")
    warmup: float = option(0.05, "share of the run spent warming up")
    decay_from: float = option(0.0, "share of the run after which the rate falls; it is held at its peak until then")
    weight_decay: float = option(0.1, "decay of matrices; norms, biases and the gate have none")
    clip: float = option(1.0, "largest gradient norm")
    rows: int = option(44, "windows in a micro-batch, over all devices together")
    accumulate: int = option(1, "micro-batches in an optimiser step")
    tokens: int = option(400_000_000, "tokens after which the schedule ends")
    total_seconds: float | None = option(
        None, "training time, summed over resumed runs, after which the schedule ends if the tokens do not end it first"
    )


@dataclass(frozen=True)
class Data:
    """The packed windows to train on."""

    folder: Path | None = option(None, "folder of prepared windows; made there first when it holds none")
    source: tuple[str, ...] = option(
        (EMBEDDED,),
        "`embedded` generates problems; else files, folders or hub data sets, owner/name[:configuration][:split]",
    )
    tokenizer: str = option(EMBEDDED, "tokenizer of texts: a folder, a hub name, or the one shipped")
    column: str = option("text", "column of the rows that holds the text")
    tokens: int = option(300_000_000, "tokens to generate, or to take from the texts at most")
    held_out: int = option(1_000_000, "tokens of the texts' beginning that are scored on and never trained on")
    window: int = option(1536, "tokens a window predicts")
    workers: int = option(0, "processes that generate; 0 means one per core")
    gsm8k: Path | None = option(None, "GSM8K training questions as JSONL (question, answer); left out when not given")
    text: tuple[str, ...] = option(
        ("repository",), "plain-text files beside the generated problems; `repository` is the README, docs and sources"
    )
    seed: int = option(0, "seed of the generator")
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True)
class Options:
    """Pretrain a looped language model."""

    output: Path | None = option(None, "folder for checkpoints, log and the exported model")
    name: str = option("model", "name of the exported folder")
    model: Shape = Shape()
    init: Init = Init()
    objective: Objective = Objective()
    recurrence: Recurrence = Recurrence()
    optim: Optim = Optim()
    data: Data = Data()
    seed: int = option(0, "seed of weights, data order and sampled depths")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to train")
    devices: int = option(1, "devices of each node; on a CPU, processes")
    nodes: int = option(1, "nodes; each starts the same command, or torchrun starts them")
    strategy: Literal["auto", "ddp", "fsdp"] = option(
        "auto", "several devices: whole copies (ddp, which auto takes), or weights and optimiser in parts (fsdp, FSDP2)"
    )
    precision: Literal["auto", "bf16-mixed", "32-true"] = option("auto", "bf16-mixed on a GPU, 32-true on a CPU")
    deterministic: bool = option(False, "the same bits in every run on a GPU, at some cost in speed")
    compile: bool | None = option(None, "compile the blocks; on a GPU only when left out")
    max_seconds: float | None = option(None, "stop cleanly, with a checkpoint, after this much time of this process")
    max_steps: int | None = option(None, "stop cleanly after this many optimiser steps in all")
    finish: bool = option(False, "end the schedule within --max-seconds")
    reserve: float = option(45.0, "seconds of --max-seconds kept for evaluation and export")
    checkpoint_seconds: float = option(120.0, "time between checkpoints")
    checkpoint_steps: int | None = option(None, "steps between checkpoints, instead of a time")
    keep: int = option(2, "newest checkpoints kept, beside the best")
    check_rows: int = option(16, "held-out windows whose loss at full depth ranks checkpoints; 0 keeps no best one")
    log_every: int = option(50, "steps between progress lines")
    logger: Literal["tensorboard", "wandb"] = option(
        "tensorboard", "where curves go: TensorBoard always, and Weights & Biases if named"
    )
    eval_rows: int = option(64, "held-out windows scored at the end; 0 turns it off")
    accuracy_problems: int = option(0, "evaluation problems answered greedily at the end, per depth and setting")
    resume: bool = option(False, "go on from the newest checkpoint in the output folder")
    overwrite: bool = option(False, "replace the run in the output folder")
    dry_run: bool = option(False, "print size, cost and memory of the run, check data and output folder, train nothing")
    mfu: float = option(0.3, "share of the device's peak that --dry-run reckons with")


_COUNTS = (
    *("model.width", "model.ffn", "model.heads", "model.loops", "optim.rows", "optim.accumulate", "optim.tokens"),
    *("data.tokens", "data.held_out", "data.window", "log_every", "max_steps", "model.vocab", "devices", "nodes"),
    *(
        "recurrence.least",
        "checkpoint_steps",
        "keep",
        "objective.trajectories",
        "objective.kv_passes",
        "recurrence.kv_passes",
    ),
)
_NOT_NEGATIVE = (
    *("data.workers", "recurrence.backprop", "eval_rows", "accuracy_problems", "optim.lr", "optim.weight_decay"),
    *("optim.clip", "objective.beta", "objective.question_weight", "recurrence.question_weight", "reserve"),
    *("objective.number_weight", "recurrence.number_weight", "data.mix.words", "data.mix.drills", "data.mix.gsm8k"),
    *("data.mix.text", "data.mix.long"),
    *("recurrence.mean", "recurrence.sigma", "recurrence.shallow_weight", "checkpoint_seconds", "max_seconds"),
    *("init.embed_std", "init.linear_std", "init.head_std", "optim.total_seconds", "check_rows"),
    *("objective.depth_cost", "objective.depth_budget", "objective.budget_cost", "objective.prior_rate"),
    *("objective.mean", "objective.sigma", "objective.backprop", "objective.ragged_weight", "objective.score_weight"),
)
_SHARES = (
    *("optim.min_lr", "optim.warmup", "optim.decay_from", "mfu", "objective.floor", "objective.ragged_from"),
    *("recurrence.kv_share", "recurrence.kv_from", "objective.kv_share", "objective.commit_threshold"),
    *("objective.kv_prompt", "recurrence.kv_prompt"),
)


def check(options: Options) -> None:
    """Refuse numbers out of their range and a model that cannot be built, before a folder is touched."""
    for names, low, high in ((_COUNTS, 1, math.inf), (_NOT_NEGATIVE, 0, math.inf), (_SHARES, 0, 1)):
        for name in names:
            value = attrgetter(name)(options)
            if value is not None and not (low <= value <= high and value < math.inf):
                wanted = f"between {low} and {high}" if high < math.inf else f"at least {low}"
                raise LoopedError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")
    if not 0 <= options.seed < 1 << 31:
        raise LoopedError(f"--seed must be between 0 and {(1 << 31) - 1}, got {options.seed}")
    if Path(options.name).name != options.name or options.name in ("", ".", ".."):
        raise LoopedError(f"--name is the name of a folder inside the output folder, got {options.name!r}")
    model_config(options.model, 1, 1, None, None)
    world = options.devices * options.nodes
    if options.optim.rows % world:
        raise LoopedError(
            f"optim.rows {options.optim.rows} (windows in a micro-batch) cannot be dealt to {world} devices evenly"
        )
    _check_objectives(options)
    if options.strategy != "auto" and world == 1:
        raise LoopedError(f"--strategy {options.strategy} needs several devices: give --devices or --nodes")
    if EMBEDDED in options.data.source and (len(options.data.source) > 1 or options.data.tokenizer != EMBEDDED):
        raise LoopedError("data.source embedded stands alone, and goes with the tokenizer embedded")
    if not options.data.source:
        raise LoopedError("data.source is empty: give embedded, files, folders or hub data sets")


def _check_objectives(options: Options) -> None:
    """Refuse a prior, a rise of beta or a KV layout that there is not."""
    objective = options.objective
    rate, (begin, end) = objective.prior_rate, objective.beta_ramp
    if rate is not None and not (0 < rate < 1 if objective.prior == "geometric" else rate > 0):
        wanted = "between 0 and 1" if objective.prior == "geometric" else "above 0"
        raise LoopedError(f"--objective.prior-rate of a {objective.prior} prior must be {wanted}, got {rate}")
    if not 0 <= begin < end <= 1:
        raise LoopedError(f"--objective.beta-ramp must be two rising parts of the run within 0..1, got {begin},{end}")
    if objective.depth_budget is not None and objective.depth_budget < 1:
        raise LoopedError(f"--objective.depth-budget must be at least 1 loop, got {objective.depth_budget}")
    for layout in (objective.kv, options.recurrence.kv):
        get_layout(layout)


def model_config(
    shape: Shape, vocab_size: int, max_positions: int, eos_id: int | None, pad_id: int | None
) -> ModelConfig:
    """The configuration of a model of this shape."""
    if shape.width % shape.heads:
        raise LoopedError(f"model.width {shape.width} is not a multiple of model.heads {shape.heads}")
    if shape.vocab is not None and shape.vocab < vocab_size:
        raise LoopedError(f"model.vocab {shape.vocab} is less than the tokenizer's {vocab_size} tokens")
    ouro = shape.family == "ouro"
    prelude, core, coda = shape.layers
    if ouro and prelude + coda:
        raise LoopedError(f"model.layers {prelude},{core},{coda}: Ouro has all its layers in the core, such as 0,5,0")
    return ModelConfig(
        family=shape.family,
        vocab_size=shape.vocab or vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_heads=shape.heads,
        num_kv_heads=shape.heads,
        head_dim=shape.width // shape.heads,
        num_prelude_layers=prelude,
        num_core_layers=core,
        num_coda_layers=coda,
        max_loops=shape.loops,
        trained_loops=shape.loops,
        max_positions=max_positions,
        rope_theta=shape.rope_theta,
        loop_norm=ouro and shape.loop_norm,
        injection=not ouro,
        norm_after_sum=not ouro,
        rope_interleaved=not ouro,
        qk_bias=not ouro,
        exit_gate=ouro,
        tie_embeddings=not ouro,
        embed_scale=1.0 if ouro else float(shape.width) ** 0.5,
        eos_ids=() if eos_id is None else (eos_id,),
        pad_id=pad_id,
        exit_threshold=0.5 if ouro else 0.03,
        default_layout="ragged" if ouro else "shared",
    )
