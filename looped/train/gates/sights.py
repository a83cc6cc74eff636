"""What gates see, and what they learn from, at positions of a walk: computed once for all students, where asked for."""

# B sequences, T tokens, N positions, D width, R loop steps, V vocabulary

from __future__ import annotations

import itertools
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import Carry, Entry, Gate
from looped.gates.dial import Seen, hazards_of
from looped.gates.foreseen import log_change
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.gates import varlen
from looped.train.gates.leaving import Walk
from looped.train.gates.sequences import Batch, Bounds

_LOGITS_AT_ONCE = 1 << 26


class Reading(NamedTuple):
    """What the head makes of states: entropy and surprisal of the next token in nats, at least float32, and the token
    it puts first, [N] each."""

    entropy: Tensor
    surprisal: Tensor
    first: Tensor


class Sights:
    """Positions `where` [B, T] of a walk, as gates see them."""

    def __init__(self, model: LoopedLM, batch: Batch, seen: Walk, where: Tensor) -> None:
        self.model, self.batch, self.walk, self.where = model, batch, seen, where

    @cached_property
    def before(self) -> Tensor:
        """The positions [B, T] one before `where`. Raises ValueError where there is none."""
        if bool((self.where & (self.batch.positions == 0)).any()):
            raise ValueError("the first token of a sequence has no token before it")
        return self.where.roll(-1, 1)

    @property
    def tokens(self) -> Tensor:
        """The tokens whose depth is decided: [N]."""
        return self.batch.tokens[self.where]

    @cached_property
    def seen(self) -> Seen:
        """For gates without a carry; `with_carry` for others."""
        return Seen(Entry(self.z0, self.injection, None, *self._idle), [self.readout(r) for r in self._steps])

    @cached_property
    def with_carry(self) -> Seen:
        """The same with what the token before left."""
        return self.seen._replace(entry=self.seen.entry._replace(carry=self.carry))

    @property
    def _steps(self) -> range:
        return range(1, self.model.config.max_loops + 1)

    @property
    def _idle(self) -> tuple[Tensor, Tensor]:
        """Request and index, which no gate with a dial looks at."""
        idle = torch.zeros(int(self.where.sum()), dtype=torch.long, device=self.where.device)
        return idle, idle

    @cached_property
    def z0(self) -> Tensor:
        """The readout before the loop [N, D]: the noise of its position where a model starts from noise."""
        positions = self.batch.positions[self.where]
        noise = self.model.init_state(torch.zeros_like(positions), positions)
        return self.walk.start[self.where] if noise is None else self.model.readout(noise)

    @property
    def injection(self) -> Tensor | None:
        return self.walk.start[self.where] if self.model.config.injection else None

    def readout(self, step: int) -> Tensor:
        """z_step [N, D]."""
        return self.model.readout(self.walk.states[step - 1][self.where])

    @cached_property
    def carry(self) -> Carry:
        """What the token before left: exit state, entropy, surprisal, depth."""
        depth = self.walk.depths[self.before]
        h = self.walk.at(self.walk.depths)
        reading = read(self.model, self.batch, self.walk, h, self.before)
        z = self.model.readout(h[self.before])
        return Carry(z, reading.entropy, reading.surprisal, depth.to(reading.entropy.dtype))

    def block(self, name: str) -> Tensor:
        """One input by name: z0, z1, ..., embedding, and state, entropy, surprisal, depth of the token before."""
        if name == "embedding":
            return self.walk.start[self.where].float()
        if name[0] == "z":
            return (self.readout(int(name[1:])) if name != "z0" else self.z0).float()
        value: Tensor = self.carry.z if name == "state" else getattr(self.carry, name)
        return value.float()

    def target(self, name: str, teacher: Gate) -> Tensor:
        """What is learnt from, by name: hazards of the teacher [N, R-1], losses after each loop [N, R], logs of the
        relative change of each loop [N, R]."""
        if name == "hazards":
            hazards = hazards_of(teacher, self.seen)
            assert hazards is not None
            return hazards.float()
        if name == "losses":
            return torch.stack([reading.surprisal for reading in self.readings], -1).float()
        states = [self.z0, *(self.readout(r) for r in self._steps)]
        return torch.stack([log_change(z, old) for old, z in itertools.pairwise(states)], -1).float()

    @cached_property
    def readings(self) -> list[Reading]:
        """What the head makes of each loop's states."""
        return [read(self.model, self.batch, self.walk, h, self.where) for h in self.walk.states]


@torch.no_grad()
def read(model: LoopedLM, batch: Batch, seen: Walk, h: Tensor, where: Tensor) -> Reading:
    """The reading of states h [B, T, D] of a walk at positions `where` [B, T].

    Layers of the coda read what tokens before left there: the K/V of their exits.
    """
    following = batch.tokens.roll(-1, 1)
    if not model.coda_blocks:
        size = max(1, _LOGITS_AT_ONCE // model.config.vocab_size)
        pieces = zip(*(torch.split(x[where], size) for x in (h, batch.positions, following)), strict=True)
        return _joined([_reading(model.coda(states, at, dense_causal), next_) for states, at, next_ in pieces])
    exits, length = seen.at(seen.depths), h.shape[1]
    size = max(1, _LOGITS_AT_ONCE // (model.config.vocab_size * length))
    parts = []
    for first in range(0, len(h), size):
        rows = slice(first, first + size)
        coda = _Coda(model, batch, rows, length)
        coda.leave(exits[rows].flatten(0, 1))
        chosen = where[rows].flatten()
        if bool(chosen.any()):
            parts.append(_reading(coda(h[rows].flatten(0, 1), chosen), following[rows].flatten()[chosen]))
    return _joined(parts)


class _Coda:
    """Layers of the coda over some rows of a batch [N = B T]."""

    def __init__(self, model: LoopedLM, batch: Batch, rows: slice, length: int) -> None:
        self.model, self.positions = model, batch.positions[rows].flatten()
        begin = rows.start * length
        cuts = [cut - begin for cut in batch.bounds.cuts if 0 <= cut - begin <= len(self.positions)]
        starts = torch.tensor(cuts, dtype=torch.int32, device=self.positions.device)
        self.bounds = Bounds(starts, tuple(cuts))
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def leave(self, exits_ND: Tensor) -> None:
        """Keep the K/V of the states that tokens left with."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kept[layer] = (k, v)
            return varlen.causal(q, k, v, self.bounds)

        self.model.coda(exits_ND, self.positions, attend, rows=torch.zeros_like(self.positions, dtype=torch.bool))

    def __call__(self, h_ND: Tensor, rows: Tensor) -> Tensor:
        """Logits [n, V] of the `rows` [N] of states that see what the others left."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return varlen.causal_own(q, *self.kept[layer], k, v, self.bounds)

        return self.model.coda(h_ND, self.positions, attend, rows=rows)


def _reading(logits: Tensor, following: Tensor) -> Reading:
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    surprisal = -log_p.gather(-1, following[:, None])[:, 0]
    return Reading(-(log_p.exp() * log_p).sum(-1), surprisal, log_p.argmax(-1))


def _joined(readings: list[Reading]) -> Reading:
    return Reading(*(torch.cat(parts) for parts in zip(*readings, strict=True)))
