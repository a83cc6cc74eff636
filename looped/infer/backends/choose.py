"""Which attention backend an engine runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from looped.errors import LoopedError, unknown
from looped.infer.backends.base import Backend

BACKEND_NAMES = ("auto", "sdpa", "triton", "flash")
# What `auto` tries, in order: the fastest first, what serves everything last.
PREFERENCE = {"cuda": ("triton+flash", "triton", "sdpa")}


class PairedBackend:
    """Decode on Triton, prefill on FlashAttention: each where it is the faster one.

    Measured on an H200 with bfloat16 and heads of 128, against FlashAttention-3: Triton decodes contexts of up to 256
    tokens in 50 to 75 % of its time, is even at 1,000 and takes up to 30 % longer at 4,000; of prompts in chunks of
    2,048 tokens FlashAttention-3 takes two thirds of Triton's time, half with 4,096 tokens before them.
    """

    name = "triton+flash"

    def __init__(self, decoding: Backend, prefilling: Backend) -> None:
        self._decoding, self._prefilling = decoding, prefilling
        self.decode, self.prefill = decoding.decode, prefilling.prefill

    @property
    def pads_prefill(self) -> bool:
        return self._prefilling.pads_prefill

    @property
    def by_rows(self) -> int:
        return self._prefilling.by_rows

    def check(self, page_size: int, head_dim: int, dtype: torch.dtype, device_type: str) -> None:
        for backend in (self._prefilling, self._decoding):
            backend.check(page_size, head_dim, dtype, device_type)

    def describe(self) -> str:
        return f"decode {self._decoding.describe()}, prefill {self._prefilling.describe()}"


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

    `auto` takes the first that is installed and serves them of triton for decode with flash for prefill, triton, and
    sdpa (on a CPU: sdpa), and says what kept it from the others. A backend asked for by name never falls back.

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
        return Choice(backend, "".join(f"; not chosen: {reason}" for reason in dict.fromkeys(refused)))
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


def _paired() -> Backend:
    return PairedBackend(_MAKERS["triton"](), _MAKERS["flash"]())


_MAKERS: dict[str, Callable[[], Backend]] = {
    "sdpa": _sdpa,
    "triton": _triton,
    "flash": _flash,
    "triton+flash": _paired,
}
