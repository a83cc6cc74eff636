"""Paged attention through the FlashAttention libraries, on NVIDIA GPUs in half precision: whichever imports.

FlashAttention-3 serves Hopper, splits long key sequences over the chip and finds a row's pages in the pool's table by
itself; FlashAttention-4 serves Hopper and Blackwell; FlashAttention 2 the rest, with pages of 256 tokens or multiples.
"""

# N rows, B sequences of a launch, H heads, G key/value heads, K head dim, S slots, P planes, R = S * P, L blocks

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.errors import LoopedError
from looped.infer.backends.base import Backend, DecodeBatch, PrefillBatch
from looped.infer.pool import Pool
from looped.model.attention import Attend

HALVES = (torch.bfloat16, torch.float16)


class Reads(NamedTuple):
    """Which keys the B sequences of a launch read. All on the device, int32."""

    table_RL: Tensor
    """The pool's page table, trimmed to the longest sequence."""
    rows_B: Tensor
    """Each sequence's row of it."""
    lens_B: Tensor
    """Keys each sequence has, the tokens of this launch included."""
    starts_B1: Tensor | None
    """Prefill: where each piece's queries start, and the end; None: one query a sequence."""
    max_queries: int

    def gathered(self) -> Reads:
        """The same with a table of the batch's own rows, in order, for libraries that cannot look them up."""
        return self._replace(table_RL=self.table_RL.index_select(0, self.rows_B))


class Library:
    """A FlashAttention library: what it serves, and how it is called."""

    title: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str]
    entry: ClassVar[str]
    """A function it must have: `flash_attn` imports as an empty package where only its `cute` is installed."""
    capabilities: ClassVar[tuple[int, ...]]
    """Major compute capabilities whose paged attention it serves."""
    page_multiple: ClassVar[int] = 1
    finds_rows: ClassVar[bool] = False
    """Whether it reads `rows_B`; the others need a gathered table."""
    pads_prefill: ClassVar[bool] = False
    """Whether loose bounds and places without a piece cost nothing in a prefill."""
    by_rows: ClassVar[int] = 512

    def __init__(self, functions: ModuleType, capability: int) -> None:
        self.functions, self.capability = functions, capability

    @property
    def max_head_dim(self) -> int:
        return 256

    def attend(self, q_NHK: Tensor, k_pages: Tensor, v_pages: Tensor, reads: Reads) -> Tensor:
        """Causal attention [N, H, K] of queries to pages [pages, page_size, G, K]; a sequence's queries are its last
        tokens."""
        raise NotImplementedError


class FlashAttention3(Library):
    """Called below its Python function, whose wrapper costs the host more than the kernel takes in an eager prefill."""

    title = "FlashAttention-3"
    module, package, entry = "flash_attn_interface", "tokenspeed-fa3", "flash_attn_3_gpu"
    capabilities = (9,)
    finds_rows = True
    pads_prefill = True
    by_rows = 64

    def attend(self, q_NHK: Tensor, k_pages: Tensor, v_pages: Tensor, reads: Reads) -> Tensor:
        decode = reads.starts_B1 is None
        out: Tensor = self.functions.flash_attn_3_gpu.fwd(
            q_NHK[:, None] if decode else q_NHK,
            k_pages,
            v_pages,
            cu_seqlens_q=reads.starts_B1,
            seqused_k=reads.lens_B,
            max_seqlen_q=reads.max_queries,
            page_table=reads.table_RL,
            kv_batch_idx=reads.rows_B,
            softmax_scale=q_NHK.shape[-1] ** -0.5,
            is_causal=True,
            num_splits=0 if decode else 1,  # splits of a prefill would be sized for the longest keys there can be
        )[0]
        return out[:, 0] if decode else out


