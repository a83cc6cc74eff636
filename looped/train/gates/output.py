"""The folder of a gate run: what may be replaced or resumed, and how results come into it whole."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from looped.errors import LoopedError
from looped.files import check_folder, read_object, write_text

PLAN, STATE = "unfinished.json", "unfinished.safetensors"
REPORT = "report.json"
# What a resumed run may change.
_FREE = ("output", "overwrite", "resume", "json", "save_minutes", "eval_tokens")
_SHOWN = 6


def check_output(folder: Path | None, resume: bool, overwrite: bool, options: Any) -> Path:
    """The output folder, refused where it holds a run that is neither replaced nor resumed with the same `options`, a
    dataclass."""
    if folder is None:
        raise LoopedError("--output is missing: give a folder for the gate checkpoint")
    check_folder(folder)
    plan = folder / PLAN
    if resume:
        if not plan.is_file() or not (folder / STATE).is_file():
            raise LoopedError(f"{folder} holds no unfinished run to resume; leave --resume out to start one there")
        _check_same(read_object(plan), _plain(options))
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        if not (plan.is_file() or any(folder.glob("gate.json")) or any(folder.glob("*/gate.json"))):
            raise LoopedError(f"{folder} is not empty and holds no gate; give another folder")
        if not overwrite:
            saved = (folder / STATE).is_file()
            how = "continue it with --resume or replace it with" if saved else "replace it with"
            raise LoopedError(f"{folder} already holds a run; {how} --overwrite")
    return folder


def begin(folder: Path, options: Any) -> None:
    """Note in the folder what run is in it, so that it can be resumed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).unlink(missing_ok=True)
        write_text(folder / PLAN, json.dumps(_plain(options), indent=2) + "\n")
    except OSError as error:
        raise LoopedError(f"cannot write {folder / PLAN}: {error.strerror or error}") from error


def replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Put a folder in the place of `folder` when `write` has filled it; until then nothing changes there.

    Raises LoopedError where it cannot be written, as on a full disk.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
            new = Path(partial) / "new"
            new.mkdir()
            write(new)
            if folder.exists():
                folder.rename(Path(partial) / "old")
            new.rename(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise LoopedError(f"cannot write {folder}: {why}; what was in it is as it was") from error


def rounded(value: Any) -> Any:
    """Floats to six digits, which is more than held-out tokens can tell."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _plain(options: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    return {name: value for name, value in plain.items() if name not in _FREE}


def _check_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = [name for name in new if old.get(name) != new[name]]
    if changed:
        shown = [f"--{name.replace('_', '-')} {_shown(old.get(name))}, now {_shown(new[name])}" for name in changed]
        more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        raise LoopedError(f"the run to resume was begun with other values: {'; '.join(shown[:_SHOWN])}{more}")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
