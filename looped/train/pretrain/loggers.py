"""Where a run's figures go: `metrics.jsonl` and TensorBoard always, Weights & Biases by name."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from looped.errors import LoopedError
from looped.files import write_text
from looped.train.pretrain.checkpoint import full_disk
from looped.train.pretrain.folder import LOG


class Logger(Protocol):
    """Takes the figures of a step."""

    def write(self, step: int, figures: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def check_logger(name: str) -> None:
    """Raise LoopedError where a logger was asked for that is not installed."""
    if name == "wandb" and find_spec("wandb") is None:
        raise LoopedError("--logger wandb needs the package wandb, which is not installed: pip install wandb")


def open_loggers(folder: Path, name: str, step: int, recipe: dict[str, Any]) -> list[Logger]:
    """The loggers of a run that begins after `step`; what an interrupted run logged beyond it is dropped."""
    loggers: list[Logger] = [Lines(folder, step)]
    if find_spec("tensorboard") is None:
        print(f"no TensorBoard curves: the package tensorboard is not installed; {LOG} has them", file=sys.stderr)
    else:
        loggers.append(TensorBoard(folder, step))
    if name == "wandb":
        loggers.append(WeightsAndBiases(folder, step, recipe))
    return loggers


class Lines:
    """One JSON object a line."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.path = folder, folder / LOG
        if self.path.is_file():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            if len(kept) < len(lines):
                write_text(self.path, "".join(kept))

    def write(self, step: int, figures: dict[str, float]) -> None:
        line = json.dumps({name: float(f"{value:.6g}") for name, value in figures.items()})
        with full_disk(self.folder, "the log could not go on"), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def close(self) -> None:
        pass


class TensorBoard:
    """Curves over steps, in `tensorboard/`."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, figures: dict[str, float]) -> None:
        with full_disk(self.folder, "the curves could not go on"):
            for name, value in figures.items():
                if name != "step":
                    self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, continued under the same id when the run is resumed."""

    def __init__(self, folder: Path, step: int, recipe: dict[str, Any]) -> None:
        import wandb

        note = folder / "wandb-id"
        known = note.read_text(encoding="utf-8").strip() if step and note.is_file() else None
        self.run = wandb.init(
            project="looped", name=folder.name, dir=str(folder), config=recipe, id=known, resume="allow"
        )
        write_text(note, self.run.id + "\n")

    def write(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()
