"""Reads a packed set."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from looped.data.build import MANIFEST
from looped.errors import LoopedError
from looped.files import read_object


class PackedSet(NamedTuple):
    """Windows [N, T + 1] and the marks of their tokens [N, T + 1], left on disk; what their builder says of them.

    Plain text has no marks.
    """

    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    mask: NDArray[np.uint8] | None
    manifest: dict[str, Any]


def read_packed(folder: str | Path) -> PackedSet:
    """The set in a folder that `build_dataset` or `build_texts` wrote. Raises LoopedError where there is none."""
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        raise LoopedError(f"{path} holds no packed data set; build one with looped.data.build_dataset first.")
    manifest = read_object(path / MANIFEST)
    try:
        tokens = np.load(path / "tokens.npy", mmap_mode="r")
        mask = np.load(path / "mask.npy", mmap_mode="r") if (path / "mask.npy").exists() else None
    except (OSError, ValueError) as error:
        raise LoopedError(
            f"the packed data set in {path} is damaged ({error}); remove the folder to build it again"
        ) from error
    return PackedSet(tokens, mask, manifest)
