"""Lightning's trainer without what is done here otherwise: its loggers, checkpoints, bars and advice."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning
import torch

# Advice for other set-ups: loaders yield what is made in this process, and there is no validation loop.
_UNWANTED = (".*not have many workers.*", ".*GPU available but.*", ".*`IterableDataset`.*", ".*mid-epoch.*")
_DEPRECATED = (".*treespec.*", ".*LeafSpec.* is deprecated.*")


def bare_trainer(device: torch.device, callbacks: Sequence[lightning.Callback], **more: Any) -> lightning.Trainer:
    """A trainer on one device, or as `more` says, that does what its callbacks do and nothing else; without noise."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (*_UNWANTED, *_DEPRECATED):
        warnings.filterwarnings("ignore", text)
    gpu = device.type == "cuda"
    return lightning.Trainer(
        accelerator="gpu" if gpu else "cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"devices": [device.index or 0] if gpu else 1} | more),
    )
