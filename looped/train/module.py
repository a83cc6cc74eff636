"""Pretraining as a LightningModule: one Lightning batch is one optimiser step."""

# B rows, T tokens

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from looped.errors import LoopedError
from looped.model import LoopedLM
from looped.train import schedule
from looped.train.build import optimiser
from looped.train.objective import Moment, TrainingLoss
from looped.train.recipe import Options
from looped.train.schedule import Clock
from looped.train.windows import Windows


class _Steps(IterableDataset[int]):
    """An endless stream of step tickets; which windows a step reads is the module's own saved position."""

    def __iter__(self) -> Iterator[int]:
        ticket = 0
        while True:
            yield ticket
            ticket += 1


class Pretraining(lightning.LightningModule):
    """Model, loss and schedule. What is random in step n depends on (seed, n) alone: a resumed run is the same run."""

    def __init__(self, model: LoopedLM, loss: TrainingLoss, windows: Windows, options: Options, clock: Clock) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.loss, self.windows = model, loss, windows
        self.options, self.clock = options, clock
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(_Steps(), batch_size=None, num_workers=0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimiser(self.model, self.options.optim, fused=self.device.type == "cuda")

    def training_step(self, ticket: Any, batch_idx: int) -> None:
        """One optimiser step over `accumulate` micro-batches."""
        optim, clock = self.options.optim, self.clock
        adam = self.optimizers()
        rate = schedule.learning_rate(optim, clock.progress)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad(set_to_none=True)
        first = clock.steps * optim.accumulate
        for micro in range(first, first + optim.accumulate):
            batch = self.windows.take(micro * optim.rows, optim.rows)
            loss = self.loss(self.model, batch, self.moment(micro))
            self.manual_backward(loss.value / optim.accumulate)
            self._collect(loss.log)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)
        self._collect({"grad_norm": norm.detach()})
        adam.step()
        clock.advance()

    def moment(self, micro: int) -> Moment:
        """The schedule's values for one micro-batch."""
        progress = self.clock.progress
        seed = self.options.seed * 1_000_000_007 + micro
        return Moment(self.clock.steps, progress, schedule.beta(self.options.objective, progress), seed)

    def _collect(self, log: dict[str, Tensor]) -> None:
        for name, value in log.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.counts[name] = self.counts.get(name, 0) + 1

    def read_log(self) -> dict[str, float]:
        """Means since the last call; waits for the device. A loss that is no number ends the run."""
        names = list(self.sums)
        if not names:
            return {}
        stacked = torch.stack([self.sums[name].float() for name in names]).tolist()
        means = {name: total / self.counts[name] for name, total in zip(names, stacked, strict=True)}
        self.sums, self.counts = {}, {}
        broken = [name for name in ("loss", "ragged_loss", "grad_norm") if not math.isfinite(means.get(name, 0.0))]
        if broken:
            raise LoopedError(
                f"{broken[0]} is no longer a number at step {self.clock.steps}; the last checkpoint is kept, "
                "resume from it with a lower optim.lr"
            )
        return means

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["clock"] = self.clock.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clock.load(checkpoint["clock"])
