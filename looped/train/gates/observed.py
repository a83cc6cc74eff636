"""What gates and their teacher say at held-out positions: a walk for all gates compared from one depth on."""

# N positions, R loop steps

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import Gate
from looped.gates.dial import Curve, curve_of, hazards_of
from looped.gates.trained import relative_change
from looped.model import LoopedLM
from looped.progress import progress
from looped.train.gates.batches import Document, batches
from looped.train.gates.leaving import ExitPolicy
from looped.train.gates.sequences import Batch
from looped.train.gates.sights import Sights, read
from looped.train.gates.teaching import Deployment
from looped.train.gates.walk import walk


class Said(NamedTuple):
    """A gate at held-out positions: its curve, and its hazards [N, ...] where it has some."""

    curve: Curve
    hazards: Tensor | None


class Held(NamedTuple):
    """Held-out positions of one kind. Contexts leave at the teacher's exits, folded at `floor`.

    `losses` [N, R] in nats and `firsts` [N, R], the token put first, after every loop (of a prompt the first alone);
    relative `changes` [N, R] of the state; the `tokens` [N] fed; the depth of the token `before` [N]; and the number of
    the `document` [N].
    """

    floor: int
    teacher: Said
    gates: dict[str, Said]
    losses: Tensor
    firsts: Tensor
    changes: Tensor
    tokens: Tensor
    before: Tensor
    document: Tensor

    @property
    def num(self) -> int:
        """N."""
        return len(self.tokens)

    @property
    def right(self) -> Tensor:
        """Whether the token put first after each loop is that of the last loop: bool [N, R]."""
        return self.firsts == self.firsts[:, -1:]


class Parts(NamedTuple):
    """Decode positions, and prompt positions where gates can act there too."""

    decode: Held
    prompt: Held | None


@torch.no_grad()
def observe(
    model: LoopedLM,
    gates: Mapping[str, Gate],
    documents: list[Document],
    deployment: Deployment,
    threshold: float,
    batch_tokens: int,
    floor: int,
) -> Parts:
    """What gates say when contexts leave at the teacher's exits at `threshold`, from depth `floor` on."""
    decode: list[Held] = []
    prompt: list[Held] = []
    seen_documents = 0
    alone = {name: gate for name, gate in gates.items() if not gate.uses_carry}
    for batch in batched(model, documents, batch_tokens, f"held-out, from depth {floor} (tokens)"):
        seen = walk(model, batch, deployment.policy(batch, *_same(batch, threshold, floor)))
        numbers = torch.arange(batch.num_sequences, device=model.device) + seen_documents
        seen_documents += batch.num_sequences
        document = batch.spread(numbers)
        document = (document if document.ndim == 2 else document[:, None]).expand(batch.tokens.shape)
        before = torch.where(batch.positions == 0, model.config.max_loops, seen.depths.roll(1, 1))
        for where, chosen, found in ((batch.decode, gates, decode), (batch.prompt, alone, prompt)):
            if chosen and bool(where.any()):
                sights = Sights(model, batch, seen, where)
                found.append(_held(sights, chosen, deployment, floor, before, document, full=found is decode))
    return Parts(_joined(decode), _joined(prompt) if prompt else None)


def _held(
    sights: Sights,
    gates: Mapping[str, Gate],
    deployment: Deployment,
    floor: int,
    before: Tensor,
    document: Tensor,
    full: bool,
) -> Held:
    teacher, where = deployment.teacher, sights.where
    said = {}
    for name, gate in gates.items():
        seen = sights.with_carry if gate.uses_carry else sights.seen
        said[name] = Said(curve_of(gate, seen), hazards_of(gate, seen))
    states = [sights.z0, *sights.seen.readouts]
    changes = torch.stack([relative_change(z, old) for old, z in itertools.pairwise(states)], -1)
    whole = torch.zeros(0, sights.model.config.max_loops, device=where.device)
    readings = sights.readings if full else []
    return Held(
        floor,
        Said(curve_of(teacher, sights.seen, floor), hazards_of(teacher, sights.seen)),
        said,
        torch.stack([reading.surprisal for reading in readings], -1) if full else whole,
        torch.stack([reading.first for reading in readings], -1) if full else whole,
        changes,
        sights.tokens,
        before[where],
        document[where],
    )


def _joined(parts: list[Held]) -> Held:
    first = parts[0]

    def said(each: list[Said]) -> Said:
        curve = each[0].curve._replace(cumulative=torch.cat([x.curve.cumulative for x in each]))
        hazards = [x.hazards for x in each if x.hazards is not None]
        return Said(curve, torch.cat(hazards) if hazards else None)

    columns = ("losses", "firsts", "changes", "tokens", "before", "document")
    return Held(
        first.floor,
        said([part.teacher for part in parts]),
        {name: said([part.gates[name] for part in parts]) for name in first.gates},
        *(torch.cat([getattr(part, name) for part in parts]) for name in columns),
    )


@torch.no_grad()
def deployed(
    model: LoopedLM,
    gate: Gate,
    documents: list[Document],
    deployment: Deployment,
    threshold: float,
    batch_tokens: int,
) -> tuple[float, float]:
    """Mean depth and loss of decode positions when every token leaves where the gate says."""
    depths, losses = [], []
    # Token by token a pass is small, so more sequences at once pay; the cache of all planes sets the bound.
    size = batch_tokens * (2 if gate.uses_carry else 1)
    for batch in batched(model, documents, size, f"deployed, {gate.name} (tokens)"):
        limits = (batch.spread(x) for x in _same(batch, threshold, gate.min_depth))
        ragged = deployment.ragged_prefill and not gate.uses_carry
        seen = walk(model, batch, ExitPolicy(deployment.layout, ragged, gate, *limits))
        depths.append(seen.depths[batch.decode])
        losses.append(read(model, batch, seen, seen.at(seen.depths), batch.decode).surprisal)
    return float(torch.cat(depths).double().mean()), float(torch.cat(losses).double().mean())


def batched(model: LoopedLM, documents: list[Document], batch_tokens: int, name: str) -> Iterator[Batch]:
    """Batches on the model's device, with a progress bar in tokens."""
    with progress(sum(len(document.token_ids) for document in documents), name) as bar:
        for batch in batches(documents, batch_tokens):
            yield batch.to(model.device)
            bar.advance(batch.num_tokens)


def _same(batch: Batch, threshold: float, min_depth: int) -> tuple[Tensor, Tensor]:
    """The same threshold and floor for every sequence."""
    floor = torch.full((batch.num_sequences,), min_depth, device=batch.tokens.device)
    return torch.full(floor.shape, threshold, dtype=torch.float64, device=floor.device), floor
