"""Attention in training over the K/V that tokens left when they exited, without a loop over tokens."""

# B rows, T tokens, H heads, G key/value heads, K head dimension

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.model.attention import dense_causal


class Kept:
    """K/V by layer, each position's as of the last step at which it was active.

    Set `active` [B, T] (tokens that still loop) before every step; call `reset` before every forward.
    """

    def __init__(self) -> None:
        self.active: Tensor | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self) -> None:
        self.active = None
        self._kept.clear()

    def keep(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take over the K/V [B, T, G, K] of the positions that are active; all that is kept now."""
        if layer in self._kept and self.active is not None:
            old_k, old_v = self._kept[layer]
            active = self.active[..., None, None]
            k, v = torch.where(active, k, old_k), torch.where(active, v, old_v)
        self._kept[layer] = (k, v)
        return k, v


class BestAvailable(Kept):
    """`attend` of one ragged forward: position j offers step r's queries its K/V of step min(r, e_j).

    Exact for causal attention, because whether j is active at step r depends on nothing to its right.
    """

    # opaque to the compiler: which layer and step this is must not become part of a compiled block
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_causal(layer, q.to(v.dtype), *self.keep(layer, k.to(v.dtype), v))


class LastPlane(Kept):
    """`attend` under a single K/V plane, in two passes over one batch.

    Recording: attention is dense and causal, and K/V are kept. After `replay`, query i of a core layer reads the kept
    K/V of j < i and the K/V given for i itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._core: range = range(0)
        self._mask: Tensor | None = None
        self._replaying = False

    def begin(self, core_layers: range) -> None:
        """Start recording the core layers."""
        self.reset()
        self._core = core_layers

    def replay(self) -> None:
        """From now on attend to what was recorded."""
        self._replaying = True

    def reset(self) -> None:
        super().reset()
        self._replaying = False

    # opaque to the compiler: the pass and the layer must not become part of a compiled block
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if layer in self._core and self._replaying:
            old_k, old_v = self._kept[layer]
            return self._attend_last(q, torch.cat((old_k, k), 1), torch.cat((old_v, v), 1))
        if layer in self._core:
            self.keep(layer, k, v)
        return dense_causal(layer, q, k, v)

    def _attend_last(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        """Queries over S = 2 T keys: the kept ones, then those of now."""
        length = q_BTHK.shape[1]
        if self._mask is None or self._mask.shape[0] != length or self._mask.device != q_BTHK.device:
            earlier = torch.ones(length, length, device=q_BTHK.device, dtype=torch.bool).tril(-1)
            own = torch.eye(length, device=q_BTHK.device, dtype=torch.bool)
            self._mask = torch.cat((earlier, own), 1)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=grouped).transpose(1, 2)
