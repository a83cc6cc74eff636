"""`looped train`: pretrain a looped language model from a recipe, resumably, on one device or several."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from looped.config import ModelConfig
from looped.errors import LoopedError
from looped.files import write_text
from looped.train.pretrain.folder import SUMMARY, check_run, prepare_folder
from looped.train.pretrain.recipe import Options


def run(options: Options) -> int:
    """Train, evaluate, export; the last line of output is the summary as JSON. Raises LoopedError."""
    begun = time.monotonic()
    from looped.train.pretrain import ranks

    first = ranks.launched_rank() == 0
    if first:
        check_run(options)
    from looped.progress import last_json
    from looped.train.pretrain.begin import begin, data_of
    from looped.train.pretrain.corpus import open_corpus
    from looped.train.pretrain.loggers import check_logger

    check_logger(options.logger)
    device = resolve_device(options)
    if options.dry_run:
        return dry_run(options, device)
    corpus = open_corpus(data_of(options), options.seed, device, as_found=options.resume)
    assert options.output is not None
    start = begin(options, corpus, options.output)  # before a run that is replaced goes away
    summary = train(options, prepare_folder(options) if first else options.output, corpus, begun, start)
    if summary is not None:
        last_json(summary)
    return 0


def dry_run(options: Options, device: Any) -> int:
    """Print the plan of the run, for people and as JSON."""
    from looped.progress import last_json
    from looped.train.pretrain import plan

    made = plan.make_plan(options, device)
    print("\n".join(plan.lines(made)))
    last_json(plan.as_json(made))
    return 0


def resolve_device(options: Options) -> Any:
    """This process's device. Raises LoopedError where there are fewer than the recipe wants."""
    import torch

    from looped.model.loading import parse_device

    device = parse_device(None if options.device == "auto" else options.device)
    if device.type != "cuda" or options.dry_run:
        return device
    found = torch.cuda.device_count()
    if options.devices > found:
        raise LoopedError(f"--devices {options.devices}, but {found} GPUs are here")
    # the data's tensors go to the device on which this process will train
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))


def train(options: Options, folder: Path, corpus: Any, begun: float, start: Any = None) -> dict[str, Any] | None:
    """One process's part of a run: to the end of the schedule, the time limit, or a signal; then scores and export.

    It goes on from `start`, or from what `begin` makes of the recipe. The summary, from the first process; None from
    the others.
    """
    import torch
    import torch.distributed as dist

    from looped.train.pretrain import ranks
    from looped.train.pretrain.begin import begin
    from looped.train.pretrain.build import compile_blocks
    from looped.train.pretrain.module import Pretraining
    from looped.train.pretrain.schedule import Clock
    from looped.train.pretrain.watch import Stop, Watch

    device = resolve_device(options)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    if options.deterministic:
        _deterministic()
    optim = options.optim
    if corpus.train.length != options.data.window:
        options = replace(options, data=replace(options.data, window=corpus.train.length))
    model, saved_clock = start or begin(options, corpus, folder)
    tokens_per_step = optim.rows * optim.accumulate * corpus.train.length
    clock = Clock(max(1, round(optim.tokens / tokens_per_step)), optim.total_seconds)
    if saved_clock is not None:
        clock.load(saved_clock)
    compiled = options.compile if options.compile is not None else device.type == "cuda"
    if compiled:
        compile_blocks(model)
    module = Pretraining(model, new_loss(options, model.config, compiled), corpus.train, options, clock)
    watch = Watch(options, folder, corpus, Stop(), begun)
    if ranks.launched_rank() == 0:
        _announce(options, model, corpus, device, clock)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        new_trainer(options, device, folder, watch).fit(module)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    first = ranks.rank() == 0
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return finish(options, folder, corpus, watch, clock, device, begun) if first else None


