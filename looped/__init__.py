"""looped: a framework for looped language models and the engine that serves them.

Names below load on first use, so that `import looped` and `looped --help` do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from looped.errors import LoopedError

if TYPE_CHECKING:
    from looped.decode import PrefillSchedule, generate
    from looped.gates import load_gate
    from looped.infer import LLM, SamplingParams
    from looped.model import load, save

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "LoopedError",
    "PrefillSchedule",
    "SamplingParams",
    "__version__",
    "generate",
    "load",
    "load_gate",
    "save",
]

_HOMES = {
    "LLM": "looped.infer",
    "PrefillSchedule": "looped.decode",
    "SamplingParams": "looped.infer",
    "generate": "looped.decode",
    "load": "looped.model",
    "load_gate": "looped.gates",
    "save": "looped.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'looped' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
