"""Pretraining as a LightningModule: one Lightning batch is one optimiser step."""

# B rows, T tokens

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from looped.errors import LoopedError
from looped.model import LoopedLM
from looped.train.pretrain import ranks, schedule
from looped.train.pretrain.build import optimiser
from looped.train.pretrain.objective import Moment, TrainingLoss
from looped.train.pretrain.recipe import Options
from looped.train.pretrain.schedule import Clock
from looped.train.pretrain.strategy import gathered, hold_back, is_sharded
from looped.train.pretrain.windows import Windows

_SHOWN = 8


class _Steps(IterableDataset[int]):
    """An endless stream of step tickets; which windows a step reads is the module's own saved position."""

    def __iter__(self) -> Iterator[int]:
        ticket = 0
        while True:
            yield ticket
            ticket += 1


class Pretraining(lightning.LightningModule):
    """Model, loss and schedule. What is random in step n depends on (seed, n) alone: a resumed run is the same run.

    A micro-batch has the same windows in the same order for any number of processes; each takes its part of the rows.
    """

    def __init__(self, model: LoopedLM, loss: TrainingLoss, windows: Windows, options: Options, clock: Clock) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.loss, self.windows = model, loss, windows
        self.options, self.clock = options, clock
        self.adam: torch.optim.Optimizer | None = None
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.kinds = {"loss": 0, "ragged_loss": 0}
        """Dense and ragged micro-batches since the log was read."""
        self.broken: Tensor | None = None
        """The first micro-batch whose loss or gradient was no number, on the device; -1 while there is none."""

    def train_dataloader(self) -> DataLoader[int]:
        # its own generator: a loader draws a seed, which would move the state that checkpoints keep
        return DataLoader(_Steps(), batch_size=None, num_workers=0, generator=torch.Generator())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.adam = optimiser(self.model, self.options.optim, fused=self.device.type == "cuda")
        return self.adam

    def training_step(self, ticket: Any, batch_idx: int) -> None:
        """One optimiser step over `accumulate` micro-batches; gradients meet those of other processes once."""
        optim, clock = self.options.optim, self.clock
        adam = self.optimizers()
        rate = schedule.learning_rate(optim, clock.progress)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad(set_to_none=True)
        rows = optim.rows // ranks.world()
        first, last = clock.steps * optim.accumulate, (clock.steps + 1) * optim.accumulate - 1
        for micro in range(first, last + 1):
            batch = self.windows.take(micro * optim.rows + ranks.rank() * rows, rows)
            hold_back(self.model, until_last=micro < last)
            loss = self.loss(self.model, batch, self.moment(micro))
            self.manual_backward(loss.value / optim.accumulate)
            self._collect(loss.log, {"answer": batch.answer.sum(), "direct": batch.direct.sum()})
            self._watch(loss.value.detach(), micro)
        if not is_sharded(self.model):
            ranks.average_gradients(self.model.parameters())
        norm = gathered(torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)).detach()
        self._collect({"grad_norm": norm}, {})
        self._watch(norm, last)
        adam.step()
        clock.advance()

    def moment(self, micro: int) -> Moment:
        """The schedule's values for one micro-batch."""
        progress = self.clock.progress
        seed = self.options.seed * 1_000_000_007 + micro
        return Moment(self.clock.steps, progress, schedule.beta(self.options.objective, progress), seed)

    @property
    def autocast(self) -> Any:
        """The context in which forwards run in training."""
        return self.trainer.precision_plugin.forward_context()

    def _collect(self, log: dict[str, Tensor], tokens: dict[str, Tensor]) -> None:
        """Add figures to the log. Those named after a group of `tokens` are means over it and count by its size."""
        for name, value in log.items():
            weight = next((count for group, count in tokens.items() if group in name), torch.ones_like(value))
            self.sums[name] = self.sums.get(name, 0.0) + value * weight
            self.counts[name] = self.counts.get(name, 0) + weight
        for kind in self.kinds.keys() & log.keys():
            self.kinds[kind] += 1

    def _watch(self, value: Tensor, micro: int) -> None:
        """Remember, without waiting for the device, where numbers broke first."""
        if self.broken is None:
            self.broken = torch.full((), -1, device=value.device, dtype=torch.long)
        self.broken = torch.where((self.broken < 0) & ~torch.isfinite(value), micro, self.broken)

    def read_log(self) -> dict[str, float]:
        """Means over processes and steps since the last call, and `ragged_share`, the part of the micro-batches that
        were ragged; waits for the device. Raises LoopedError as `check_numbers`.
        """
        self.check_numbers()
        names = list(self.sums)
        if not names:
            return {}
        columns = [torch.stack([table[name].float() for name in names]) for table in (self.sums, self.counts)]
        sums, counts = ranks.total(torch.stack(columns)).tolist()
        # a group of tokens that no batch had is left out
        means = {name: part / count for name, part, count in zip(names, sums, counts, strict=True) if count}
        means["ragged_share"] = self.kinds["ragged_loss"] / max(sum(self.kinds.values()), 1)
        self.sums, self.counts, self.kinds = {}, {}, dict.fromkeys(self.kinds, 0)
        return means

    def check_numbers(self) -> None:
        """Raise LoopedError, with the step and its windows, where a loss or a gradient has been no number."""
        if self.broken is None:
            return
        # every process takes part, and the earliest that any of them saw counts
        seen = torch.where(self.broken < 0, torch.iinfo(torch.long).max, self.broken)
        micro = -int(ranks.largest(-seen))
        if micro == torch.iinfo(torch.long).max:
            return
        optim = self.options.optim
        step = micro // optim.accumulate
        ids = self.windows.indices(micro * optim.rows, optim.rows).tolist()
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        raise LoopedError(
            f"the loss or its gradient is no number at step {step + 1}, micro-batch {micro % optim.accumulate + 1}, "
            f"windows {', '.join(map(str, ids[:_SHOWN]))}{more}; nothing is saved from there on, so the last "
            "checkpoint is good: --resume it with a lower --optim.lr"
        )
