"""What a finished or running `looped train` left in its folder: figures over the run, and the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from looped.errors import LoopedError
from looped.files import read_object
from looped.train.pretrain.folder import LOG, SUMMARY

Row = dict[str, float]


class RunLog(NamedTuple):
    """Name and figures of a run, oldest first; its summary and exported model where it has come that far."""

    name: str
    rows: list[Row]
    summary: dict[str, Any]
    model: Path | None

    @property
    def loops(self) -> int:
        """The deepest loop step that a figure speaks of."""
        return max(
            (int(key[3:]) for row in self.rows for key in row if key[:3] == "ce_" and key[3:].isdigit()), default=1
        )


def read_run(folder: Path) -> RunLog:
    """The log of a run's folder, which may have been moved since. Raises LoopedError where there is none."""
    path = folder / LOG
    if not path.is_file():
        raise LoopedError(f"{folder} holds no log of a run ({LOG}); give folders that looped train wrote")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise LoopedError(f"{path} is damaged ({error})") from error
    if not rows:
        raise LoopedError(f"{path} is empty: the run has not reported yet")
    summary = read_object(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    model = folder / Path(summary["model"]).name if "model" in summary else None
    return RunLog(folder.resolve().name, rows, summary, model if model is not None and model.is_dir() else None)
