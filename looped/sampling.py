"""Choosing the next token from logits, for the reference decoder and the engine."""

# B rows, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from looped import rng


def sample(logits_BV: Tensor, temperature_B: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Next token ids [B]: greedy where the temperature is 0, else drawn with the Gumbel-max rule.

    `positions_B` is the position that the new token will have. The draw depends on (seed, position) alone.
    """
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    greedy = logits.argmax(-1)
    if not bool((temperature_B > 0).any()):
        return greedy
    u = rng.uniform(seeds_B, positions_B, rng.SAMPLING, logits.shape[-1])
    gumbel = -torch.log(-torch.log(u))
    scaled = logits.double() / temperature_B.clamp_min(1e-6)[:, None].double()
    return torch.where(temperature_B > 0, (scaled + gumbel).argmax(-1), greedy)
