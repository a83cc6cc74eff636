"""The folder of a run: what may be written where, and what a resumed run must share with the one it continues."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from looped.errors import LoopedError
from looped.files import check_folder, read_object, write_text
from looped.train.pretrain.recipe import Options, check

RECIPE, LOG, SUMMARY = "recipe.json", "metrics.jsonl", "summary.json"
_FIXED = ("model", "init", "objective", "recurrence", "optim", "data", "seed")
"""Parts of a recipe that a resumed run must share with the run it continues."""
_PLACES = ("data.folder", "data.workers", "data.gsm8k")
"""Keys of those parts that say where the data lies, not what it is."""
_TUNED = ("optim.lr", "optim.min_lr", "optim.clip", "optim.tokens", "optim.total_seconds")
"""Keys of those parts that may change on purpose: after a loss that broke, or to train longer."""
_SHOWN = 6


def check_run(options: Options) -> Path:
    """The output folder, untouched. Raises LoopedError for numbers out of range and a folder that cannot take the run,
    such as one that holds a run and nobody said what to do.
    """
    check(options)
    if options.output is None:
        raise LoopedError("output is missing: give a folder for the run with --output")
    if options.finish and options.max_seconds is None:
        raise LoopedError("--finish ends the schedule within --max-seconds, which is missing")
    folder = options.output
    if options.resume:
        from looped.train.pretrain.checkpoint import find

        if not find(folder):
            raise LoopedError(f"{folder} holds no checkpoint to resume; leave --resume out to start a run there")
        changed = _differences(read_object(folder / RECIPE), plain(options))
        wrong = [text for key, text in changed.items() if key not in _TUNED]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise LoopedError(
                f"the run to resume was begun with other values: {'; '.join(wrong[:_SHOWN])}{more}. Resume it with "
                f"its own recipe ({RECIPE} in its folder), or start another run"
            )
        return folder
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        if not options.overwrite:
            raise LoopedError(f"{folder} already holds a run; continue it with --resume or replace it with --overwrite")
        if not (folder / RECIPE).is_file():
            raise LoopedError(f"{folder} is not empty and holds no run of this program; give another folder")
    return folder


def prepare_folder(options: Options) -> Path:
    """The output folder of a new or resumed run, with its recipe; a run that is replaced goes away. Raises as above."""
    folder = check_run(options)
    if options.resume:
        changed = _differences(read_object(folder / RECIPE), plain(options))
        if changed:
            print(f"resumed with other values: {'; '.join(changed.values())}", file=sys.stderr, flush=True)
    else:
        if folder.is_dir() and any(folder.iterdir()):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RECIPE, json.dumps(plain(options), indent=2) + "\n")
    return folder


def plain(options: Options) -> dict[str, Any]:
    """The recipe in JSON's types."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return values


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Keys of the fixed parts whose values differ, each with `key old -> new`. A key that the older recipe lacks was
    not known when it was written.
    """
    before, after = (dict(_leaves({part: recipe.get(part) for part in _FIXED})) for recipe in (old, new))
    return {
        key: f"{key} {_text(before[key])} -> {_text(value)}"
        for key, value in after.items()
        if key not in _PLACES and key in before and before[key] != value
    }


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else key)]
    return [(path, value)]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
