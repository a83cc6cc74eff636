"""What the device does to page tables and planes by itself: fixed shapes, no wait, fit for a CUDA graph.

These are the PyTorch versions; on a GPU with Triton `plane_ops` gives kernels that do the same (`backends/kernels`).
Padding rows have slot 0 and may be many; a row that must change nothing is pointed at slot 0, or at page 0.
"""

# S slots, P planes, N rows, C pages of a ring

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from looped.infer.pool import Pool

log = logging.getLogger("looped")


class PlaneOps(NamedTuple):
    """`take_pages`, `alias_planes` and `copy_planes` as below, or as kernels."""

    take: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    alias: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy: Callable[[Pool, Tensor, Tensor, Tensor, Tensor, int], None]


def plane_ops(device: torch.device) -> PlaneOps:
    """Kernels on a GPU that has Triton, else PyTorch."""
    if device.type == "cuda":
        try:
            from looped.infer.backends.kernels import planes, rings
        except ImportError:
            log.info("K/V planes are kept by PyTorch, not by kernels: Triton is not installed")
        else:
            return PlaneOps(rings.take_pages, rings.alias_planes, planes.copy_planes)
    return PlaneOps(take_pages, alias_planes, copy_planes)


def take_pages(
    table_SPB: Tensor, ring_SC: Tensor, taken_S: Tensor, at_N: Tensor, positions_N: Tensor, steps_N: Tensor
) -> None:
    """The next page of each slot's ring becomes the page of (plane `steps` - 1, `positions`); C is a power of two."""
    taken_N = taken_S[at_N]
    table_SPB[at_N, steps_N - 1, positions_N] = ring_SC[at_N, taken_N & (ring_SC.shape[1] - 1)]
    taken_S[at_N] = taken_N + 1


def alias_planes(table_SPB: Tensor, at_N: Tensor, positions_N: Tensor, depths_N: Tensor, leaving_N: Tensor) -> None:
    """Tokens that leave after `depths` steps: every later plane is the last one they wrote. Others keep theirs."""
    num_planes = table_SPB.shape[1]
    planes_P = torch.arange(num_planes, device=table_SPB.device)
    rows = at_N[:, None], planes_P, positions_N[:, None]
    depths_N1 = torch.where(leaving_N, depths_N, num_planes).clamp(1, num_planes)[:, None]
    pages_NP = table_SPB[rows]
    table_SPB[rows] = torch.where(planes_P < depths_N1, pages_NP, pages_NP.gather(1, depths_N1 - 1))


def copy_planes(
    pool: Pool, at_N: Tensor, positions_N: Tensor, depths_N: Tensor, leaving_N: Tensor, num_planes: int
) -> None:
    """Tokens that leave after `depths` steps: copy the last plane they wrote into every later one, in all layers."""
    if pool.data.device.type == "cpu":
        # Look before copying: most batches have few rows to copy, or none.
        rows = (leaving_N & (depths_N < num_planes)).nonzero().squeeze(1)
        if not len(rows):
            return
        at_N, positions_N, depths_N, leaving_N = (x[rows] for x in (at_N, positions_N, depths_N, leaving_N))
    source_N = pool.rows(at_N, (depths_N - 1).clamp(0, num_planes - 1), positions_N)
    for plane in range(1, num_planes):
        copied_N = leaving_N & (depths_N <= plane)
        target_N = pool.rows(at_N, torch.full_like(at_N, plane), positions_N)
        pool.data[:, torch.where(copied_N, target_N, 0)] = pool.data[:, torch.where(copied_N, source_N, 0)]
