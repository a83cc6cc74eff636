"""What happens around the steps of a run: measuring, checkpoints, clean stops, the end of the schedule."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch

from looped.errors import LoopedError
from looped.train.peak import peak_flops
from looped.train.pretrain import checkpoint, ranks, schedule
from looped.train.pretrain.build import flops_per_token
from looped.train.pretrain.corpus import Corpus
from looped.train.pretrain.figures import perplexities
from looped.train.pretrain.folder import plain
from looped.train.pretrain.held_out import held_out_loss
from looped.train.pretrain.loggers import Logger, open_loggers
from looped.train.pretrain.module import Pretraining
from looped.train.pretrain.progress_line import progress_line
from looped.train.pretrain.recipe import Options
from looped.train.pretrain.strategy import unsharded_copy

_WARM_STEPS = 5
"""Steps that are left out of the measured speed of a process: they compile."""
_REASONS = ("", "steps", "time", "schedule", "SIGINT", "SIGTERM")
"""Why a run stops; of two, the later one in this list is told."""


class Stop:
    """Set by SIGTERM and Ctrl-C: the run ends after this step, with a checkpoint. A second Ctrl-C ends it at once."""

    def __init__(self) -> None:
        self.reason = ""

    def listen(self) -> None:
        """Take over the two signals; they would end a run between two checkpoints."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._catch)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name


class Watch(lightning.Callback):
    """Measures, reports, saves and stops. `begun` is when the process began (time.monotonic)."""

    def __init__(self, options: Options, folder: Path, corpus: Corpus, stop: Stop, begun: float) -> None:
        self.options, self.folder, self.corpus, self.stop = options, folder, corpus, stop
        self.deadline = None if options.max_seconds is None else begun + options.max_seconds - options.reserve
        self.started = self.saved = self.marked = 0.0
        self.base_seconds, self.first_step, self.marked_step, self.paused = 0.0, 0, 0, 0.0
        self.recent: list[float] = []
        self.last: dict[str, float] = {}
        self.loggers: list[Logger] = []
        self.agreement = ranks.Agreement()
        self.peak = 0.0
        self.newest: checkpoint.Saved | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        module = _module(pl_module)
        clock = module.clock
        if self.options.resume:
            self.newest = checkpoint.find(self.folder)[-1]
            assert module.adam is not None
            checkpoint.load_optimizer(self.newest.folder, module.model, module.adam)
        self.agreement = ranks.Agreement()
        self.peak = peak_flops(module.device)[0] * ranks.world()
        if ranks.rank() == 0:
            self.loggers = open_loggers(self.folder, self.options.logger, clock.steps, plain(self.options))
        self.stop.listen()  # from here on, so that the trainer's own handlers do not come in between
        self.started = self.saved = self.marked = time.monotonic()
        self.base_seconds, self.first_step, self.marked_step = clock.seconds, clock.steps, clock.steps
        if self.options.finish and self.deadline is not None:
            left = self.agreement.of_first([self.deadline - self.started])[0]
            clock.total_seconds = clock.seconds + max(left, 1.0)
        if clock.done or self._reached(clock.steps):
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = _module(pl_module)
        clock = module.clock
        since = clock.steps - self.first_step
        if since == _WARM_STEPS or since == 2 * _WARM_STEPS or clock.steps % self.options.log_every == 0:
            self._report(module, measured=since > _WARM_STEPS)
        reason, due = self.agreement.largest([self._reason(clock), float(self._due(clock.steps))])
        self.stop.reason = _REASONS[int(reason)]
        if reason or due:
            if reason:
                self._report(module, measured=False)
            self.save(module)
        if reason:
            trainer.should_stop = True

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        for logger in self.loggers:
            logger.close()

    def _reason(self, clock: schedule.Clock) -> int:
        """Why to stop now, as this process sees it: a place in _REASONS."""
        reasons = [self.stop.reason]
        if clock.done:
            reasons.append("schedule")
        if self._reached(clock.steps):
            reasons.append("steps")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            reasons.append("time")
        return max(map(_REASONS.index, reasons))

    def _reached(self, steps: int) -> bool:
        return self.options.max_steps is not None and steps >= self.options.max_steps

    def _due(self, steps: int) -> bool:
        if self.options.checkpoint_steps is not None:
            return steps % self.options.checkpoint_steps == 0
        return time.monotonic() - self.saved >= self.options.checkpoint_seconds

    def save(self, module: Pretraining) -> None:
        """Write the checkpoint, whole or not at all; its time does not count as a step's. A call for all processes."""
        before = time.monotonic()
        module.check_numbers()
        clock = module.clock
        score = None
        if self.options.check_rows:
            score = held_out_loss(module.model, self.corpus.held_out, self.options.check_rows, module.autocast)
        assert module.adam is not None
        model = unsharded_copy(module.model)
        tensors = checkpoint.optimizer_tensors(module.model, module.adam)
        failure: LoopedError | None = None
        if ranks.rank() == 0:
            optim = self.options.optim
            state = {"step": clock.steps, "score": score, "clock": clock.state()}
            state["windows"] = clock.steps * optim.rows * optim.accumulate
            try:
                tensors |= checkpoint.random_tensors()
                self.newest = checkpoint.write(self.folder, model, self.corpus.tokenizer, tensors, state)
                checkpoint.prune(self.folder, self.options.keep)
            except LoopedError as error:
                failure = error
        # nobody trains on, or ends, before the checkpoint is there
        failed = self.agreement.largest([float(failure is not None)])[0]
        if failed:
            raise failure or LoopedError("process 0 could not save the checkpoint")
        self.saved = time.monotonic()
        self.paused += self.saved - before

    def _report(self, module: Pretraining, measured: bool) -> None:
        means = module.read_log()  # waits for the device, so the time below is real
        clock, now = module.clock, time.monotonic()
        steps = clock.steps - self.marked_step
        if not steps or not means:
            return
        step_seconds = max(now - self.marked - self.paused, 1e-9) / steps
        if measured:
            self.recent = [*self.recent[-1:], step_seconds]
        # the lesser of two intervals: one that compiled something is no measure of the next
        now_here = [self.base_seconds + now - self.started, min(self.recent, default=0.0)]
        clock.measure(*self.agreement.of_first(now_here))
        self.marked, self.marked_step, self.paused = now, clock.steps, 0.0
        self.last = means | perplexities(means, module.model.config.max_loops)
        self.last |= self._speed(module, step_seconds, means) | {"progress": clock.progress}
        self.last["lr"] = schedule.learning_rate(self.options.optim, clock.progress)
        self.last["beta"] = schedule.beta(self.options.objective, clock.progress)
        for logger in self.loggers:
            logger.write(clock.steps, self.last)
        if ranks.rank() == 0:
            print(progress_line(self.last, module.model.config.max_loops), file=sys.stderr, flush=True)

    def _speed(self, module: Pretraining, step_seconds: float, means: dict[str, float]) -> dict[str, float]:
        config, optim, window = module.model.config, self.options.optim, module.windows.length
        tokens = optim.rows * optim.accumulate * window
        flops = flops_per_token(config, window, means["loops_run"], means["heads_run"])
        rate = tokens / step_seconds
        return {
            "step": float(module.clock.steps),
            "tokens": float(module.clock.steps * tokens),
            "tok_s": rate,
            "mfu": rate * flops / self.peak,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        }


def _module(module: lightning.LightningModule) -> Pretraining:
    assert isinstance(module, Pretraining)
    return module
