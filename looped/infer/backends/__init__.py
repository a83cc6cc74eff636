"""Attention backends of the engine, by name."""

from __future__ import annotations

from looped.infer.backends.base import Backend, DecodeBatch, Piece, PrefillBatch
from looped.infer.backends.choose import BACKEND_NAMES, choose_backend

__all__ = ["BACKEND_NAMES", "Backend", "DecodeBatch", "Piece", "PrefillBatch", "choose_backend"]
