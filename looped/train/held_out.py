"""The held-out loss that ranks the checkpoints of a run."""

from __future__ import annotations

import math
from typing import Any

import torch

from looped.model import LoopedLM
from looped.train import ranks
from looped.train.losses import chunked_loss, logits_loss
from looped.train.strategy import is_sharded
from looped.train.windows import Batch, Windows

_ROWS = 4


@torch.no_grad()
def held_out_loss(model: LoopedLM, windows: Windows, num_windows: int, autocast: Any) -> float | None:
    """Mean cross-entropy in nats at full depth of the first windows, in the context `autocast`; None for no number.

    All processes must ask for it; each computes its share.
    """
    chosen = torch.arange(min(num_windows, len(windows)))[ranks.rank() :: ranks.world()]
    weight = 1.0 if len(chosen) else 0.0  # with fewer windows than processes some compute one that does not count
    sums = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()
    try:
        # without gradients blocks would be compiled once more, for a few seconds of use
        with autocast, torch.compiler.set_stance("force_eager"):
            indices = chosen if len(chosen) else torch.zeros(1, dtype=torch.long)
            for start in range(0, len(indices), _ROWS):
                losses = _losses(model, windows.rows(indices[start : start + _ROWS]))
                sums += weight * torch.tensor([float(losses.sum()), losses.numel()], dtype=torch.float64)
    finally:
        model.train(training)
        if is_sharded(model):
            shards: Any = model
            shards.reshard()
    device = model.device
    total = ranks.total(sums.to(device, torch.float32) if device.type == "cuda" else sums)
    loss = float(total[0] / total[1])
    return loss if math.isfinite(loss) else None


def _losses(model: LoopedLM, batch: Batch) -> torch.Tensor:
    if model.config.injection:
        return logits_loss(model.logits(batch.inputs), batch.targets)
    return chunked_loss(model.states(batch.inputs)[-1], model.head.weight, batch.targets)
