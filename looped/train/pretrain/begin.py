"""The model that a run begins with: random, a checkpoint's, or the run's own newest one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from looped.config import ModelConfig
from looped.data.embedded import EMBEDDED
from looped.errors import LoopedError
from looped.kv import get_layout
from looped.model import LoopedLM, load
from looped.model.loading import find_checkpoint
from looped.train.pretrain import checkpoint
from looped.train.pretrain.build import new_model
from looped.train.pretrain.corpus import Corpus
from looped.train.pretrain.recipe import Data, Options, model_config


class Start(NamedTuple):
    """The model, and the state of the clock where the run goes on."""

    model: LoopedLM
    clock: dict[str, float] | None


def data_of(options: Options) -> Data:
    """The data of a recipe; texts for a checkpoint come in its tokenizer unless the recipe names another.

    Raises LoopedError where generated problems, which come in the shipped tokenizer, would mean nothing to it.
    """
    data = options.data
    if options.init.checkpoint is None:
        return data
    folder = find_checkpoint(options.init.checkpoint)
    if data.source != (EMBEDDED,):
        return replace(data, tokenizer=str(folder)) if data.tokenizer == EMBEDDED else data
    from looped.data.tokenizer import folder as shipped

    theirs = folder / "tokenizer.json"
    if not theirs.is_file() or theirs.read_bytes() != (shipped() / "tokenizer.json").read_bytes():
        raise LoopedError(
            f"the generated problems come in the shipped tokenizer, and {options.init.checkpoint} has another: "
            "give texts with --data.source"
        )
    return data


def begin(options: Options, corpus: Corpus, run: Path) -> Start:
    """The trainable model on the CPU, in float32. Raises LoopedError where it cannot take the corpus."""
    clock = None
    if options.resume:
        newest = checkpoint.find(run)[-1].folder
        model = load(newest, device="cpu", dtype="float32")
        clock = json.loads((newest / checkpoint.STATE).read_text(encoding="utf-8"))["clock"]
    elif options.init.checkpoint is not None:
        model = load(options.init.checkpoint, device="cpu", dtype="float32")
        check_fit(options, corpus, model)
    else:
        config = model_config(options.model, corpus.vocab_size, corpus.train.length, corpus.eos_id, corpus.pad_id)
        model = new_model(config, options.init, options.seed)
    model.config = replace(model.config, default_layout=served_layout(options, model.config))
    return Start(model.requires_grad_(True).train(), clock)


def served_layout(options: Options, config: ModelConfig) -> str:
    """The KV layout that a run teaches its model to live with, which is then its default; else the one it has."""
    objective, recurrence = options.objective, options.recurrence
    taught, name = objective.ragged_from < 1 and objective.kv_share > 0, objective.kv
    if config.injection:
        taught, name = recurrence.kv_from < 1 and recurrence.kv_share > 0, recurrence.kv
    return name if taught and not get_layout(name).needs_dense else config.default_layout


def check_fit(options: Options, corpus: Corpus, model: LoopedLM) -> None:
    """Raise LoopedError where a checkpoint's model cannot read the windows of a corpus."""
    config, name = model.config, options.init.checkpoint
    if corpus.vocab_size > config.vocab_size:
        raise LoopedError(f"the data has {corpus.vocab_size} tokens, {name} knows {config.vocab_size}")
    if corpus.train.length > config.max_positions:
        raise LoopedError(f"windows of {corpus.train.length} tokens exceed the {config.max_positions} of {name}")
