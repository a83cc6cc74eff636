"""Evaluation: scores by task, KV layout and gate, with lm-evaluation-harness underneath and the engine answering.

The library itself takes seconds to import, so nothing here imports it before a score is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looped.eval.evaluate import evaluate
    from looped.eval.result import EvalResult, Score
    from looped.eval.setting import Setting

__all__ = ["EvalResult", "Score", "Setting", "evaluate"]

_HOMES = {"EvalResult": "result", "Score": "result", "Setting": "setting", "evaluate": "evaluate"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looped.eval' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"looped.eval.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
