"""`looped train`: pretrain a looped language model from a recipe, resumably, within a time budget."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from looped.errors import LoopedError
from looped.files import check_folder, read_object, write_text
from looped.train.recipe import Options, check, model_config

__all__ = ["Options", "run"]

SUMMARY = "summary.json"
_FIXED = ("model", "init", "objective", "recurrence", "data", "seed")
"""Parts of a recipe that a resumed run must share with the run it continues; data is compared without its place."""


def run(options: Options) -> int:
    """Train, evaluate, export; the last line of output is the summary as JSON. Raises LoopedError."""
    begun = time.monotonic()
    check_run(options)
    from looped.progress import last_json
    from looped.train.windows import open_corpus

    corpus = open_corpus(options.data, options.seed, resolve_device(options), as_found=options.resume)
    last_json(train(options, prepare_folder(options), corpus, begun))
    return 0


def check_run(options: Options) -> Path:
    """The output folder, untouched. Raises LoopedError for numbers out of range and a folder that cannot take the run,
    such as one that holds a run and nobody said what to do.
    """
    check(options)
    if options.output is None:
        raise LoopedError("output is missing: give a folder for the run with --output")
    if options.finish and options.max_seconds is None:
        raise LoopedError("--finish ends the schedule within --max-seconds, which is missing")
    folder = options.output
    plan = folder / "recipe.json"
    if options.resume:
        if not (folder / "checkpoint.ckpt").is_file():
            raise LoopedError(f"{folder} holds no checkpoint to resume; leave --resume out to start a run there")
        _check_same(read_object(plan), _plain(options))
        return folder
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        if not options.overwrite:
            raise LoopedError(f"{folder} already holds a run; continue it with --resume or replace it with --overwrite")
        if not plan.is_file():
            raise LoopedError(f"{folder} is not empty and holds no run of this program; give another folder")
    return folder


def prepare_folder(options: Options) -> Path:
    """The output folder of a new or resumed run, with its recipe; a run that is replaced goes away. Raises as above."""
    folder = check_run(options)
    if not options.resume:
        if folder.is_dir() and any(folder.iterdir()):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "recipe.json", json.dumps(_plain(options), indent=2) + "\n")
    return folder


def _plain(options: Options) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return plain


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = []
    for part in _FIXED:
        left, right = old.get(part), new[part]
        if isinstance(right, dict):
            skip = ("folder", "workers", "gsm8k") if part == "data" else ()
            changed += [f"{part}.{key}" for key in right if key not in skip and (left or {}).get(key) != right[key]]
        elif left != right:
            changed.append(part)
    if changed:
        raise LoopedError(f"the run to resume was begun with other values of {', '.join(changed)}; use its recipe")


def resolve_device(options: Options) -> Any:
    from looped.model.loading import parse_device

    return parse_device(None if options.device == "auto" else options.device)


def train(options: Options, folder: Path, corpus: Any, begun: float) -> dict[str, Any]:
    """One process's part of a run: to the end of the schedule, the time limit, or a signal; then scores and export."""
    import lightning
    import torch

    from looped.train.build import compile_blocks, new_model
    from looped.train.module import Pretraining
    from looped.train.schedule import Clock
    from looped.train.watch import CHECKPOINT, Stop, Watch

    _quiet()
    device = resolve_device(options)
    torch.set_float32_matmul_precision("high")
    optim = options.optim
    if corpus.train.length != options.data.window:
        options = replace(options, data=replace(options.data, window=corpus.train.length))
    config = model_config(options.model, corpus.vocab_size, corpus.train.length, corpus.eos_id, corpus.pad_id)
    model = new_model(config, options.init, options.seed)
    compiled = options.compile if options.compile is not None else device.type == "cuda"
    if compiled:
        compile_blocks(model)
    tokens_per_step = optim.rows * optim.accumulate * corpus.train.length
    clock = Clock(max(1, round(optim.tokens / tokens_per_step)), optim.total_seconds)
    module = Pretraining(model, new_loss(options, config.max_loops, compiled), corpus.train, options, clock)
    stop = Stop()
    watch = Watch(options, folder, config, stop, begun)
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision=_precision(options, device.type),
        max_epochs=1,
        max_steps=-1,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    _announce(options, model, corpus, device, clock)
    resumed = str(folder / CHECKPOINT) if options.resume else None
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, ckpt_path=resumed)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    return finish(options, folder, corpus, module, watch, device, begun)


def finish(
    options: Options, folder: Path, corpus: Any, module: Any, watch: Any, device: Any, begun: float
) -> dict[str, Any]:
    """Export the model, score it, and write the summary."""
    import torch

    from looped.model import save
    from looped.model.loading import copy_tokenizer
    from looped.train.scores import accuracies

    model, clock = module.model.eval().to(device), module.clock
    out = folder / options.name
    save(model, out, dtype="bfloat16")
    copy_tokenizer(corpus.tokenizer, out)
    summary: dict[str, Any] = {
        "output": str(folder),
        "model": str(out),
        "stopped": watch.stop.reason,
        "steps": clock.steps,
        "progress": clock.progress,
        "tokens": clock.steps * options.optim.rows * options.optim.accumulate * corpus.train.length,
        "seconds": round(clock.seconds, 1),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "last": {name: round(value, 5) for name, value in watch.last.items()},
    }
    if options.eval_rows and watch.stop.reason not in ("SIGTERM", "SIGINT"):
        from looped.train.evaluate import evaluate

        autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        with autocast, torch.compiler.set_stance("force_eager"):
            scores = evaluate(model, corpus.held_out, options.eval_rows)
            summary["scores"] = {**scores._asdict(), "exits": [score._asdict() for score in scores.exits]}
            if options.accuracy_problems:
                summary["accuracy"] = accuracies(model, corpus.tokenizer, options.accuracy_problems)
    summary["wall_seconds"] = round(time.monotonic() - begun, 1)
    write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary


def new_loss(options: Options, num_loops: int, compiled: bool) -> Any:
    """The training loss of the recipe's family."""
    import torch

    from looped.train.losses import head_loss, logits_loss
    from looped.train.objective import HuginnLoss, OuroLoss

    if options.model.family == "ouro":
        return OuroLoss(options.objective, num_loops, torch.compile(head_loss) if compiled else head_loss)
    return HuginnLoss(options.recurrence, num_loops, torch.compile(logits_loss) if compiled else logits_loss)


def _precision(options: Options, device: str) -> Any:
    if options.precision != "auto":
        return options.precision
    return "bf16-mixed" if device == "cuda" else "32-true"


def _quiet() -> None:
    """Lightning's advice is for other set-ups: the loader yields tickets, there is no validation loop."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (".*does not have many workers.*", ".*`IterableDataset` has `__len__`.*", ".*mid-epoch.*"):
        warnings.filterwarnings("ignore", text)


def _announce(options: Options, model: Any, corpus: Any, device: Any, clock: Any) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = options.optim.rows * options.optim.accumulate * corpus.train.length
    limit = "" if clock.total_seconds is None else f" or {clock.total_seconds:.0f} s"
    print(
        f"{options.model.family} {count / 1e6:.2f}M parameters on {device}; {len(corpus.train)} windows of "
        f"{corpus.train.length} tokens; {tokens} tokens a step, schedule of {clock.total_steps} steps{limit}",
        file=sys.stderr,
        flush=True,
    )
