"""Training the heads of students, as a LightningModule over batches of features."""

# N positions

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from looped.progress import progress
from looped.train.gates.documents import Documents
from looped.train.gates.feed import Feed
from looped.train.gates.saved_state import Keeper, NotFiniteError, Unfinished
from looped.train.gates.speed import Meter
from looped.train.gates.student import Student
from looped.train.gates.teaching import LBFGS_AT_ONCE, Features, Teaching, collect
from looped.train.trainer import bare_trainer

_NOTE_EVERY = 20
_HIDDEN_STEPS, _HIDDEN_BATCH, _HIDDEN_DECAY = 600, 1024, 0.05
_CONVERGED = 1e-3


class Distillation(lightning.LightningModule):
    """Students at once; a Lightning batch is one optimiser step on a batch of features."""

    def __init__(self, teaching: Teaching, students: list[Student]) -> None:
        super().__init__()
        self.students, self.heads = students, nn.ModuleList(students)
        self.plan, self.steps, self.lbfgs = teaching.plan, teaching.steps, teaching.lbfgs
        self.first_step, self.num_positions = 0, teaching.plan.tokens
        self.parts = [part for student in students for part in student.parts]
        for part in self.parts:
            part.linear = teaching.lbfgs or not part.hidden

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        total = torch.zeros((), device=next(iter(batch.targets.values())).device)
        for student in self.students:
            loss = student.objective(batch.blocks, batch.targets[student.target])
            for part in student.parts:
                loss = loss + self.plan.ridge / self.num_positions * part.weight.square().sum()
            if not bool(torch.isfinite(loss)):
                self._refuse(student, float(loss.detach()), self.first_step + batch_idx + 1, batch.batch)
            total = total + loss
        return total

    def _refuse(self, student: Student, loss: float, step: int, index: int) -> None:
        cure = "look at the data" if self.lbfgs else f"try a smaller --lr than {self.plan.lr:g}, or look at the data"
        raise NotFiniteError(
            f"the loss of {student.spec.text} is {loss} at step {step}, on batch {index} of the documents (--seed "
            f"{self.plan.seed}); gates saved before are as they were; {cure}"
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.lbfgs:
            heads = [parameter for part in self.parts for parameter in (part.weight, part.bias)]
            return torch.optim.LBFGS(heads, max_iter=LBFGS_AT_ONCE, history_size=20, line_search_fn="strong_wolfe")
        heads = [parameter for name, parameter in self.named_parameters() if ".hidden." not in name]
        layers = [parameter for name, parameter in self.named_parameters() if ".hidden." in name]
        decay = self.plan.weight_decay
        groups = [{"params": heads, "weight_decay": decay}, {"params": layers, "weight_decay": decay or _HIDDEN_DECAY}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.plan.lr)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gates share a step but no weights, so each has its own bound on its gradient."""
        if self.plan.clip is not None and not self.lbfgs:
            for student in self.students:
                nn.utils.clip_grad_norm_(student.parameters(), self.plan.clip)

    def begin_hidden(self) -> bool:
        """Go over from fitted heads to AdamW on all parameters; False where no hidden layer is left."""
        todo = [part for part in self.parts if part.hidden and part.linear]
        for part in todo:
            part.linear = False
        self.lbfgs, self.steps = False, _HIDDEN_STEPS
        return bool(todo)

    def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
        """The rate over the whole run, resumed or not; L-BFGS needs none."""
        if self.lbfgs:
            return
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.plan.lr * self._share(self.first_step + batch_idx)

    def _share(self, step: int) -> float:
        """Of the peak rate: linear warm-up, then a cosine to the final rate."""
        warmup = min(self.plan.warmup, self.steps)
        if step < warmup:
            return (step + 1) / warmup
        part = (step - warmup) / max(self.steps - warmup, 1)
        return self.plan.final_lr + (1 - self.plan.final_lr) * 0.5 * (1 + math.cos(math.pi * part))


class Shuffled(IterableDataset[Features]):
    """Endless batches of `size` positions from features in memory, in a new order every time round."""

    def __init__(self, features: Features, size: int, seed: int) -> None:
        self.features, self.seed = features, seed
        self.size = min(size, features.num)

    def __iter__(self) -> Iterator[Features]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            if self.size == self.features.num:
                yield self.features
                continue
            order = torch.randperm(self.features.num, generator=generator)
            order = order.to(next(iter(self.features.targets.values())).device)
            for index, rows in enumerate(torch.split(order, self.size)):
                if len(rows) == self.size:
                    yield self.features.rows(rows)._replace(batch=index)


class Streamed(IterableDataset[Features]):
    """Features made by the teacher as they are asked for."""

    def __init__(self, teaching: Teaching, feed: Feed) -> None:
        self.teaching, self.feed = teaching, feed

    def __iter__(self) -> Iterator[Features]:
        for batch, index in self.feed:
            yield self.teaching.features(batch, index)


def distil(teaching: Teaching, documents: Documents, unfinished: Unfinished) -> int:
    """Train the students of a teaching in place; the number of positions they saw, counting repeats once.

    Raises LoopedError when the loss is not finite or the state cannot be written, KeyboardInterrupt on Ctrl-C.
    """
    students = [student for student in teaching.students if student.parts]
    if teaching.cached or not students:
        features = collect(teaching, documents)
        # one after the other: each then stops when it has converged, and one line search serves one problem
        for student in students:
            fit_cached(Distillation(teaching, [student]), features)
        return features.num
    module = Distillation(teaching, students)
    keeper = Keeper(module, unfinished)
    place = keeper.load() if unfinished.resume else None
    if place is None:
        prepare(students, next(iter(Streamed(teaching, teaching.feed(documents)))))
    keeper.feed = teaching.feed(documents, place)
    _fit(module, Streamed(teaching, keeper.feed), [keeper], "heads (steps)", teaching.meter)
    return keeper.positions


def fit_cached(module: Distillation, features: Features) -> None:
    """Train on features in memory: with L-BFGS the heads first, then what a hidden layer adds."""
    prepare(module.students, features)
    module.num_positions = features.num
    size = module.num_positions if module.lbfgs else module.plan.batch_tokens
    name = module.students[0].spec.text
    _fit(module, Shuffled(features, size, module.plan.seed), [], f"{name} (steps)")
    if module.begin_hidden():
        _fit(module, Shuffled(features, _HIDDEN_BATCH, module.plan.seed), [], f"{name}, hidden layer (steps)")


def prepare(students: list[Student], features: Features) -> None:
    for student in students:
        student.prepare(features.blocks, features.targets[student.target])


def _fit(
    module: Distillation, data: IterableDataset[Features], extra: list[Any], name: str, meter: Meter | None = None
) -> None:
    module.train()
    device = next(module.parameters()).device
    left = module.steps - module.first_step
    at_once = LBFGS_AT_ONCE if module.lbfgs else 1
    with progress(left * at_once, name) as bar:
        trainer = bare_trainer(
            device,
            [_Bar(bar, at_once, meter), *extra],
            precision="32-true",
            max_steps=left,
            max_epochs=-1,
        )
        try:
            trainer.fit(module, DataLoader(data, batch_size=None, num_workers=0))
        except SystemExit:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from None
    module.to(device).eval()  # Lightning leaves it on the CPU


class _Bar(callbacks.Callback):
    """Tells our progress bar, with the speed of the teacher, and ends L-BFGS when the loss has stopped falling."""

    def __init__(self, bar: Any, at_once: int, meter: Meter | None) -> None:
        self.bar, self.at_once, self.meter = bar, at_once, meter
        self.loss = math.inf

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Features, batch_idx: int) -> None:
        if not module.lbfgs and batch_idx % _NOTE_EVERY:
            self.bar.advance()
            return
        before, self.loss = self.loss, float(outputs["loss"])
        trainer.should_stop |= module.lbfgs and self.loss > (1 - _CONVERGED) * before
        speed = self.meter.look() if self.meter is not None else ""
        self.bar.advance(self.at_once, note=", ".join(filter(None, (f"loss {self.loss:.5f}", speed))))
