"""Training the heads of students, as a LightningModule over batches of features."""

# N positions

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch import callbacks
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from looped.errors import LoopedError
from looped.files import whole
from looped.gates.losses import distillation_loss
from looped.progress import progress
from looped.train.distill import LBFGS_AT_ONCE, Features, Teaching, collect
from looped.train.distill_data import Corpus
from looped.train.students import Student

_NOTE_EVERY = 20
_HIDDEN_STEPS, _HIDDEN_BATCH, _HIDDEN_DECAY = 600, 1024, 0.05
_CONVERGED = 1e-3


class Unfinished(NamedTuple):
    """Where a run that makes its features on the fly keeps its state, how often, and whether to go on from there."""

    path: Path
    seconds: float
    resume: bool


class Distillation(lightning.LightningModule):
    """All students at once; a Lightning batch is one optimiser step on a batch of features."""

    def __init__(self, teaching: Teaching) -> None:
        super().__init__()
        self.students, self.heads = teaching.students, nn.ModuleList(teaching.students)
        self.plan, self.steps, self.lbfgs = teaching.plan, teaching.steps, teaching.lbfgs
        self.first_step, self.num_positions = 0, teaching.plan.tokens
        self.parts = [part for student in self.students for part in student.parts]
        for part in self.parts:
            part.linear = teaching.lbfgs or not part.hidden

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        total = torch.zeros((), device=batch.hazards.device)
        for student, inputs in zip(self.students, batch.inputs, strict=True):
            total = total + distillation_loss(self.plan.loss, student(inputs), batch.hazards, student.min_depth)
            for part in student.parts:
                total = total + self.plan.ridge / self.num_positions * part.weight.square().sum()
        if not bool(torch.isfinite(total)):
            raise LoopedError(
                f"the loss is {float(total)} at step {self.first_step + batch_idx + 1}; try a smaller --lr than "
                f"{self.plan.lr:g}"
            )
        return total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.lbfgs:
            heads = [parameter for part in self.parts for parameter in (part.weight, part.bias)]
            return torch.optim.LBFGS(heads, max_iter=LBFGS_AT_ONCE, history_size=20, line_search_fn="strong_wolfe")
        heads = [parameter for name, parameter in self.named_parameters() if ".hidden." not in name]
        layers = [parameter for name, parameter in self.named_parameters() if ".hidden." in name]
        groups = [{"params": heads, "weight_decay": 0.0}, {"params": layers, "weight_decay": _HIDDEN_DECAY}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.plan.lr)

    def begin_hidden(self) -> bool:
        """Go over from fitted heads to AdamW on all parameters; False where no hidden layer is left."""
        todo = [part for part in self.parts if part.hidden and part.linear]
        for part in todo:
            part.linear = False
        self.lbfgs, self.steps = False, _HIDDEN_STEPS
        return bool(todo)

    def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
        """Cosine from the peak to zero over the whole run, resumed or not; L-BFGS needs no rate."""
        if self.lbfgs:
            return
        part = (self.first_step + batch_idx) / self.steps
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.plan.lr * 0.5 * (1 + math.cos(math.pi * part))


class Shuffled(IterableDataset[Features]):
    """Endless batches of `size` positions from features in memory, in a new order every time round."""

    def __init__(self, features: Features, size: int, seed: int) -> None:
        self.features, self.seed = features, seed
        self.size = min(size, len(features.hazards))

    def __iter__(self) -> Iterator[Features]:
        hazards = self.features.hazards
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            if self.size == len(hazards):
                yield self.features
                continue
            order = torch.randperm(len(hazards), generator=generator).to(hazards.device)
            for rows in torch.split(order, self.size):
                if len(rows) == self.size:
                    yield Features(tuple(x[rows] for x in self.features.inputs), hazards[rows])


class Streamed(IterableDataset[Features]):
    """Features made by the teacher as they are asked for, from batch `first` on."""

    def __init__(self, teaching: Teaching, corpus: Corpus, first: int) -> None:
        self.teaching, self.corpus, self.first = teaching, corpus, first

    def __iter__(self) -> Iterator[Features]:
        for batch, index in self.teaching.stream(self.corpus.training()):
            if index >= self.first:
                yield self.teaching.features(batch, index)


