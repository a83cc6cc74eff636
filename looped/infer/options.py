"""What an engine is built with: `LLM`'s arguments as one value, checked before anything is allocated. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING

from looped import checks
from looped.errors import LoopedError, shown, unknown
from looped.infer.scheduler import POLICIES

if TYPE_CHECKING:
    from pathlib import Path

    from looped.decode import PrefillSchedule
    from looped.gates import Gate
    from looped.kv import KVLayout

EXITS = ("auto", "sync", "lookahead", "device")
# Tables hold int32; a sequence takes rows of many tables, whether it runs or not.
MOST = {"max_num_seqs": 1 << 16, "num_pages": (1 << 31) - 1, "page_size": (1 << 31) - 1}
PREEMPTION = ("auto", "recompute", "offload", "off")


@dataclass(frozen=True)
class EngineOptions:
    """See `looped.LLM`, whose arguments these are.

    `poison` fills freed pages with NaN, to test that nobody reads them; `pad_batches` pads decode batches to the sizes
    of CUDA graphs, None where there is a GPU.
    """

    mode: str = "refill"
    kv: str | KVLayout | None = None
    gate: str | Path | Gate | None = None
    threshold: float | None = None
    min_depth: int | None = None
    depth: int | None = None
    compute: str = "sparse"
    prefill: str = "dense"
    prefill_threshold: float | PrefillSchedule | None = None
    mix_prefill: bool = False
    exits: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    chunk_size: int | None = None
    min_free_slots: int | None = None
    min_coda_batch: int | None = None
    kv_headroom: float = 0.0
    num_pages: int | None = None
    page_size: int | None = None
    preemption: str | None = "auto"
    prefix_caching: bool = False
    backend: str = "auto"
    graphs: bool = True
    seed: int = 0
    poison: bool = False
    pad_batches: bool | None = None

    def __post_init__(self) -> None:
        for item in fields(self):  # numpy's whole numbers lack methods of Python's
            value = getattr(self, item.name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, item.name, int(value))

    def check(self) -> None:
        """Raise `LoopedError` for unknown names, wrong types and options that contradict each other."""
        self._check_types()
        if self.mode not in POLICIES:
            raise unknown("mode", self.mode, POLICIES)
        if self.exits not in EXITS:
            raise unknown("exits", self.exits, EXITS)
        if self.prefill not in ("dense", "ragged"):
            raise unknown("prefill", self.prefill, ("dense", "ragged"))
        if self.preemption is not None and self.preemption not in PREEMPTION:
            raise unknown("preemption", self.preemption, PREEMPTION)
        if self.chunk_size is not None and self.chunk_size < 1:
            raise LoopedError(f"chunk_size must be at least 1, got {shown(self.chunk_size)}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise LoopedError(f"seed must fit in 64 bits, got {shown(self.seed)}")
        if self.mode == "cb" and self.prefill == "ragged":
            raise LoopedError(
                "mode 'cb' runs every token at full depth: a ragged prefill needs 'refill' or 'no-refill'"
            )
        if self.mix_prefill and self.prefill == "ragged":
            raise LoopedError("mix_prefill works with a dense prefill")
        if self.mode == "cb" and self.mix_prefill:
            raise LoopedError("mix_prefill needs mode 'refill' or 'no-refill'")

    def _check_types(self) -> None:
        sizes = ("max_num_seqs", "max_num_batched_tokens", "seed")
        optional = ("depth", "min_depth", "chunk_size", "min_free_slots", "min_coda_batch", "num_pages", "page_size")
        checks.given(**{name: getattr(self, name) for name in (*sizes, "kv_headroom")})
        checks.whole_numbers(**{name: getattr(self, name) for name in (*sizes, *optional)})
        checks.numbers(threshold=self.threshold, kv_headroom=self.kv_headroom)
        for name in ("mode", "compute", "prefill", "exits", "backend", "preemption"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "preemption"):
                raise LoopedError(f"{name} must be a name, got {shown(value)}")
        for name in ("mix_prefill", "prefix_caching", "graphs"):
            if not isinstance(getattr(self, name), bool):
                raise LoopedError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:
                raise LoopedError(f"{name} must be at most {most}, got {shown(getattr(self, name))}")
