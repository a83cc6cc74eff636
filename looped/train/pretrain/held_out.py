"""The held-out loss that ranks the checkpoints of a run."""

from __future__ import annotations

import math
from typing import Any

import torch

from looped.kv import get_layout
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.pretrain import ranks
from looped.train.pretrain.losses import chunked_loss, logits_loss
from looped.train.pretrain.rollout import Setting, never, roll
from looped.train.pretrain.strategy import is_sharded
from looped.train.pretrain.windows import Batch, Windows

_ROWS = 4
_PASSES = 2


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
    """At full depth, under the layout that the model is served with where that overwrites planes."""
    layout = get_layout(model.config.default_layout)
    setting = Setting(layout if layout.cut_sensitive else get_layout("depth"), passes=_PASSES)
    positions = torch.arange(batch.inputs.shape[-1], device=batch.inputs.device)
    state = model.init_state(torch.zeros_like(batch.inputs), positions.expand_as(batch.inputs))
    h = roll(model, batch.inputs, model.config.max_loops, setting, lambda: never, state).states[-1]
    if model.config.injection:
        return logits_loss(model.coda(h, positions, dense_causal), batch.targets)
    return chunked_loss(model.readout(h), model.head.weight, batch.targets)
