"""Dense prefill: prompts whose tokens all run every loop step, so that shapes alone say what a batch needs.

A batch takes two launches: the body (prelude, loop, layers of the coda) of all rows, and head and first tokens of the
few prompts that end in it, at whatever sampling level. Neither waits for the device, and where batches are padded both
lie in CUDA graphs: rows are filled up with tokens of slot 0, places for pieces with empty ones.
"""

# N rows, B places for pieces, A prompts that end in a batch, S slots

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looped.infer.backends import DecodeBatch, Piece, PrefillBatch
from looped.infer.backends.base import piece_table
from looped.infer.pool import Pool
from looped.infer.stages import Sampled, Stages
from looped.infer.transfer import upload
from looped.model.attention import Attend, dense_causal

if TYPE_CHECKING:
    from looped.infer.prompts import PromptPiece

# Rows that batches are padded to. Larger ones take longer to run than to launch, and run as they are.
MAX_PADDED_ROWS = 8192
SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, *range(1024, 2049, 256), *range(2560, 4097, 512))
# Keys that the rows of a batch may read, all together, to be run by rows: more is read faster in tiles.
MAX_KEYS_BY_ROWS = 1 << 16


def prompt_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows worth a graph where batches have at most `most`, which is the last; at most a third is padding
    beyond the first few."""
    most = min(most, MAX_PADDED_ROWS)
    return (*(size for size in (*SIZES, *range(5120, MAX_PADDED_ROWS, 1024)) if size < most), most)


class Work(NamedTuple):
    """A batch on the host: slots, positions and tokens of its rows; its pieces; and of the prompts that end in it the
    last row, the slot and the position."""

    rows_3N: NDArray[np.int64]
    pieces: tuple[Piece, ...]
    ends_3A: NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Sequence[PromptPiece]) -> Work:
        lens = np.array([len(prompt.token_ids) for prompt in prompts])
        stops = lens.cumsum()
        starts = stops - lens
        slots = np.repeat([prompt.slot for prompt in prompts], lens)
        shifts = np.array([prompt.start for prompt in prompts]) - starts
        positions = np.arange(stops[-1]) + np.repeat(shifts, lens)
        tokens = np.fromiter(chain.from_iterable(prompt.token_ids for prompt in prompts), np.int64, len(slots))
        pieces, ends = [], []
        for prompt, start, stop in zip(prompts, starts.tolist(), stops.tolist(), strict=True):
            end = prompt.start + stop - start
            pieces.append(Piece(prompt.slot, start, stop, prompt.start, end))
            if prompt.sample:
                ends.append((stop - 1, prompt.slot, end - 1))
        rows = np.stack((slots, positions, tokens)).astype(np.int64)
        return cls(rows, tuple(pieces), np.array(ends, dtype=np.int64).reshape(-1, 3).T)

    def padded(self, size: int) -> Work:
        """With `size` rows: the new ones are one piece of slot 0, which has a single key."""
        count = self.rows_3N.shape[1]
        padding = (Piece(0, count, size, 0, 1),) if count < size else ()
        return self._replace(rows_3N=_filled(self.rows_3N, size), pieces=(*self.pieces, *padding))

    @property
    def num_keys(self) -> int:
        """Keys that the rows would read one by one, at most."""
        return sum((piece.stop - piece.start) * piece.end for piece in self.pieces)


class DensePrompts:
    """Dense prefills on the engine's stages. `most` is the largest batch of prompts worth a graph."""

    def __init__(self, stages: Stages, most: int) -> None:
        self.stages, self.model, self.kv, self.backend = stages, stages.model, stages.kv, stages.backend
        self.state, self.max_loops = stages.state, stages.max_loops
        num_seqs = self.state.num_slots - 1
        self.sizes = prompt_sizes(most)
        # Numbers of prompts that end in a batch: their sampling is small, so a few sizes do.
        self.counts = (*(count for count in (1, 4, 16, 64, 256) if count < num_seqs), num_seqs)
        config, device, dtype = self.model.config, self.model.device, self.model.dtype
        largest = self.sizes[-1] if stages.pads else 0
        self._rows_3N = torch.zeros((3, largest), dtype=torch.long, device=device)
        self._table_3B = torch.zeros((3, num_seqs + 2), dtype=torch.int32, device=device)
        self._ends_3A = torch.zeros((3, num_seqs), dtype=torch.long, device=device)
        self._largest = 0
        # From the body to the first tokens.
        self._h, self._end = torch.zeros((2, num_seqs, config.hidden_size), dtype=dtype, device=device)

    def run(self, prompts: Sequence[PromptPiece], level: int) -> Sampled | None:
        """Run pieces of prompts; the first tokens of those that are complete, None where none is."""
        for prompt in prompts:
            self.kv.cover_prompt(prompt.slot, prompt.start, prompt.start + len(prompt.token_ids))
        work = Work.of(prompts)
        num_ends = work.ends_3A.shape[1]
        ends = _filled(work.ends_3A, self._ends_3A.shape[1])
        self._ends_3A.copy_(upload(ends, torch.long, self.model.device))
        self._run_body(work)
        return self._first_tokens(self._count(num_ends), level) if num_ends else None

    def describe(self) -> str:
        """What is said once at start."""
        return f"prefills of up to {self._largest} tokens in graphs" if self._largest else "prefills without graphs"

    def capture(self, levels: Sequence[int]) -> None:
        """Every launch there is, for rows of slot 0; the largest first, see `Graphs`."""
        nothing = np.zeros((3, 0), dtype=np.int64)
        for size in reversed(self.sizes):
            work = Work(nothing, (), nothing).padded(size)
            if size <= self.backend.by_rows:
                self._launch(work, size, by_rows=True)
            if self.backend.pads_prefill:
                self._launch(work, size, by_rows=False)
            if size <= self.backend.by_rows or self.backend.pads_prefill:
                self._largest = max(self._largest, size)
        for count in reversed(self.counts):
            for level in levels:
                self._first_tokens(count, level)

    def _count(self, num_ends: int) -> int:
        return self.counts[bisect.bisect_left(self.counts, num_ends)] if self.stages.pads else num_ends

    def _run_body(self, work: Work) -> None:
        count = work.rows_3N.shape[1]
        size, by_rows = 0, False
        if self.stages.pads and count <= self.sizes[-1]:
            size = self.sizes[bisect.bisect_left(self.sizes, count)]
            by_rows = size <= self.backend.by_rows and work.num_keys <= MAX_KEYS_BY_ROWS
        if by_rows or (size and self.backend.pads_prefill):
            self._launch(work.padded(size), size, by_rows)
        else:
            self._launch(work, 0, by_rows=False)

    def _launch(self, work: Work, size: int, by_rows: bool) -> None:
        """The body of a batch that is padded to `size` rows, 0: not padded."""
        device, num_seqs = self.model.device, self._ends_3A.shape[1]
        places = min(size, num_seqs) + 1 if size else len(work.pieces)
        rows = upload(work.rows_3N, torch.long, device)
        table = upload(piece_table(work.pieces, places), torch.int32, device)
        if size:
            rows = self._rows_3N[:, :size].copy_(rows)
            table = self._table_3B[:, : places + 1].copy_(table)
            longest, max_len, asking = size, self.kv.max_len, min(size, num_seqs)
        else:
            longest = max(piece.stop - piece.start for piece in work.pieces)
            max_len, asking = max(piece.end for piece in work.pieces), work.ends_3A.shape[1]
        last = self._ends_3A[0, :asking]

        def body(loops: int = self.max_loops) -> tuple[()]:
            if by_rows:
                attend = self._each_row(rows, max_len)
            else:
                # Made anew each time: what a backend works out for a batch belongs into the graph.
                attend = self._packed(PrefillBatch(rows[0], rows[1], table, work.pieces, longest, max_len))
            self._body(rows, last, attend, loops)
            return ()

        name = "prompts" if size else "loose prompts"
        key = (name, "by rows" if by_rows else "packed", rows.shape[1])
        self.stages.launch(key, max_len, body, lambda: body(1))

    def _body(self, rows_3N: Tensor, last_A: Tensor, attend: Callable[[Pool | None, int], Attend], loops: int) -> None:
        """Every stage of all rows, but for the head; of the rows `last`, states before and behind the coda are kept."""
        model, layout, (slots, positions, tokens) = self.model, self.stages.policy.layout, rows_3N
        noise = model.init_state(self.state.seed[slots], positions)
        h, injection = model.prelude(tokens, positions, attend(self.kv.outer, 0), noise)
        for step in range(1, loops + 1):
            h = model.core(h, injection, positions, step, attend(self.kv.core, layout.write_plane(step)))
        asking = len(last_A)
        if asking or self.kv.outer is not None:
            self._end[:asking] = model.coda_state(h, positions, attend(self.kv.outer, 0), rows=last_A)
            self._h[:asking] = h[last_A]

    def _each_row(self, rows_3N: Tensor, max_len: int) -> Callable[[Pool | None, int], Attend]:
        slots, positions, _ = rows_3N

        def attend(pool: Pool | None, plane: int) -> Attend:
            if pool is None:
                return dense_causal
            planes = torch.full_like(slots, plane)
            return self.backend.decode(pool, DecodeBatch(slots, planes, positions, max_len, packed=True))

        return attend

    def _packed(self, batch: PrefillBatch) -> Callable[[Pool | None, int], Attend]:
        def attend(pool: Pool | None, plane: int) -> Attend:
            return dense_causal if pool is None else self.backend.prefill(pool, batch, plane)

        return attend

    def _first_tokens(self, count: int, level: int) -> Sampled:
        """The tokens behind the prompts that ended in the last body, with room for `count` of them."""

        def first() -> Sampled:
            _, slots, positions = self._ends_3A[:, :count]
            depths = torch.full_like(slots, self.max_loops)
            return self.stages.next_tokens(slots, self._h[:count], self._end[:count], positions, depths, level)

        return Sampled(*self.stages.launch((f"first tokens-{level}", count), self.kv.max_len, first))  # type: ignore[arg-type]


def _filled(values: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """[3, n] filled up with zeros to [3, width]."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))
