"""Attention backends of the engine, by name."""

from __future__ import annotations

from looped.errors import LoopedError, unknown
from looped.infer.backends.base import Backend, DecodeBatch, PrefillBatch
from looped.infer.backends.sdpa import SdpaBackend

BACKEND_NAMES = ("auto", "sdpa", "triton", "flash")

__all__ = ["BACKEND_NAMES", "Backend", "DecodeBatch", "PrefillBatch", "get_backend"]


def get_backend(name: str) -> Backend:
    """The backend of a name; `auto` takes the best one there is."""
    if name not in BACKEND_NAMES:
        raise unknown("backend", name, BACKEND_NAMES)
    if name in ("triton", "flash"):
        raise LoopedError(f"backend {name!r} is not available yet; use 'sdpa' or 'auto'")
    return SdpaBackend()
