"""What a device can do at most, measured; its clock and its energy meter."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from looped.analysis.floors import Ceilings

_GPU_BYTES, _CPU_BYTES = 4 << 30, 128 << 20
_GPU_SIDE, _CPU_SIDE = 8192, 1024


def wait(device: torch.device) -> None:
    """Until everything queued has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Points in a device's stream: seconds between them, once `wait` was called. Wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._gpu = device.type == "cuda"

    def mark(self) -> None:
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds from each mark to the next."""
        if self._gpu:
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in zip(self._times[:-1], self._times[1:], strict=True)]


def time_of(run: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    """The median of the seconds that `run` takes on the device."""
    run()
    marks = Marks(device)
    for _ in range(repeats):
        marks.mark()
        run()
    marks.mark()
    wait(device)
    return statistics.median(marks.spans())


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Bytes a second of a large read or copy, whichever is faster, and FLOPs a second of a square matmul."""
    found = Ceilings(_bandwidth(device), product_flops(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _bandwidth(device: torch.device) -> float:
    num_bytes = _CPU_BYTES
    if device.type == "cuda":
        num_bytes = min(_GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * num_bytes / time_of(lambda: target.copy_(source), device)
    return max(copy, num_bytes / time_of(lambda: source.sum(), device))


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of a product of square matrices."""
    side = _GPU_SIDE if device.type == "cuda" else _CPU_SIDE
    # a generator of its own: a run in training must draw the same numbers whether this was measured or not
    dice = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=dice).to(dtype) for _ in range(2))
    return 2 * side**3 / time_of(lambda: a @ b, device)


def describe(device: torch.device) -> str:
    """The device's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class EnergyMeter:
    """Joules that a GPU has used, read from its driver; None where it does not say."""

    def __init__(self, device: torch.device) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        found = library.nvmlInit_v2() == 0
        if found and library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) == 0:
            self._library = library

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        value = ctypes.c_ulonglong()
        if self._library is None:
            return None
        if self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(value)):
            return None
        return value.value / 1e3
