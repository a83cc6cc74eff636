"""How good a distilled gate is: held-out agreement with its teacher, thresholds, baselines, and a run of its own."""

# B sequences, T tokens, N positions, R loop steps

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.gates import calibration
from looped.gates.calibration import Curve, agreement, exit_depths
from looped.gates.losses import hazard_kl
from looped.model import LoopedLM
from looped.progress import progress
from looped.train.distill import Deployment
from looped.train.distill_data import Document, batches
from looped.train.students import Student, folded_hazards, read, teacher_hazards
from looped.train.walk import ExitPolicy, Sequences, Walk, walk


class Part(NamedTuple):
    """Held-out positions of one kind: teacher hazards [N, R-1], student logits, losses at every depth [N, R] (of a
    prompt the first alone), and the exit depth of the token before [N]."""

    hazards: Tensor
    logits: Tensor
    losses: Tensor
    before: Tensor


class HeldOut(NamedTuple):
    """Decode positions, and prompt positions where the gate can act there too."""

    decode: Part
    prompt: Part | None


@dataclass(frozen=True)
class Score:
    """Student against teacher at one pair of thresholds, chosen so that their mean depths agree."""

    agreement: float
    kappa: float
    within_one: float
    mean_depth: float
    teacher_mean_depth: float


@dataclass(frozen=True)
class GateReport:
    """Held-out quality of one gate, on decode positions unless said otherwise; losses in nats a token.

    The teacher is folded at the gate's min_depth; `raw_*` is the teacher as it is. Contexts leave at the teacher's
    exits at `teacher_threshold`; in `deployed_*` they leave at the gate's own, at `threshold`.
    """

    gate: str
    threshold: float
    teacher_threshold: float
    agreement: float
    kappa: float
    within_one: float
    mean_depth: float
    teacher_mean_depth: float
    agreement_same_threshold: float
    mean_agreement: float
    max_depth_gap: float
    raw_agreement: float
    raw_mean_depth: float
    kl: float
    ce: float
    teacher_ce: float
    full_depth_ce: float
    constant_agreement: float
    previous_agreement: float
    previous_kappa: float
    prompt: Score | None
    deployed_mean_depth: float
    deployed_ce: float
    positions: int
    thresholds: list[dict[str, float]]


def evaluate(
    model: LoopedLM,
    student: Student,
    documents: list[Document],
    deployment: Deployment,
    teacher_threshold: float,
    batch_tokens: int,
) -> GateReport:
    """Score a student on held-out documents and find its threshold for the teacher's mean depth."""
    seen = observe(model, student, documents, deployment, teacher_threshold, batch_tokens)
    teacher, mine = _curves(student, seen.decode)
    wanted = exit_depths(teacher, teacher_threshold)
    threshold = round(calibration.threshold_for(mine, float(wanted.double().mean())), 6)
    exits = exit_depths(mine, threshold)
    raw = exit_depths(calibration.curve(seen.decode.hazards.double(), 1), teacher_threshold)
    score = _score(mine, teacher, threshold, teacher_threshold)
    table = calibration.threshold_table(mine, teacher)
    depth, ce = deployed(model, student, documents, deployment, threshold, batch_tokens)
    num_loops = model.config.max_loops
    return GateReport(
        gate=student.kind,
        threshold=threshold,
        teacher_threshold=teacher_threshold,
        **vars(score),
        agreement_same_threshold=agreement(exit_depths(mine, teacher_threshold), wanted),
        mean_agreement=sum(row["agreement"] for row in table) / len(table),
        max_depth_gap=max(abs(row["mean_depth"] - row["teacher_mean_depth"]) for row in table),
        raw_agreement=agreement(exits, raw),
        raw_mean_depth=float(raw.double().mean()),
        kl=float(hazard_kl(seen.decode.logits, folded_hazards(student, seen.decode.hazards)).mean()),
        ce=_mean_at(seen.decode.losses, exits),
        teacher_ce=_mean_at(seen.decode.losses, wanted),
        full_depth_ce=float(seen.decode.losses[:, -1].mean()),
        constant_agreement=float(torch.bincount(wanted).max()) / len(wanted),
        previous_agreement=agreement(seen.decode.before, wanted),
        previous_kappa=calibration.weighted_kappa(seen.decode.before, wanted, num_loops),
        prompt=None if seen.prompt is None else _prompt_score(student, seen.prompt, threshold, teacher_threshold),
        deployed_mean_depth=depth,
        deployed_ce=ce,
        positions=len(wanted),
        thresholds=table,
    )


