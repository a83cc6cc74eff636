"""What happens around the steps of a run: progress lines, checkpoints by time, clean stops, the end of the schedule."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch

from looped.config import ModelConfig
from looped.files import whole
from looped.train import schedule
from looped.train.build import PEAK_FLOPS, flops_per_token
from looped.train.module import Pretraining
from looped.train.recipe import Options

CHECKPOINT = "checkpoint.ckpt"
LOG = "metrics.jsonl"
_WARM_STEPS = 5
"""Steps that are left out of the measured speed of a process: they compile."""


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

    def __init__(self, options: Options, folder: Path, config: ModelConfig, stop: Stop, begun: float) -> None:
        self.options, self.folder, self.config, self.stop = options, folder, config, stop
        self.deadline = None if options.max_seconds is None else begun + options.max_seconds - options.reserve
        self.started = self.saved = self.marked = 0.0
        self.base_seconds, self.first_step, self.marked_step, self.paused = 0.0, 0, 0, 0.0
        self.recent: list[float] = []
        self.last: dict[str, float] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        clock = _module(pl_module).clock
        self.stop.listen()  # from here on, so that the trainer's own handlers do not come in between
        self.started = self.saved = self.marked = time.monotonic()
        self.base_seconds, self.first_step, self.marked_step = clock.seconds, clock.steps, clock.steps
        if self.options.finish and self.deadline is not None:
            clock.total_seconds = clock.seconds + max(self.deadline - self.started, 1.0)
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
        now = time.monotonic()
        if clock.done:
            self.stop.reason = self.stop.reason or "schedule"
        elif self._reached(clock.steps):
            self.stop.reason = self.stop.reason or "steps"
        elif self.deadline is not None and now >= self.deadline:
            self.stop.reason = self.stop.reason or "time"
        if self.stop.reason or now - self.saved >= self.options.checkpoint_seconds:
            if self.stop.reason:
                self._report(module, measured=False)
            self.save(trainer)
        if self.stop.reason:
            trainer.should_stop = True

    def _reached(self, steps: int) -> bool:
        return self.options.max_steps is not None and steps >= self.options.max_steps

    def save(self, trainer: lightning.Trainer) -> None:
        """Write the checkpoint, whole or not at all; its time does not count as a step's."""
        before = time.monotonic()
        with whole(self.folder / CHECKPOINT) as partial:
            trainer.save_checkpoint(partial)
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
        clock.measure(self.base_seconds + now - self.started, min(self.recent, default=0.0))
        self.marked, self.marked_step, self.paused = now, clock.steps, 0.0
        self.last = means | self._speed(step_seconds, means, clock.steps) | {"progress": clock.progress}
        self.last["lr"] = schedule.learning_rate(self.options.optim, clock.progress)
        self.last["beta"] = schedule.beta(self.options.objective, clock.progress)
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: float(f"{value:.6g}") for name, value in self.last.items()}) + "\n")
        print(self.line(), file=sys.stderr, flush=True)

    def _speed(self, step_seconds: float, means: dict[str, float], steps: int) -> dict[str, float]:
        tokens = self.options.optim.rows * self.options.optim.accumulate * self.options.data.window
        loops = means.get("steps", float(self.config.max_loops))
        heads = float(self.config.max_loops) if self.config.exit_gate else 1.0
        flops = flops_per_token(self.config, self.options.data.window, loops, heads)
        rate = tokens / step_seconds
        return {
            "step": float(steps),
            "tokens": float(steps * tokens),
            "tok_s": rate,
            "mfu": rate * flops / PEAK_FLOPS,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        }

    def line(self) -> str:
        """The newest figures in one line."""
        last, loops = self.last, self.config.max_loops

        def curve(name: str, digits: int = 3) -> str:
            present = [last.get(f"{name}_{d}") for d in range(1, loops + 1)]
            return "/".join("-" if value is None else f"{value:.{digits}f}" for value in present)

        parts = [
            f"step {last['step']:.0f} {last['progress']:.1%}",
            f"loss {last.get('loss', last.get('ragged_loss', 0.0)):.4f}",
            f"answer {curve('answer_ce')}",
            f"direct {curve('direct_ce')}",
        ]
        if "pi_1" in last:
            parts += [f"pi {curve('pi', 2)}", f"H {last['entropy']:.2f}", f"exit {last['answer_depth']:.2f}"]
            parts += [f"gain {last['answer_gain']:+.4f}", f"corr {last['gain_correlation']:+.2f}"]
            parts += [f"drift {curve('drift', 2)}"]
        else:
            parts += [f"change {curve('change', 2)}"]
        if "ragged_answer" in last:
            parts += [f"ragged {last['ragged_answer']:.3f}@{last['ragged_depth']:.2f}"]
        parts += [f"norm {last['grad_norm']:.2f}", f"lr {last['lr']:.2e}", f"{last['tok_s'] / 1e3:.0f}K tok/s"]
        parts += [f"MFU {last['mfu']:.0%}", f"{last['memory_gib']:.0f} GiB", *self.warnings()]
        return " | ".join(parts)

    def warnings(self) -> list[str]:
        """Signs that depth is not being used."""
        last, loops = self.last, self.config.max_loops
        if "pi_1" not in last:
            return []
        found = []
        if last["progress"] > 0.3 and last["direct_ce_1"] - last[f"direct_ce_{loops}"] < 0.01:
            found.append("WARN depth gains nothing")
        if min(last[f"pi_{d}"] for d in range(1, loops + 1)) < 0.02:
            found.append("WARN an exit is unused")
        if last["progress"] > 0.1 and last["gain_correlation"] <= 0:
            found.append("WARN exits go the wrong way")
        if last["drift_2"] < 0.03:
            found.append("WARN loop 2 does nothing")
        return found


def _module(module: lightning.LightningModule) -> Pretraining:
    assert isinstance(module, Pretraining)
    return module
