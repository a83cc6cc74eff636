"""Tasks by name, and their data files. Imports neither torch nor lm-evaluation-harness: a wrong name fails at once.

A task is a YAML file of lm-evaluation-harness under `eval/`; `gsm8k` is the library's own `gsm8k_cot`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from looped.data.gsm8k import columns
from looped.data.rows import read_file
from looped.errors import LoopedError, unknown
from looped.files import shipped

GSM8K = "gsm8k"
GSM8K_FILE = "gsm8k/gsm8k-cot.yaml"  # in the library's folder of tasks
COLUMNS = ("question", "answer")
HARNESS = "python -m looped.eval.harness"


def task_files() -> dict[str, Path]:
    """The shipped task files by name; names are written with hyphens."""
    files: dict[str, Path] = {}
    for path in sorted(shipped("eval").glob("**/*.yaml")):
        named = re.search(r"^task:\s*(\S+)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if named:
            files[named[1].replace("_", "-")] = path
    return files


def task_names() -> list[str]:
    return [GSM8K, *task_files()]


def check_task(name: str) -> str:
    """The task's name as results use it. Raises `LoopedError` with the nearest name for an unknown one."""
    plain = name.replace("_", "-")
    if plain in (GSM8K, "gsm8k-cot"):
        return GSM8K
    names = task_names()
    if plain not in names:
        raise LoopedError(f"{unknown('task', name, names)}; other tasks of lm-evaluation-harness run with {HARNESS}")
    return plain


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file with the columns question and answer, as text.

    Raises `LoopedError` for a file that is missing, cannot be read, is empty or lacks a column.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise LoopedError(f"the data file {file} {what}; give a JSONL or Parquet file with {' and '.join(COLUMNS)}")
    rows = [row for row, _, _ in read_file(file)]
    if not rows:
        raise LoopedError(f"the data file {file} has no rows; give one with {' and '.join(COLUMNS)}")
    for number, row in enumerate(rows, start=1):
        missing = [name for name in COLUMNS if row.get(name) is None]
        if missing:
            raise LoopedError(
                f"row {number} of {file} has no {' and no '.join(missing)}; "
                f"columns needed: {', '.join(COLUMNS)}; columns found: {', '.join(columns(rows))}"
            )
    return [{name: str(row[name]) for name in COLUMNS} for row in rows]
