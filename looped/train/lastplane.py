"""Attention under a single K/V plane: a token reads earlier ones as last written, itself as it is now."""

# B rows, T tokens, H heads, G key/value heads, K head dimension

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.model.attention import dense_causal


class LastPlane:
    """`attend` in two passes over one batch.

    Recording: attention is dense and causal, each position's K/V is kept while it is `active`. After `replay`, query i
    of a core layer reads the kept K/V of j < i and the K/V given for i itself.
    """

    def __init__(self) -> None:
        self.active: Tensor | None = None
        self._core: range = range(0)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask: Tensor | None = None
        self._replaying = False

    def begin(self, core_layers: range) -> None:
        """Start recording the core layers."""
        self.reset()
        self._core = core_layers

    def replay(self) -> None:
        """From now on attend to what was recorded."""
        self.active, self._replaying = None, True

    def reset(self) -> None:
        self.active, self._replaying = None, False
        self._kept.clear()

    # opaque to the compiler: the pass and the layer must not become part of a compiled block
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if layer not in self._core:
            return dense_causal(layer, q, k, v)
        if not self._replaying:
            self._keep(layer, k, v)
            return dense_causal(layer, q, k, v)
        old_k, old_v = self._kept[layer]
        return self._attend_last(q, torch.cat((old_k, k), 1), torch.cat((old_v, v), 1))

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self._kept and self.active is not None:
            old_k, old_v = self._kept[layer]
            active = self.active[..., None, None]
            k, v = torch.where(active, k, old_k), torch.where(active, v, old_v)
        self._kept[layer] = (k, v)

    def _attend_last(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        length = q_BTHK.shape[1]
        if self._mask is None or self._mask.shape[0] != length or self._mask.device != q_BTHK.device:
            earlier = torch.ones(length, length, device=q_BTHK.device, dtype=torch.bool).tril(-1)
            own = torch.eye(length, device=q_BTHK.device, dtype=torch.bool)
            self._mask = torch.cat((earlier, own), 1)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=grouped).transpose(1, 2)
