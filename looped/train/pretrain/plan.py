"""What a run will cost, before it begins: parameters, FLOPs, memory, time; and whether its data can be read."""

# B rows, T tokens, D width, F intermediate width, V vocabulary, R loop steps

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from looped.config import ModelConfig
from looped.data.embedded import EMBEDDED
from looped.data.rows import find_files
from looped.data.sources import read_texts
from looped.data.texts import find_words
from looped.errors import LoopedError
from looped.files import check_folder, existing
from looped.model import LoopedLM
from looped.model.loading import find_checkpoint, read_config
from looped.train.peak import peak_flops
from looped.train.pretrain.begin import data_of
from looped.train.pretrain.build import flops_per_token
from looped.train.pretrain.cost import step_kinds
from looped.train.pretrain.losses import CHUNK_TOKENS
from looped.train.pretrain.recipe import Options, model_config

HOPPER = 989e12
"""Dense bf16 peak that times are reckoned with where there is no GPU."""


class Memory(NamedTuple):
    """Bytes on each device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return sum(self)


class Plan(NamedTuple):
    """A run in numbers. Seconds are at `mfu` of `peak_flops` on every device; bytes are for each device."""

    parameters: int
    tokens: int
    tokens_per_step: int
    steps: int
    flops_per_token: float
    flops: float
    devices: int
    peak_flops: float
    peak_source: str
    mfu: float
    seconds: float
    memory: Memory
    checkpoint_bytes: int
    notes: tuple[str, ...]


def make_plan(options: Options, device: torch.device) -> Plan:
    """The plan of a recipe. Raises LoopedError where its data or tokenizer cannot be what it says."""
    vocab, notes = check_data(options)
    config = model_config(options.model, vocab, options.data.window, None, None)
    if options.init.checkpoint is not None:
        config = _checkpoint_config(options.init.checkpoint, notes) or config
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in LoopedLM(config).parameters())
    optim, world = options.optim, options.devices * options.nodes
    per_step = optim.rows * optim.accumulate * options.data.window
    loops, heads = mean_work(options, config)
    each = flops_per_token(config, options.data.window, loops, heads)
    if device.type == "cuda":
        peak, source = peak_flops(device)
    else:
        peak, source = HOPPER, "peak of H100 and H200"
    checkpoint = 12 * parameters
    if options.output is not None:
        notes += _disk(options, (options.keep + 2) * checkpoint + 2 * parameters)
    return Plan(
        parameters=parameters,
        tokens=optim.tokens,
        tokens_per_step=per_step,
        steps=max(1, round(optim.tokens / per_step)),
        flops_per_token=each,
        flops=each * optim.tokens,
        devices=world,
        peak_flops=peak,
        peak_source=source,
        mfu=options.mfu,
        seconds=each * optim.tokens / (world * peak * max(options.mfu, 1e-9)),
        memory=estimate_memory(options, config, parameters),
        checkpoint_bytes=checkpoint,
        notes=tuple(notes),
    )


def _checkpoint_config(name: str, notes: list[str]) -> ModelConfig | None:
    """The shape of the checkpoint that a run begins with; a remark, and None, where it is out of reach."""
    try:
        return read_config(find_checkpoint(name))[0]
    except LoopedError as error:
        if Path(name).exists():
            raise
        notes.append(f"checkpoint not checked: {error}")
        return None


def mean_work(options: Options, config: ModelConfig) -> tuple[float, float]:
    """Loop steps of a mean training step, and how often it reads the head."""
    kinds = step_kinds(options, config)
    return sum(kind.share * kind.loops for kind in kinds), sum(kind.share * kind.heads for kind in kinds)


def estimate_memory(options: Options, config: ModelConfig, parameters: int) -> Memory:
    """Bytes of one device: what FSDP2 deals out is counted once for all, what every device gathers is counted whole.

    A compiled layer keeps for the backward pass, for each token, two residual sums in float32 and, in half precision,
    the inputs of its matrices and norms, queries, keys, values and attention's output: 24 D + 6 F bytes (twice that in
    float32, 2.5 times where it is not compiled); and its weights in half precision at each use. The head keeps the
    logits of one chunk, in half and in full precision.
    """
    world = options.devices * options.nodes
    sharded = options.strategy == "fsdp"
    rows = options.optim.rows // world
    tokens = rows * options.data.window
    wide = (2 if options.precision == "32-true" else 1) * (2.5 if options.compile is False else 1)
    layer = (24 * config.hidden_size + 6 * config.intermediate_size) * wide
    boundary = config.num_prelude_layers + config.num_coda_layers
    loops = max(kind.held for kind in step_kinds(options, config))
    calls = boundary + loops * config.num_core_layers
    return Memory(
        weights=4.0 * parameters * (1 + 1 / world if sharded else 1),
        gradients=4.0 * parameters * (1 + 1 / world if sharded else 1),
        optimizer=8.0 * parameters / (world if sharded else 1),
        activations=calls * (layer * tokens + 2.0 * config.layer_params),
        head=10.0 * min(tokens, CHUNK_TOKENS) * config.vocab_size,
    )


def check_data(options: Options) -> tuple[int, list[str]]:
    """The tokenizer's vocabulary, and remarks on the data. Raises LoopedError where local files are not what they
    should be; what only the hub can tell is a remark.
    """
    data, notes = options.data, list[str]()
    try:
        data = data_of(options)
        vocab = find_words(data.tokenizer).vocab_size
    except LoopedError as error:
        remote = data.tokenizer if options.init.checkpoint is None else options.init.checkpoint
        if (options.model.vocab is None and options.init.checkpoint is None) or Path(remote).exists():
            raise
        vocab = 1
        notes.append(f"tokenizer not checked: {error}")
    for source in data.source:
        if source == EMBEDDED:
            notes.append("data: generated on this machine when the run starts")
            continue
        files = find_files(source)
        try:
            if files is None:
                _ask_hub(source)
            first = next(itertools.islice(read_texts(source, data.column), 1), None)
        except LoopedError as error:
            if files is not None:
                raise
            notes.append(f"data not checked: {error}")
            continue
        if first is None:
            raise LoopedError(f"{source} holds no document; give another data.source")
        size = "" if files is None else f", {sum(path.stat().st_size for path in files) / 1e9:.2f} GB"
        notes.append(f"data: {source} can be read{size}; it begins {first[:40]!r}")
    if data.folder is None:
        notes.append("data.folder is missing: the run will need it")
    else:
        check_folder(data.folder)
    return vocab, notes


def _ask_hub(name: str) -> None:
    """Raise LoopedError where the hub does not know a data set or cannot be reached, without many attempts."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name.split(":")[0], timeout=10)
    except Exception as error:  # the hub's many exception types mean one thing here
        raise LoopedError(f"the hub does not give {name} from here ({type(error).__name__})") from error


