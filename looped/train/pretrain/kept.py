"""Attention in training over the K/V that tokens leave when they exit, without a loop over tokens.

Each class is the `attend` of one forward over whole sequences and follows the loop: `begin(step, active)` before every
step, `leave(leaving, step)` after it.
"""

# B rows, T tokens, H heads, G key/value heads, K head dimension

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from looped.kv import KVLayout
from looped.model.attention import dense_causal
from looped.train.pretrain.streams import TwoStreams

Pair = tuple[Tensor, Tensor]


class LoopAttend(Protocol):
    """`attend` of a forward that knows at which step it is and who is still in the loop."""

    def begin(self, step: int, active: Tensor) -> None:
        """Step `step` (from 1) comes; tokens of active [B, T] are in the loop, what others write is nobody's."""

    def leave(self, leaving: Tensor, step: int) -> None:
        """The tokens of leaving [B, T] exit after `step`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Dense:
    """Causal attention to the present step's K/V: nobody exits (`depth`)."""

    def begin(self, step: int, active: Tensor) -> None: ...

    def leave(self, leaving: Tensor, step: int) -> None: ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_causal(layer, q, k, v)


class _Kept:
    """K/V by layer, each position's as of the last step at which it was active."""

    def __init__(self) -> None:
        self._active: Tensor | None = None
        self._kept: dict[int, Pair] = {}

    def begin(self, step: int, active: Tensor) -> None:
        if step == 1:
            self._kept.clear()
        self._active = active[..., None, None]

    def leave(self, leaving: Tensor, step: int) -> None: ...

    def keep(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """Take over the K/V [B, T, G, K] of the positions that are active; all that is kept now."""
        if layer in self._kept and self._active is not None:
            old_k, old_v = self._kept[layer]
            k, v = torch.where(self._active, k, old_k), torch.where(self._active, v, old_v)
        self._kept[layer] = (k, v)
        return k, v


class BestAvailable(_Kept):
    """Position j offers step r's queries its K/V of step min(r, e_j) (ragged KV, eq. 7); gradients reach it.

    Exact for causal attention, because whether j is active at step r depends on nothing to its right. What a token
    computes past its own exit means nothing here.
    """

    # opaque to the compiler: which layer and step this is must not become part of a compiled block
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_causal(layer, q.to(v.dtype), *self.keep(layer, k.to(v.dtype), v))


class PrivateDepths(_Kept):
    """The same offers, detached; past its own exit a token goes on privately, with its own K/V of the present step.

    Counterfactual training (ragged KV, eq. 17): up to e_j the private path is the committed one, so one forward is
    both the rollout that commits and all its alternatives.
    """

    def __init__(self, streams: TwoStreams, core: range) -> None:
        super().__init__()
        self._streams, self._core = streams, core

    # opaque to the compiler, as above
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if layer not in self._core:
            return dense_causal(layer, q, k, v)
        return self._streams(q, *self.keep(layer, k.detach(), v.detach()), k, v)


class Planes:
    """Attention under a layout whose planes are overwritten: what j left in a plane depends on its last steps.

    A later token reads each earlier token's plane as that token's exit left it, so a forward reads what an earlier
    forward found (`left`); without one it is dense. `found` is what tokens leave in this forward, (layer, plane) to
    K/V [B, T, G, K].
    """

    def __init__(
        self,
        layout: KVLayout,
        core: range,
        num_loops: int,
        streams: TwoStreams,
        left: dict[tuple[int, int], Pair] | None,
    ) -> None:
        self._layout, self._core, self._num_loops = layout, core, num_loops
        self._streams, self._left = streams, left
        self._step, self._active = 1, torch.empty(0)
        self.found: dict[tuple[int, int], Pair] = {}

    def begin(self, step: int, active: Tensor) -> None:
        self._step, self._active = step, active[..., None, None]

    def leave(self, leaving: Tensor, step: int) -> None:
        """Planes that the leaving tokens never wrote are copies of their last one."""
        for plane, source in self._layout.missing_planes(step, self._num_loops):
            for layer in self._core:
                self._put(layer, plane, self.found[layer, source], leaving[..., None, None])

    def _put(self, layer: int, plane: int, new: Pair, where: Tensor) -> None:
        old = self.found.get((layer, plane))
        if old is not None:
            new = torch.where(where, new[0], old[0]), torch.where(where, new[1], old[1])
        self.found[layer, plane] = new

    # opaque to the compiler, as above
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if layer not in self._core:
            return dense_causal(layer, q, k, v)
        plane = self._layout.write_plane(self._step)
        self._put(layer, plane, (k, v), self._active)
        if self._left is None:
            return dense_causal(layer, q, k, v)
        return self._streams(q, *self._left[layer, plane], k, v)