def distil(teaching: Teaching, corpus: Corpus, unfinished: Unfinished) -> int:
    """Train the students of a teaching in place; the number of positions they saw, counting repeats once.

    Raises LoopedError when the loss is not finite, KeyboardInterrupt on Ctrl-C.
    """
    module = Distillation(teaching)
    if teaching.cached:
        features = collect(teaching, corpus.training())
        fit_cached(module, features)
        return len(features.hazards)
    keeper = _Keeper(module, unfinished)
    if unfinished.resume:
        keeper.load()
    else:
        _prepare(teaching.students, next(iter(Streamed(teaching, corpus, 0))))
    _fit(module, Streamed(teaching, corpus, module.first_step), [keeper], "heads")
    return keeper.positions


def fit_cached(module: Distillation, features: Features) -> None:
    """Train on features in memory: with L-BFGS the heads first, then what a hidden layer adds."""
    _prepare(module.students, features)
    module.num_positions = len(features.hazards)
    size = module.num_positions if module.lbfgs else module.plan.batch_tokens
    _fit(module, Shuffled(features, size, module.plan.seed), [], "heads")
    if module.begin_hidden():
        _fit(module, Shuffled(features, _HIDDEN_BATCH, module.plan.seed), [], "hidden layer")


def _prepare(students: list[Student], features: Features) -> None:
    for student, inputs in zip(students, features.inputs, strict=True):
        student.prepare(inputs, features.hazards)


def _fit(module: Distillation, data: IterableDataset[Features], extra: list[Any], name: str) -> None:
    _quiet()
    module.train()
    device = next(module.parameters()).device
    left = module.steps - module.first_step
    at_once = LBFGS_AT_ONCE if module.lbfgs else 1
    with progress(left * at_once, f"{name} (steps)") as bar:
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision="32-true",
            max_steps=left,
            max_epochs=-1,
            logger=False,
            callbacks=[_Bar(bar, at_once), *extra],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        try:
            trainer.fit(module, DataLoader(data, batch_size=None, num_workers=0))
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None
    module.to(device).eval()  # Lightning leaves it on the CPU


def _quiet() -> None:
    """Lightning's advice is for other set-ups: features are made in this process, and there is no validation loop."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (".*not have many workers.*", ".*GPU available but.*", ".*`IterableDataset`.*", ".*treespec.*"):
        warnings.filterwarnings("ignore", text)


class _Bar(callbacks.Callback):
    """Tells our progress bar, and ends L-BFGS when the loss has stopped falling."""

    def __init__(self, bar: Any, at_once: int) -> None:
        self.bar, self.at_once = bar, at_once
        self.loss = math.inf

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Features, batch_idx: int) -> None:
        if not module.lbfgs and batch_idx % _NOTE_EVERY:
            self.bar.advance()
            return
        before, self.loss = self.loss, float(outputs["loss"])
        trainer.should_stop |= module.lbfgs and self.loss > (1 - _CONVERGED) * before
        self.bar.advance(self.at_once, note=f"loss {self.loss:.5f}")


class _Keeper(callbacks.Callback):
    """Keeps heads, optimiser and step of a long run every few minutes, and loads them again."""

    def __init__(self, module: Distillation, unfinished: Unfinished) -> None:
        self.module, self.unfinished = module, unfinished
        self.saved, self.positions = time.monotonic(), 0
        self.loaded: dict[str, Tensor] = {}

    def load(self) -> None:
        """Heads and step now; the optimiser's state once there is an optimiser."""
        try:
            self.loaded = load_file(self.unfinished.path)
        except (SafetensorError, OSError) as error:
            raise LoopedError(f"{self.unfinished.path} is damaged ({error}); start again with --overwrite") from error
        state = {name.removeprefix("module."): x for name, x in self.loaded.items() if name.startswith("module.")}
        self.module.load_state_dict(state)
        self.module.first_step = int(self.loaded["step"])
        self.positions = int(self.loaded["positions"])

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, parameter in self.module.named_parameters():
            moments = {key: self.loaded[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq") if self.loaded}
            if moments:
                state = {key: x.to(parameter.device) for key, x in moments.items()}
                trainer.optimizers[0].state[parameter] = state | {"step": self.loaded["step"].float()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Features, batch_idx: int) -> None:
        self.positions += len(batch.hazards)
        if time.monotonic() - self.saved >= self.unfinished.seconds:
            self.save(trainer, self.module.first_step + batch_idx + 1)
            self.saved = time.monotonic()

    def save(self, trainer: Any, step: int) -> None:
        """Write the state; the file appears whole or not at all."""
        tensors = {f"module.{name}": x for name, x in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            state = trainer.optimizers[0].state[parameter]
            tensors |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        tensors |= {"step": torch.tensor(step), "positions": torch.tensor(self.positions)}
        with whole(self.unfinished.path) as partial:
            save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, partial)