def _disk(options: Options, needed: int) -> list[str]:
    """A remark where the output's disk has no room for the checkpoints."""
    assert options.output is not None
    free = shutil.disk_usage(existing(options.output)).free
    if free >= needed:
        return [f"output: {options.output} can be written, {free / 1e9:.0f} GB free of {needed / 1e9:.1f} GB needed"]
    return [f"output: {options.output} has {free / 1e9:.1f} GB free, checkpoints need {needed / 1e9:.1f} GB"]


def lines(plan: Plan) -> list[str]:
    """The plan for people."""
    memory = plan.memory
    parts = [("weights", memory.weights), ("gradients", memory.gradients), ("optimiser", memory.optimizer)]
    parts += [("activations", memory.activations), ("head", memory.head)]
    return [
        f"parameters     {plan.parameters / 1e6:.2f}M",
        f"tokens         {plan.tokens / 1e9:.3f}B in {plan.steps} steps of {plan.tokens_per_step}",
        f"FLOPs          {plan.flops_per_token / 1e9:.3f} G a token, {plan.flops:.2e} in all",
        f"time           {_duration(plan.seconds)} on {plan.devices} device{'s' * (plan.devices > 1)} at "
        f"{plan.mfu:.0%} of {plan.peak_flops / 1e12:.0f} TFLOP/s ({plan.peak_source})",
        f"memory         about {memory.total / 2**30:.1f} GiB a device: "
        + ", ".join(f"{name} {value / 2**30:.1f}" for name, value in parts),
        f"checkpoint     {plan.checkpoint_bytes / 1e9:.2f} GB",
        *plan.notes,
    ]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as the last line of output."""
    return {**plan._asdict(), "memory": {**plan.memory._asdict(), "total": plan.memory.total}}