class FlashAttention4(Library):
    title = "FlashAttention-4"
    module, package, entry = "flash_attn.cute", "flash-attn-4", "flash_attn_varlen_func"
    capabilities = (9, 10, 11)

    @property
    def max_head_dim(self) -> int:
        return 256 if self.capability == 9 else 128

    def attend(self, q_NHK: Tensor, k_pages: Tensor, v_pages: Tensor, reads: Reads) -> Tensor:
        decode = reads.starts_B1 is None
        out, _ = self.functions.flash_attn_varlen_func(
            q_NHK[:, None] if decode else q_NHK,
            k_pages,
            v_pages,
            cu_seqlens_q=reads.starts_B1,
            max_seqlen_q=reads.max_queries,
            seqused_k=reads.lens_B,
            page_table=reads.table_RL,
            causal=True,
        )
        attended: Tensor = out[:, 0] if decode else out
        return attended


class FlashAttention2(Library):
    title = "FlashAttention 2"
    module, package, entry = "flash_attn", "flash-attn", "flash_attn_with_kvcache"
    capabilities = (8, 9, 10, 11, 12)
    page_multiple = 256

    def attend(self, q_NHK: Tensor, k_pages: Tensor, v_pages: Tensor, reads: Reads) -> Tensor:
        if reads.starts_B1 is None:
            out: Tensor = self.functions.flash_attn_with_kvcache(
                q_NHK[:, None],
                k_pages,
                v_pages,
                cache_seqlens=reads.lens_B,
                block_table=reads.table_RL,
                causal=True,
            )
            return out[:, 0]
        ends_B1 = F.pad(reads.lens_B.cumsum(0, dtype=torch.int32), (1, 0))
        attended: Tensor = self.functions.flash_attn_varlen_func(
            q_NHK,
            k_pages,
            v_pages,
            cu_seqlens_q=reads.starts_B1,
            cu_seqlens_k=ends_B1,
            max_seqlen_q=reads.max_queries,
            max_seqlen_k=reads.table_RL.shape[1] * k_pages.shape[1],
            block_table=reads.table_RL,
            causal=True,
        )
        return attended


LIBRARIES: tuple[type[Library], ...] = (FlashAttention3, FlashAttention4, FlashAttention2)


def find_library() -> Library:
    """The best library there is for this machine's GPU.

    Raises `LoopedError` without a GPU, and where none imports; it names the extras and what failed.
    """
    if not torch.cuda.is_available():
        raise LoopedError("backend 'flash' needs an NVIDIA GPU; use 'sdpa' or 'auto'")
    capability = torch.cuda.get_device_capability()[0]
    broken = []
    for kind in LIBRARIES:
        if capability not in kind.capabilities:
            continue
        try:
            functions = importlib.import_module(kind.module)
        except ModuleNotFoundError as error:
            if error.name is None or not kind.module.startswith(error.name):
                broken.append(f"{kind.title} lacks {error.name}")
            continue
        except Exception as error:  # compiled for another torch, or without its compiler: each fails in its own way
            broken.append(f"{kind.title} fails to import: {error}".splitlines()[0])
            continue
        if hasattr(functions, kind.entry):
            return kind(functions, capability)
    raise LoopedError(
        "backend 'flash' needs a FlashAttention library: install looped[fa3] (FlashAttention-3, Hopper) or looped[gpu] "
        f"(FlashAttention-4, Hopper and Blackwell), or use 'triton'{''.join(f' ({text})' for text in broken)}"
    )


