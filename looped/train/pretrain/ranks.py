"""Several processes that train one model: which one this is, its part of a batch, sums over all of them."""

# B rows of this process's part of a micro-batch

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_NUMBERS = 32 << 20
"""Gradients that travel in one piece: few enough to need little memory beside them, enough to fill the link."""


def world() -> int:
    """How many processes train together; 1 where nobody said otherwise."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def launched_rank() -> int:
    """The number that a launcher gave this process, known before the processes have met; 0 without a launcher."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    return int(os.environ.get("NODE_RANK", 0)) + int(os.environ.get("LOCAL_RANK", 0))


def mine(rows: Tensor) -> Tensor:
    """This process's rows of a tensor made for the whole micro-batch: [world x B, ...] to [B, ...].

    What is random in training is drawn for the whole micro-batch on every process, so that it does not depend on how
    many there are.
    """
    count = rows.shape[0] // world()
    return rows[rank() * count : (rank() + 1) * count]


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes; differentiable.

    Each process's loss counts, so the gradient is the sum of theirs. With gradients averaged over the processes
    afterwards, a loss made of totals has the gradient of one process with the whole batch.
    """
    if world() == 1:
        return value
    summed: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return summed


def mean(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes; differentiable."""
    return total(value) / world()


def largest(value: Tensor) -> Tensor:
    """Element by element, the largest over all processes."""
    if world() > 1:
        value = value.clone()
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        out = value.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out)
        return out


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over the processes: once an optimiser step.

    A looped block's gradient is complete only when the backward pass has left its first loop step, so there is nothing
    to send while that pass runs, and one exchange at its end costs no more than an overlapped one.
    """
    if world() == 1:
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            bucket.append(parameter.grad)
            if sum(grad.numel() for grad in bucket) >= _BUCKET_NUMBERS:
                _average(bucket)
                bucket = []
    _average(bucket)


def _average(grads: list[Tensor]) -> None:
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).div_(world())
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):  # type: ignore[no-untyped-call]
        grad.copy_(part.view_as(grad))


class Agreement:
    """Small numbers that all processes must share, exchanged on the host so that no process waits for its GPU."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if world() > 1 else None

    def largest(self, values: list[float]) -> list[float]:
        """Element by element, the largest that any process gave."""
        if self._group is None:
            return values
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in shared]

    def of_first(self, values: list[float]) -> list[float]:
        """The values of process 0."""
        if self._group is None:
            return values
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, 0, group=self._group)
        return [float(value) for value in shared]
