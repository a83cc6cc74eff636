"""Which attention backend an engine runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from looped.errors import LoopedError, unknown
from looped.infer.backends.base import Backend

BACKEND_NAMES = ("auto", "sdpa", "triton", "flash")
# What `auto` tries, in order: the fastest first, what serves everything last.
PREFERENCE = {"cuda": ("flash", "triton", "sdpa")}


class Choice(NamedTuple):
    """A backend and why it is this one."""

    backend: Backend
    why: str

    def describe(self) -> str:
        """What is said once at start."""
        return f"{self.backend.describe()}{self.why}"


def choose_backend(
    name: str, page_sizes: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> Choice:
    """The backend of a name, fit for a model and for the page sizes of all its pools.

    `auto` takes the first of flash, triton and sdpa that is installed and serves them (on a CPU: sdpa), and says what
    kept it from the others. A backend asked for by name never falls back.

    Raises `LoopedError` for an unknown name, and where the one asked for is missing or does not serve the model.
    """
    if name not in BACKEND_NAMES:
        raise unknown("backend", name, BACKEND_NAMES)

    def fit(candidate: str) -> Backend:
        backend = _MAKERS[candidate]()
        for page_size in page_sizes:
            backend.check(page_size, head_dim, dtype, device.type)
        return backend

    if name != "auto":
        return Choice(fit(name), "")
    refused: list[str] = []
    for candidate in PREFERENCE.get(device.type, ("sdpa",)):
        try:
            backend = fit(candidate)
        except LoopedError as error:
            refused.append(str(error))
            continue
        return Choice(backend, "".join(f"; not chosen: {reason}" for reason in refused))
    raise AssertionError("sdpa refuses nothing")


def _sdpa() -> Backend:
    from looped.infer.backends.sdpa import SdpaBackend

    return SdpaBackend()


def _triton() -> Backend:
    from looped.infer.backends.triton import TritonBackend

    return TritonBackend()


def _flash() -> Backend:
    from looped.infer.backends.flash import FlashBackend

    return FlashBackend()


_MAKERS: dict[str, Callable[[], Backend]] = {"sdpa": _sdpa, "triton": _triton, "flash": _flash}
