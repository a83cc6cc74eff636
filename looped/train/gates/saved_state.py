"""The state of a long distillation: kept every few minutes, loaded again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import callbacks
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from looped.errors import LoopedError
from looped.files import whole
from looped.train.gates.feed import Feed, Place
from looped.train.gates.teaching import Features

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NotFiniteError(LoopedError):
    """The loss is NaN or infinite; nothing was changed by it."""


class Unfinished(NamedTuple):
    """Where a run that makes its features on the fly keeps its state, how often, and whether to go on from there."""

    path: Path
    seconds: float
    resume: bool


class Keeper(callbacks.Callback):
    """Keeps heads, optimiser and step of a long run every few minutes, and loads them again.

    The module has `first_step`, which a resumed run begins at.
    """

    def __init__(self, module: Any, unfinished: Unfinished) -> None:
        self.module, self.unfinished = module, unfinished
        self.saved, self.positions, self.done = time.monotonic(), 0, 0
        self.loaded: dict[str, Tensor] = {}
        self.feed: Feed | None = None
        self.place: Place | None = None

    def load(self) -> Place:
        """Heads and step now, the optimiser's state once there is an optimiser; the place in the documents."""
        try:
            self.loaded = load_file(self.unfinished.path)
            with safe_open(self.unfinished.path, "pt") as file:
                place: Place = json.loads(file.metadata()["place"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise LoopedError(f"{self.unfinished.path} is damaged ({error}); start again with --overwrite") from error
        state = {name.removeprefix("module."): x for name, x in self.loaded.items() if name.startswith("module.")}
        self.module.load_state_dict(state)
        self.module.first_step = self.done = int(self.loaded["step"])
        self.positions = int(self.loaded["positions"])
        self.place = place
        return place

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, parameter in self.module.named_parameters():
            moments = {key: self.loaded[f"{key}.{name}"] for key in _MOMENTS if self.loaded}
            if moments:
                state = {key: x.to(parameter.device) for key, x in moments.items()}
                trainer.optimizers[0].state[parameter] = state | {"step": self.loaded["step"].float()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Features, batch_idx: int) -> None:
        self.positions += batch.num
        self.done = self.module.first_step + batch_idx + 1
        if self.feed is not None:
            self.place = self.feed.place(batch.batch)
        if time.monotonic() - self.saved >= self.unfinished.seconds:
            self.save(trainer)
            self.saved = time.monotonic()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """A loss that is not finite ends the run before it changed anything, so the state is worth keeping."""
        if isinstance(exception, NotFiniteError) and self.done > self.module.first_step:
            self.save(trainer)

    def save(self, trainer: Any) -> None:
        """Write the state after the last whole step; the file appears whole or not at all."""
        tensors = {f"module.{name}": x for name, x in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            state = trainer.optimizers[0].state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS}
        tensors |= {"step": torch.tensor(self.done), "positions": torch.tensor(self.positions)}
        metadata = {"place": json.dumps(self.place)}
        try:
            with whole(self.unfinished.path) as partial:
                save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, partial, metadata)
        except (OSError, SafetensorError) as error:
            kept = "; the state saved before is whole: go on with --resume" if self.unfinished.path.exists() else ""
            why = getattr(error, "strerror", None) or error
            raise LoopedError(f"cannot write {self.unfinished.path} at step {self.done}: {why}{kept}") from error
