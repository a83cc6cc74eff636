"""Paged attention through the Triton kernels of this package: any page size, no other library."""

# N rows, H heads, G key/value heads, K head dim

from __future__ import annotations

import functools

import torch
from torch import Tensor

from looped.errors import LoopedError
from looped.infer.backends.base import DecodeBatch, PrefillBatch
from looped.infer.pool import Pool
from looped.model.attention import Attend

try:
    from looped.infer.backends.kernels import interpreter
except ImportError as error:
    raise LoopedError(
        "backend 'triton' needs the package triton, which comes with CUDA builds of torch: pip install triton"
    ) from error

from looped.infer.backends.kernels.decode_groups import decode_groups
from looped.infer.backends.kernels.decode_heads import decode_heads
from looped.infer.backends.kernels.prefill import Tiles, prefill_pieces
from looped.infer.backends.kernels.splits import MAX_SPLITS, SPLIT_KEYS, make_scratch
from looped.infer.backends.kernels.write import write_kv

if interpreter.interpreting():
    interpreter.repair()

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TritonBackend:
    """See the module. Decode: one launch a layer stores K/V and attends; it may be captured in a CUDA graph."""

    name = "triton"
    pads_prefill = True
    by_rows = 64

    def __init__(self) -> None:
        self._tiled: tuple[PrefillBatch, Tiles] | None = None

    def check(self, page_size: int, head_dim: int, dtype: torch.dtype, device_type: str) -> None:
        """Refuses CPUs (unless Triton interprets), heads wider than 256 and dtypes the kernels do not compute."""
        interpreted = interpreter.interpreting()
        if device_type != "cuda" and not (device_type == "cpu" and interpreted):
            raise LoopedError(
                f"backend 'triton' needs an NVIDIA GPU, and the device is {device_type!r}: use backend 'sdpa' "
                "(TRITON_INTERPRET=1 runs the kernels slowly on a CPU, for tests)"
            )
        if head_dim > MAX_HEAD_DIM:
            raise LoopedError(f"backend 'triton' takes head_dim up to {MAX_HEAD_DIM}, got {head_dim}: use 'sdpa'")
        if dtype not in DTYPES:
            known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise LoopedError(f"backend 'triton' computes in {known}, got {str(dtype).removeprefix('torch.')}")
        if interpreted and dtype == torch.bfloat16:
            raise LoopedError("Triton's interpreter computes bfloat16 products wrongly: use dtype float32 with it")

    def describe(self) -> str:
        how = "interpreted" if interpreter.interpreting() else "compiled"
        return (
            f"triton ({how}; decode stores K/V and attends in one kernel, about every {SPLIT_KEYS} keys a split, at "
            f"most {MAX_SPLITS}; packed prefill in tiles; pages of any size)"
        )

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        table, page_size, kv_heads = pool.table_SPB, pool.page_size, pool.data.shape[-2]
        scratch = None

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            nonlocal scratch
            kv, heads = pool.layer(layer), q_NHK.shape[1]
            if scratch is None:  # the pool does not know how many query heads there are
                scratch = make_scratch(batch.positions, heads, kv, batch.max_len, multiprocessors(kv.device))
            if batch.packed:  # rows read each other's K/V; the kernel then stores the same once more
                write_kv(kv, table, page_size, batch.slots, batch.planes, batch.positions, k_NGK, v_NGK)
            run = decode_heads if heads == kv_heads else decode_groups
            return run(kv, table, page_size, batch, scratch, q_NHK, k_NGK, v_NGK)

        return attend

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        table, page_size = pool.table_SPB, pool.page_size
        kv_heads, head_dim = pool.data.shape[-2:]
        planes = torch.full_like(batch.slots, plane)

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            tiles = self._tiles_of(batch, q_NHK.shape[1] // kv_heads, head_dim, kv.dtype)
            write_kv(kv, table, page_size, batch.slots, planes, batch.positions, k_NGK, v_NGK)
            return prefill_pieces(kv, table, page_size, batch.slots, batch.positions, tiles, plane, q_NHK)

        return attend

    def _tiles_of(self, batch: PrefillBatch, group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
        """The same at every layer and loop step of a batch. What is captured in a graph makes a batch of its own."""
        if self._tiled is None or self._tiled[0] is not batch:
            self._tiled = (batch, Tiles(batch, group, head_dim, dtype))
        return self._tiled[1]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; where kernels are interpreted, few, so that splits still share programs."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