def new_trainer(options: Options, device: Any, folder: Path, watch: Any) -> Any:
    """Lightning's trainer for these devices: it starts the processes, and this module's own callback does the rest."""
    from looped.train.pretrain.strategy import Replicated, Sharded
    from looped.train.trainer import bare_trainer

    strategy: Any = "auto"
    if options.devices * options.nodes > 1:
        kind = Sharded if options.strategy == "fsdp" else Replicated
        strategy = kind(process_group_backend="nccl" if device.type == "cuda" else "gloo")
    return bare_trainer(
        device,
        [watch],
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=strategy,
        precision=_precision(options, device.type),
        max_epochs=1,
        max_steps=-1,
        default_root_dir=folder,
    )


def finish(
    options: Options, folder: Path, corpus: Any, watch: Any, clock: Any, device: Any, begun: float
) -> dict[str, Any]:
    """Export the newest checkpoint's model, score it, and write the summary."""
    import torch

    from looped.model import load, save
    from looped.model.loading import copy_tokenizer
    from looped.train.pretrain.checkpoint import find, full_disk

    saved = find(folder)
    newest = saved[-1]
    model = load(newest.folder, device=device, dtype="float32")
    out = folder / options.name
    with full_disk(folder, f"the model could not be exported to {out}"):
        save(model, out, dtype="bfloat16")
        copy_tokenizer(corpus.tokenizer, out)
    scored = [entry for entry in saved if entry.score is not None]
    best = min(scored, key=lambda entry: (entry.score, entry.step)) if scored else None
    summary: dict[str, Any] = {
        "output": str(folder),
        "model": str(out),
        "checkpoint": str(newest.folder),
        "best": None if best is None else {"checkpoint": str(best.folder), "held_out_loss": best.score},
        "stopped": watch.stop.reason,
        "steps": clock.steps,
        "progress": clock.progress,
        "tokens": clock.steps * options.optim.rows * options.optim.accumulate * corpus.train.length,
        "seconds": round(clock.seconds, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "devices": options.devices * options.nodes,
        "last": {name: round(value, 5) for name, value in watch.last.items()},
    }
    if options.eval_rows and watch.stop.reason not in ("SIGTERM", "SIGINT"):
        from looped.train.pretrain.evaluate import evaluate
        from looped.train.pretrain.scores import accuracies

        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            scores = evaluate(model, corpus.held_out, options.eval_rows)
            summary["scores"] = {**scores._asdict(), "exits": [score._asdict() for score in scores.exits]}
            if options.accuracy_problems:
                summary["accuracy"] = accuracies(model, corpus.tokenizer, options.accuracy_problems)
    summary["wall_seconds"] = round(time.monotonic() - begun, 1)
    write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def new_loss(options: Options, config: ModelConfig, compiled: bool) -> Any:
    """The training loss of the model's family."""
    import torch

    from looped.train.pretrain.huginn_loss import HuginnLoss
    from looped.train.pretrain.losses import head_loss, logits_loss
    from looped.train.pretrain.ouro_loss import OuroLoss

    num_loops = config.max_loops
    if config.family == "ouro":
        return OuroLoss(options.objective, num_loops, torch.compile(head_loss) if compiled else head_loss)
    return HuginnLoss(options.recurrence, num_loops, torch.compile(logits_loss) if compiled else logits_loss)


def _precision(options: Options, device: str) -> Any:
    if options.precision != "auto":
        return options.precision
    return "bf16-mixed" if device == "cuda" else "32-true"


def _deterministic() -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the library is first used
    # what has no such version is a figure of the log at most; torch warns of it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def _announce(options: Options, model: Any, corpus: Any, device: Any, clock: Any) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = options.optim.rows * options.optim.accumulate * corpus.train.length
    limit = "" if clock.total_seconds is None else f" or {clock.total_seconds:.0f} s"
    devices = options.devices * options.nodes
    where = str(device) if devices == 1 else f"{devices} x {device.type} ({options.strategy})"
    print(
        f"{model.config.family} {count / 1e6:.2f}M parameters on {where}; {len(corpus.train)} windows of "
        f"{corpus.train.length} tokens; {tokens} tokens a step, schedule of {clock.total_steps} steps{limit}",
        file=sys.stderr,
        flush=True,
    )
