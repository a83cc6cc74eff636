"""Attention over whole sequences, as training and the cacheless forward use it."""

# B rows, T tokens, H heads, G key/value heads, K head dimension

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q[..., H, K], k[..., G, K], v[..., G, K]) -> [..., H, K]; layer counts prelude, core, coda."""


def dense_causal(layer: int, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """Causal attention of full sequences, no cache: [B, T, H, K] to [B, T, H, K]."""
    q, k, v = (x.transpose(-3, -2) for x in (q_BTHK, k_BTGK, v_BTGK))
    grouped = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(-3, -2)
