"""CUDA graphs of the engine's stages: one per (stage, bucket), captured once at start and replayed ever after.

A stage is a function without arguments that reads static device buffers. Its batch is padded to a bucket with slot 0,
so a few graphs serve every batch size; loop steps differ by row, so there is no graph per depth.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from looped.errors import LoopedError

# While a graph is recorded the allocator cannot give back what it holds unused.
LOW_BYTES = 4 << 30

Outputs = tuple[Tensor | None, ...]
Stage = Callable[[], Outputs]


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes worth a graph: dense where padding would cost most, ever wider steps above, `max_rows` last."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(40, 65, 8), *range(80, 257, 16), *range(288, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class _Captured:
    """A graph and its outputs, whose memory every replay writes again."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self.graph, self.outputs = graph, outputs


class Graphs:
    """Captured stages by key, in one memory pool.

    They replay on one stream, so graphs may share the memory of their intermediate results; only outputs stay apart.
    Capture the largest bucket first: smaller ones then fit into what it took.
    """

    def __init__(self, device: torch.device, enabled: bool, max_rows: int) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.buckets = bucket_sizes(max_rows)
        self.seconds = 0.0
        self.num_bytes = 0
        self._device = device
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run(self, key: Hashable, stage: Stage) -> Outputs:
        """What `stage` returns: by replay where `key` was captured, by running it otherwise.

        A replay returns the same tensors each time: read them, in stream order, before the next one of this key.
        """
        captured = self._captured.get(key)
        if captured is None:
            return stage()
        captured.graph.replay()
        return captured.outputs

    def capture(self, key: Hashable, stage: Stage, warm_up: Stage | None = None) -> Outputs:
        """Record `stage` under `key`; nothing without graphs. Returns its outputs, which a later capture may read.

        It runs once before, on a side stream: kernels compile and libraries make their workspaces outside the graph.
        That run has its effects, so the caller points its inputs at slot 0; `warm_up` runs in its place where it does
        the same with less work.

        Raises `LoopedError` when the GPU's memory does not suffice.
        """
        if not self.enabled:
            return ()
        if key in self._captured:
            raise ValueError(f"{key!r} is captured already")
        started = time.perf_counter()
        # Nothing the collector might free, a tensor of another pool say, may go while a graph is recorded.
        gc.freeze()
        try:
            captured = self._captured[key] = self._record(stage, warm_up or stage)
        except RuntimeError as error:
            # The allocator goes on serving a broken capture's stream from its pool: both are given up.
            self._stream = self._pool = None
            if _out_of_memory(error):
                raise LoopedError(
                    f"there is not enough GPU memory to capture CUDA graphs ({len(self)} so far, for batches of up to "
                    f"{self.buckets[-1]}): lower max_num_seqs or num_pages, or turn graphs off"
                ) from error
            raise
        finally:
            gc.unfreeze()
            self.seconds += time.perf_counter() - started
        return captured.outputs

    def _record(self, stage: Stage, warm_up: Stage) -> _Captured:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
            main = torch.cuda.current_stream()
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                warm_up()
            main.wait_stream(self._stream)
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            if free < LOW_BYTES:
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info()[0]
            graph = torch.cuda.CUDAGraph()
            # `torch.cuda.graph` would empty the caches of device and host memory before each of many captures. Other
            # threads of a server may call CUDA meanwhile: only this one's calls are held to a capture's rules.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = stage()
                finally:
                    graph.capture_end()
            self.num_bytes += max(free - torch.cuda.mem_get_info()[0], 0)
        return _Captured(graph, outputs)

    def settle(self) -> None:
        """Give back what the runs before the captures took, once all of them are done."""
        if self.enabled:
            torch.cuda.empty_cache()

    def describe(self) -> str:
        """What is said once at start."""
        if not self.enabled:
            return "off"
        sizes = ", ".join(map(str, self.buckets))
        return (
            f"{len(self)} captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB, for batches padded to "
            f"{sizes}"
        )


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is, or came while handling, a lack of GPU memory: closing a broken capture raises again."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
