"""Files: those that ship beside the code, and writing one so that it is whole or absent.

Task definitions and workloads (`eval/`) and recipes (`recipes/`) stand at the top of the repository, where a person
looks for them; the wheel carries them as `looped/shipped/eval` and `looped/shipped/recipes` (pyproject.toml maps them).
One lookup serves a checkout, an editable and a normal install.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from looped.errors import LoopedError, shown

PACKAGE = Path(__file__).resolve().parent


def shipped_root() -> Path:
    """The folder that holds `eval/` and `recipes/`."""
    installed = PACKAGE / "shipped"
    return installed if installed.is_dir() else PACKAGE.parent


def shipped(path: str | Path) -> Path:
    """A shipped file or folder by its path in the repository, such as `eval/gsm8k_cot.yaml`."""
    return shipped_root() / path


def find(path: str | Path, kind: str) -> Path:
    """The file `path`, from the working directory or else shipped. Raises LoopedError, with the nearest name there."""
    for candidate in (Path(path), shipped(path)):
        if os.path.isfile(candidate):  # False for names that no file can have, where pathlib raises
            return candidate
    folder, suffix = Path(path).parent, Path(path).suffix
    places = [place for place in (folder, shipped(folder)) if os.path.isdir(place)]
    files = [file for place in places for file in place.iterdir() if file.suffix == suffix and file.is_file()]
    names = [str(folder / file.name) for file in files]
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "give the path of a file that does"
    raise LoopedError(f"{kind} {shown(str(path), 200)} does not exist; {hint}")


def existing(path: Path) -> Path:
    """The nearest of `path` and the folders above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def check_folder(folder: Path) -> None:
    """Raise LoopedError where `folder` is not, and cannot become, a folder to write in: before work goes into it."""
    above = existing(folder)
    if not above.is_dir():
        raise LoopedError(f"{above} is a file; give a folder")
    if not os.access(above, os.W_OK):
        raise LoopedError(f"cannot write in {above}; give another folder")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises LoopedError, with the file's name, where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoopedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise LoopedError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise LoopedError(f"{path} holds no JSON object")
    return value


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write in the place of `path`, which it takes when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
