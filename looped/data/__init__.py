"""Data: word problems, drills, GSM8K, the tokenizer, packing, evaluation sets. Nothing here imports torch."""

from __future__ import annotations

from looped.data.build import build_dataset
from looped.data.documents import load_documents
from looped.data.evalsets import EVAL_SETS, eval_items
from looped.data.mixture import DataConfig, Mix
from looped.data.packed import PackedSet, read_packed
from looped.data.packing import ANSWER_NUMBER, ANSWER_SIDE, DIRECT

__all__ = [
    "ANSWER_NUMBER",
    "ANSWER_SIDE",
    "DIRECT",
    "EVAL_SETS",
    "DataConfig",
    "Mix",
    "PackedSet",
    "build_dataset",
    "eval_items",
    "load_documents",
    "read_packed",
]
