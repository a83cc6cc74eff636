"""The looped LM: layers, stages, families, weights. `load` gives a model by name, `save` writes one."""

from looped.model.loading import load, save
from looped.model.looped_lm import LoopedLM

__all__ = ["LoopedLM", "load", "save"]