def _curves(student: Student, part: Part) -> tuple[Curve, Curve]:
    """Teacher (folded) and student."""
    teacher = calibration.curve(part.hazards.double(), 1).from_depth(student.min_depth)
    return teacher, calibration.curve(torch.sigmoid(part.logits.double()), student.min_depth)


def _score(mine: Curve, teacher: Curve, threshold: float, teacher_threshold: float) -> Score:
    exits, wanted = exit_depths(mine, threshold), exit_depths(teacher, teacher_threshold)
    return Score(
        agreement=agreement(exits, wanted),
        kappa=calibration.weighted_kappa(exits, wanted, teacher.max_depth),
        within_one=float(((exits - wanted).abs() <= 1).double().mean()),
        mean_depth=float(exits.double().mean()),
        teacher_mean_depth=float(wanted.double().mean()),
    )


def _prompt_score(student: Student, part: Part, threshold: float, teacher_threshold: float) -> Score:
    teacher, mine = _curves(student, part)
    return _score(mine, teacher, threshold, teacher_threshold)


def _mean_at(losses: Tensor, depths: Tensor) -> float:
    """Mean of losses [N, R] at depths [N]."""
    return float(losses.gather(1, depths[:, None] - 1).double().mean())


@torch.no_grad()
def observe(
    model: LoopedLM,
    student: Student,
    documents: list[Document],
    deployment: Deployment,
    threshold: float,
    batch_tokens: int,
) -> HeldOut:
    """What teacher and student say at held-out positions, when contexts leave at the teacher's exits at `threshold`."""
    decode, prompt = [], []
    for batch in _batches(model, documents, batch_tokens, f"held-out, {student.kind} (tokens)"):
        seen = walk(model, batch, deployment.policy(model, *_same(batch, threshold, student.min_depth)))
        decode.append(_part(model, student, batch, seen, batch.decode, with_losses=True))
        if student.kind == "lookahead":
            prompt.append(_part(model, student, batch, seen, batch.prompt, with_losses=False))
    return HeldOut(_joined(decode), _joined(prompt) if prompt else None)


def _part(model: LoopedLM, student: Student, batch: Sequences, seen: Walk, where: Tensor, *, with_losses: bool) -> Part:
    following = batch.tokens.roll(-1, 1)[where]
    losses = [read(model, h[where], following).surprisal for h in seen.states[: None if with_losses else 1]]
    before = seen.depths.roll(1, 1)
    before[:, 0] = model.config.max_loops
    inputs = student.inputs(model, batch, seen, where)
    hazards = teacher_hazards(model, seen, where).float()
    return Part(hazards, student(inputs), torch.stack(losses, -1), before[where])


def _joined(parts: list[Part]) -> Part:
    return Part(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@torch.no_grad()
def deployed(
    model: LoopedLM,
    student: Student,
    documents: list[Document],
    deployment: Deployment,
    threshold: float,
    batch_tokens: int,
) -> tuple[float, float]:
    """Mean depth and loss of decode positions when every token leaves where the student says."""
    gate = student.gate(model)
    depths, losses = [], []
    # Token by token a pass is small, so more sequences at once pay; the cache of all planes sets the bound.
    size = batch_tokens * (2 if gate.uses_carry else 1)
    for batch in _batches(model, documents, size, f"deployed, {student.kind} (tokens)"):
        policy = ExitPolicy(
            deployment.layout, deployment.ragged_prefill, gate, *_same(batch, threshold, student.min_depth)
        )
        seen = walk(model, batch, policy)
        depths.append(seen.depths[batch.decode])
        at_exit = seen.at(seen.depths)[batch.decode]
        losses.append(read(model, at_exit, batch.tokens.roll(-1, 1)[batch.decode]).surprisal)
    return float(torch.cat(depths).double().mean()), float(torch.cat(losses).double().mean())


def _batches(model: LoopedLM, documents: list[Document], batch_tokens: int, name: str) -> Iterator[Sequences]:
    """Batches on the model's device, with a progress bar in tokens."""
    with progress(sum(len(document.token_ids) for document in documents), name) as bar:
        for batch in batches(documents, batch_tokens):
            yield Sequences(*(part.to(model.device) for part in batch))
            bar.advance(int(batch.lengths.sum()))


def _same(batch: Sequences, threshold: float, min_depth: int) -> tuple[Tensor, Tensor]:
    """The same threshold and floor for every sequence: [B] each."""
    floor = torch.full_like(batch.lengths, min_depth)
    return torch.full(floor.shape, threshold, dtype=torch.float64, device=floor.device), floor
