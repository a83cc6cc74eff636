"""K/V memory driven by hand, beside a dictionary that says what every plane of every token must read as.

There is no model: a token's K/V in a plane is one number, written as the engine would write it, through the table on
the device. Prompt tokens get numbers that depend on all tokens up to them, so a cached block must read the same.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from looped.config import ModelConfig
from looped.infer.offload import SavedKV
from looped.infer.pages import KVMemory, stored
from looped.infer.pool import Pool
from looped.infer.prefix import block_hashes
from looped.kv import get_layout
from tests.models import ouro_config

CPU = torch.device("cpu")
PADDING = 2


def config(outer: bool = False, loops: int = 3) -> ModelConfig:
    return ouro_config(
        num_prelude_layers=int(outer), num_coda_layers=int(outer), num_core_layers=2, max_loops=loops, num_kv_heads=1,
        num_heads=1, head_dim=2, max_positions=200,
    )  # fmt: skip


def make_memory(layout: str, outer: bool = False, loops: int = 3, num_slots: int = 5, **options: Any) -> KVMemory:
    values: dict[str, Any] = {"max_len": 80, "dtype": torch.float64, "device": CPU, "poison": True} | options
    return KVMemory(config(outer, loops), get_layout(layout), loops, num_slots, **values)


@dataclass
class Sequence:
    """A job as admission sees it, and what the simulation knows of it."""

    prompt: tuple[int, ...]
    max_len: int
    reserve_len: int
    prefix: tuple[bytes, ...] = ()
    slot: int = 0
    done: int = 0
    """Tokens that are complete."""
    step: int = 0
    consumed: int = 0
    planes: dict[tuple[int, int], float] = field(default_factory=dict)
    """(plane, position) → number; plane -1 is the pool outside the core."""
    saved: SavedKV | None = None
    parked: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def full(self) -> bool:
        return self.done >= stored(self.max_len)


@functools.cache
def number(*what: Any) -> float:
    return float(zlib.crc32(repr(what).encode()))


class Simulation:
    """One memory and the sequences in it. `late` decode tokens are reported one step after they are done."""

    def __init__(
        self, memory: KVMemory, preempting: bool, ragged_prompts: bool = False, grid: int | None = None
    ) -> None:
        self.memory, self.preempting, self.ragged_prompts, self.grid = memory, preempting, ragged_prompts, grid
        self.active: dict[int, Sequence] = {}
        self.free_slots = list(range(memory.core.pages.table.shape[0] - 1, 0, -1))
        self.unreported: list[tuple[Sequence, int]] = []
        self._fresh = 0

    # Admission and prompts.

    def sequence(self, prompt: tuple[int, ...], new: int) -> Sequence:
        max_len = min(len(prompt) + new, self.memory.max_len)
        reserve = min(len(prompt) + 1, stored(max_len)) if self.preempting else stored(max_len)
        prefix = block_hashes(prompt, self.memory.prefix_block, b"") if self.memory.prefix_block else ()
        return Sequence(prompt, max_len, max(reserve, len(prompt)), prefix)

    def admit(self, sequence: Sequence) -> bool:
        """Into a slot, if there is room."""
        if not self.free_slots or not self.memory.can_admit(sequence, idle=not self.active):
            return False
        sequence.slot = self.free_slots.pop()
        sequence.step = sequence.consumed = 0
        self.active[sequence.slot] = sequence
        sequence.done = self.memory.admit(sequence)
        assert sequence.done < sequence.prompt_len
        assert not sequence.done or sequence.done % self.memory.prefix_block == 0
        for position in range(sequence.done):
            self._expect_prompt(sequence, position)
        return True

    def prompt_depth(self, sequence: Sequence, position: int) -> int:
        loops = self.memory.max_loops
        return 1 + int(number("depth", sequence.prompt[: position + 1])) % loops if self.ragged_prompts else loops

    def _expect_prompt(self, sequence: Sequence, position: int) -> None:
        known, layout = sequence.prompt[: position + 1], self.memory.layout
        depth = self.prompt_depth(sequence, position)
        for step in range(1, depth + 1):
            sequence.planes[layout.write_plane(step), position] = number(known, step)
        for plane, source in layout.missing_planes(depth, self.memory.max_loops):
            sequence.planes[plane, position] = sequence.planes[source, position]
        sequence.planes[-1, position] = number(known, 0)

    def prefill(self, sequence: Sequence, length: int, abandon_after: int | None = None) -> None:
        """The next `length` prompt tokens, all loops; or only some of them, as when a batch fails."""
        memory, layout = self.memory, self.memory.layout
        start, stop = sequence.done, min(sequence.done + length, sequence.prompt_len)
        positions = np.arange(start, stop)
        depths = np.array([self.prompt_depth(sequence, position) for position in positions])
        by_step = self.ragged_prompts and layout.aliases
        (memory.cover_outer if by_step else memory.cover_prompt)(sequence.slot, start, stop)
        memory.flush()
        for position in positions:
            self._expect_prompt(sequence, int(position))
        self._write_outer([(sequence, int(position)) for position in positions])
        for step in range(1, memory.max_loops + 1):
            if step == abandon_after:
                return
            inside = positions[depths >= step]
            if by_step:
                memory.open_prompt(sequence.slot, step - 1, inside.astype(np.int32))
                memory.flush()
            plane = layout.write_plane(step)
            known = [(int(position), number(sequence.prompt[: position + 1], step)) for position in inside]
            self._write(memory.core, [(sequence.slot, plane, position, value) for position, value in known])
            leaving = positions[depths == step]
            if by_step:
                memory.close_prompt(sequence.slot, leaving.astype(np.int32), step)
                memory.flush()
            elif len(leaving):
                at = self._tensor([sequence.slot] * len(leaving))
                memory.close(at, self._tensor(leaving), torch.full_like(at, step), torch.ones_like(at).bool())
        sequence.done = stop
        if stop == sequence.prompt_len:
            memory.publish(sequence.slot, sequence.prefix, stop)

    # Decode.

    def decode(self, rows: list[tuple[Sequence, bool]], spare: int, ahead: int) -> bool:
        """One loop step of some sequences, those with True leaving after it; False where pages are short."""
        memory, layout = self.memory, self.memory.layout
        rows = [(sequence, leaves or sequence.step + 1 == memory.max_loops) for sequence, leaves in rows]
        slots = np.array([0, *(sequence.slot for sequence, _ in rows), 0], dtype=np.int32)
        done = np.array([0, *(sequence.done + ahead for sequence, _ in rows), 0], dtype=np.int32)
        consumed = np.array([0, *(sequence.consumed for sequence, _ in rows), 0], dtype=np.int64)
        if not memory.supply(slots, consumed, spare) or not memory.grow(slots, done):
            assert self.preempting, "a promise was broken"
            return False
        memory.flush()
        self._write_outer([(sequence, sequence.done) for sequence, _ in rows if sequence.step == 0])
        at = self._tensor([sequence.slot for sequence, _ in rows] + [0] * PADDING)
        positions = self._tensor([sequence.done for sequence, _ in rows] + [0] * PADDING)
        steps = self._tensor([sequence.step + 1 for sequence, _ in rows] + [1] * PADDING)
        leaving = self._tensor([leaves for _, leaves in rows] + [False, True][:PADDING])
        memory.open(at, positions, steps)
        written = []
        for sequence, _ in rows:
            self._fresh += 1
            sequence.step, sequence.consumed = sequence.step + 1, sequence.consumed + 1
            plane = layout.write_plane(sequence.step)
            sequence.planes[plane, sequence.done] = float(self._fresh)
            written.append((sequence.slot, plane, sequence.done, float(self._fresh)))
        self._write(memory.core, written)
        memory.close(at, positions, steps, leaving)
        reported, self.unreported = self.unreported, []
        for sequence, leaves in rows:
            if leaves:
                self._leave(sequence)
        for sequence, depth in reported:
            if sequence.slot:
                memory.token_done(sequence.slot, depth)
        return True

    def _leave(self, sequence: Sequence) -> None:
        for plane, source in self.memory.layout.missing_planes(sequence.step, self.memory.max_loops):
            sequence.planes[plane, sequence.done] = sequence.planes[source, sequence.done]
        self.unreported.append((sequence, sequence.step))
        sequence.done, sequence.step = sequence.done + 1, 0

    def report(self) -> None:
        """The host has heard of every token."""
        for sequence, depth in self.unreported:
            if sequence.slot:
                self.memory.token_done(sequence.slot, depth)
        self.unreported = []

    # Endings.

    def release(self, sequence: Sequence, scrub: bool = False) -> None:
        del self.active[sequence.slot]
        self.free_slots.append(sequence.slot)
        self.memory.release(sequence.slot, scrub)
        sequence.slot = 0
        sequence.planes = {}

    def park(self, sequence: Sequence) -> None:
        """Move a sequence to the host."""
        self.report()
        sequence.saved = self.memory.save(sequence.slot, sequence.done + (sequence.step > 0))
        planes = sequence.planes
        self.release(sequence)
        sequence.planes = planes

    def unpark(self, sequence: Sequence) -> bool:
        job = dataclasses.replace(sequence, parked="core")
        tokens = sequence.done + (sequence.step > 0)
        job.reserve_len = min(max(sequence.reserve_len, tokens + 1), stored(sequence.max_len))
        if not self.free_slots or not self.memory.can_admit(job, idle=not self.active):
            return False
        assert sequence.saved is not None
        sequence.slot = job.slot = self.free_slots.pop()
        self.active[sequence.slot] = sequence
        assert self.memory.admit(job) == 0
        self.memory.load(sequence.slot, sequence.saved)
        sequence.saved, sequence.consumed = None, 0
        return True

    # K/V.

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, device=self.memory.device)

    def _write(self, pool: Pool, tokens: list[tuple[int, int, int, float]]) -> None:
        """(slot, plane, position, number) of each, as an attention backend writes them."""
        if not tokens:
            return
        slots, planes, positions, values = torch.tensor(tokens, dtype=torch.float64, device=self.memory.device).T
        rows = pool.rows(slots.long(), planes.long(), positions.long())
        assert (rows >= pool.page_size).all(), "a token without a page"
        assert len(rows.unique()) == len(rows), "two tokens in one place"
        for layer in range(len(pool.data)):
            pool.data[layer, rows] = (values + layer / 8)[:, None, None, None]

    def _write_outer(self, tokens: list[tuple[Sequence, int]]) -> None:
        written = []
        for sequence, position in tokens:
            value = number(sequence.prompt[: position + 1], 0) if position < sequence.prompt_len else position + 0.5
            sequence.planes[-1, position] = value
            written.append((sequence.slot, 0, position, value))
        if self.memory.outer is not None:
            self._write(self.memory.outer, written)

    def check(self) -> None:
        """The books balance, and every active sequence reads back what was written for it."""
        self.memory.check()
        self.memory.flush()
        for sequence in self.active.values():
            for pool, outer in ((self.memory.core, False), (self.memory.outer, True)):
                keys = [key for key in sequence.planes if (key[0] < 0) is outer and self._readable(sequence, *key)]
                if pool is None or not keys:
                    continue
                planes, positions = self._tensor(keys).T
                rows = pool.rows(torch.full_like(planes, sequence.slot), planes.clamp(0), positions)
                values = self._tensor(np.array([sequence.planes[key] for key in keys]))
                for layer in range(len(pool.data)):
                    assert (pool.data[layer, rows] == (values + layer / 8)[:, None, None, None]).all()

    def _readable(self, sequence: Sequence, plane: int, position: int) -> bool:
        """Complete tokens, and of the one in the loop what it wrote in this pass."""
        if position < sequence.done:
            return True
        if position > sequence.done or sequence.done < sequence.prompt_len or not sequence.step:
            return False
        return plane < 0 or plane in {self.memory.layout.write_plane(step) for step in range(1, sequence.step + 1)}

    def assert_empty(self) -> None:
        """Nobody holds a page or a promise."""
        self.memory.flush()
        self.memory.check()
        for pool in self.memory.pools:
            books = pool.pages
            assert books.pages.in_use == 0 and books.pages.reserved == 0
            assert not books.table.any() and not pool.table_SPB.any()
        if self.memory.tables.ring_SC is not None and self.memory.tables.taken_S is not None:
            assert not self.memory.tables.ring_SC.any() and not self.memory.tables.taken_S[1:].any()


def random_prompt(draw: random.Random, longest: int, block: int = 16) -> tuple[int, ...]:
    """Prompts that begin alike now and then, with lengths around the edges of blocks."""
    length = draw.choice([1, block - 1, block, block + 1, 2 * block + 1, draw.randint(1, longest), longest])
    prompt = [7] * length
    for start in range(0, length, block):
        if draw.random() < 0.15:
            prompt[start:] = [draw.randint(1, 3)] * (length - start)
    return tuple(prompt)
