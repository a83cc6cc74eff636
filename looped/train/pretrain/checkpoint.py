"""Checkpoints of a run: `step-N/`, a model folder that everything here loads, with the trainer's state beside it.

    config.json model.safetensors tokenizer...   the model, weights in float32 as they are trained
    trainer.safetensors                          moments of the optimiser by parameter name, state of random generators
    trainer.json                                 clock, position in the data, score

A folder appears whole or not at all. Nothing in it depends on the number of devices.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from looped.errors import LoopedError
from looped.files import read_object
from looped.model import LoopedLM, save
from looped.model.loading import copy_tokenizer
from looped.train.pretrain.strategy import gathered, spread

STATE, TENSORS = "trainer.json", "trainer.safetensors"
_NAME = re.compile(r"step-(\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MOMENT = "optimizer/"


class Saved(NamedTuple):
    """A checkpoint folder on disk: its step, and its held-out loss (None where it was not measured)."""

    step: int
    folder: Path
    score: float | None


def find(run: Path) -> list[Saved]:
    """The checkpoints in a run's folder, oldest first."""
    found = []
    for folder in run.glob("step-*") if run.is_dir() else ():
        match = _NAME.fullmatch(folder.name)
        if match and (folder / STATE).is_file():
            found.append(Saved(int(match[1]), folder, read_object(folder / STATE).get("score")))
    return sorted(found)


def optimizer_tensors(model: LoopedLM, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments on the CPU, whole, under the names of their parameters; a call for all processes."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_MOMENT}{name}/{kind}"] = gathered(value).detach().to("cpu", copy=True).contiguous()
    return tensors


def random_tensors() -> dict[str, Tensor]:
    """The states of torch's generators. What training draws comes from generators of its own, made from the step."""
    tensors = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    return tensors


def write(run: Path, model: LoopedLM, tokenizer: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> Saved:
    """Write the checkpoint of `state["step"]`; one that is there already is the same and stays.

    Raises LoopedError, with everything saved before untouched, where the disk is full.
    """
    step, score = int(state["step"]), state.get("score")
    folder = run / f"step-{step}"
    if (folder / STATE).is_file():
        return Saved(step, folder, score)
    partial = run / f"step-{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with full_disk(run, f"the checkpoint of step {step} could not be saved"):
            save(model, partial)
            copy_tokenizer(tokenizer, partial)
            save_file(tensors, partial / TENSORS)
            (partial / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # without its state it was none
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Saved(step, folder, score)


@contextmanager
def full_disk(run: Path, what: str) -> Iterator[None]:
    """Turn a refusal for want of room into a sentence that says what was lost, `what`, and what is left."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number not in _FULL and not any(os.strerror(code) in str(error) for code in _FULL):
            raise
        kept = find(run)
        left = (
            f"{kept[-1].folder} is whole: make room and continue it with --resume" if kept else "nothing was saved yet"
        )
        raise LoopedError(f"the disk of {run} is full, so {what}; {left}") from error


def prune(run: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the one with the least score."""
    found = find(run)
    scored = [saved for saved in found if saved.score is not None]
    best = min(scored, key=lambda saved: (saved.score, saved.step)) if scored else None
    for saved in found[:-keep]:
        if saved != best:
            shutil.rmtree(saved.folder, ignore_errors=True)


def load_optimizer(folder: Path, model: LoopedLM, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimiser, whose parameters are in place on their devices, the moments of a checkpoint."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    names = {name: parameter for name, parameter in model.named_parameters() if parameter in groups}
    optimizer.state.clear()
    try:
        with safe_open(folder / TENSORS, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118  (not a dict: iterating the handle is not allowed)
                if key.startswith(_MOMENT):
                    name, _, kind = key.removeprefix(_MOMENT).rpartition("/")
                    parameter = names[name]
                    value = file.get_tensor(key)
                    if kind != "step":
                        value = spread(value, parameter)
                    elif groups[parameter].get("fused"):
                        value = value.to(parameter.device)  # a fused optimiser counts where it computes
                    optimizer.state[parameter][kind] = value
                elif key == "random/cpu":
                    torch.set_rng_state(file.get_tensor(key))
                elif key == "random/cuda" and torch.cuda.is_available():
                    torch.cuda.set_rng_state(file.get_tensor(key))
    except (SafetensorError, OSError, KeyError) as error:
        raise LoopedError(f"{folder / TENSORS} is damaged or of another model ({error})") from error