class FlashBackend:
    """See the module. `library` None takes the best that imports."""

    name = "flash"

    def __init__(self, library: Library | None = None) -> None:
        self.library = find_library() if library is None else library
        self._holed: Backend | None = None

    def check(self, page_size: int, head_dim: int, dtype: torch.dtype, device_type: str) -> None:
        library = self.library
        if device_type != "cuda":
            raise LoopedError(f"backend 'flash' needs an NVIDIA GPU and the model is on {device_type!r}; use 'sdpa'")
        if dtype not in HALVES:
            raise LoopedError(
                f"backend 'flash' serves bfloat16 and float16, and the model is {str(dtype).removeprefix('torch.')}; "
                "load it in bfloat16 or use 'triton'"
            )
        if head_dim % 8 or head_dim > library.max_head_dim:
            raise LoopedError(
                f"{library.title} serves head dims that are multiples of 8 up to {library.max_head_dim}, and the "
                f"model's is {head_dim}; use 'triton'"
            )
        if page_size % library.page_multiple:
            raise LoopedError(
                f"{library.title} needs pages of a multiple of {library.page_multiple} tokens, and page_size is "
                f"{page_size}; set page_size={library.page_multiple} or use 'triton'"
            )

    def describe(self) -> str:
        try:
            release = f" {version(self.library.package)}"
        except PackageNotFoundError:
            release = ""
        return f"flash ({self.library.title}, {self.library.package}{release})"

    @property
    def pads_prefill(self) -> bool:
        return self.library.pads_prefill

    @property
    def by_rows(self) -> int:
        return self.library.by_rows

    def decode(self, pool: Pool, batch: DecodeBatch) -> Attend:
        rows_B = batch.slots * pool.table_SPB.shape[1] + batch.planes
        table_RL = self._table(pool, batch.max_len)
        reads = Reads(table_RL, rows_B.int(), (batch.positions + 1).int(), None, 1)
        return self._attend(pool, KVWriter(pool, batch.slots, batch.planes, batch.positions), reads)

    def prefill(self, pool: Pool, batch: PrefillBatch, plane: int) -> Attend:
        if batch.holed:
            return self._for_holes().prefill(pool, batch, plane)
        rows_B = batch.slots_B * pool.table_SPB.shape[1] + plane
        table_RL = self._table(pool, batch.max_len)
        reads = Reads(table_RL, rows_B, batch.ends_B, batch.starts_B1, batch.longest)
        planes = torch.full_like(batch.slots, plane)
        return self._attend(pool, KVWriter(pool, batch.slots, planes, batch.positions), reads)

    def _table(self, pool: Pool, max_len: int) -> Tensor:
        return pool.table_SPB.view(-1, pool.table_SPB.shape[2])[:, : -(-max_len // pool.page_size)]

    def _attend(self, pool: Pool, writer: KVWriter, reads: Reads) -> Attend:
        library, page_size = self.library, pool.page_size
        if not library.finds_rows:
            reads = reads.gathered()

        def attend(layer: int, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Tensor:
            kv = pool.layer(layer)
            writer.write(kv, k_NGK, v_NGK)
            k_pages, v_pages = kv.view(-1, page_size, *kv.shape[1:]).unbind(2)
            return library.attend(q_NHK, k_pages, v_pages, reads)

        return attend

    def _for_holes(self) -> Backend:
        """The backend for pieces with tokens missing between them, whose causal mask no FlashAttention knows."""
        if self._holed is None:
            from looped.infer.backends.triton import TritonBackend

            self._holed = TritonBackend()
        return self._holed


class KVWriter:
    """Stores the K/V of a launch's tokens in the pool, layer by layer: by one kernel where Triton is installed."""

    def __init__(self, pool: Pool, slots_N: Tensor, planes_N: Tensor, positions_N: Tensor) -> None:
        self._pool, self._at = pool, (slots_N, planes_N, positions_N)
        self._kernel = _write_kernel() if slots_N.device.type == "cuda" else None
        self._rows = None if self._kernel else pool.rows(slots_N, planes_N, positions_N)

    def write(self, kv: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> None:
        """`kv` is a layer of the pool, [rows, 2, G, K]."""
        if self._kernel is not None:
            self._kernel(kv, self._pool.table_SPB, self._pool.page_size, *self._at, k_NGK, v_NGK)
        elif self._rows is not None:
            kv.index_copy_(0, self._rows, torch.stack((k_NGK, v_NGK), 1))


@functools.cache
def _write_kernel() -> Callable[..., None] | None:
    try:
        from looped.infer.backends.kernels.write import write_kv
    except ModuleNotFoundError:
        return None
    return write_kv
