"""Between host and device without waiting: small uploads through pinned memory, results that are read later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | NDArray[np.generic],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A small host array as a tensor on the device, in stream order and without waiting for it."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Device tensors on their way to the host. The copies are queued at once, so the sources may be reused by later
    launches; `wait` gives the values."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: list[Tensor | None] = []
        for tensor in tensors:
            if tensor is None:
                self._host.append(None)
            elif tensor.device.type == "cpu":
                self._host.append(tensor.clone())
            else:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.append(host.copy_(tensor, non_blocking=True))
                self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor | None]:
        """The values, in the order given; blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
