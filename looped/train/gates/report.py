"""How good gates are: held-out agreement with their teacher, thresholds, baselines, and a run of their own."""

# N positions, R loop steps

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looped.gates import Gate
from looped.gates.calibration import (
    GRID,
    TARGET_GRID,
    agreement,
    confusion,
    curve,
    exit_depths,
    mean_depth,
    threshold_for,
    threshold_table,
    weighted_kappa,
)
from looped.gates.dial import Curve, first_depth
from looped.gates.losses import fold, hazard_kl, survival_before
from looped.model import LoopedLM
from looped.train.gates.batches import Document
from looped.train.gates.calibrate import Wanted, calibrate
from looped.train.gates.metrics import (
    Bin,
    Exits,
    Point,
    area,
    auroc_by_depth,
    brier,
    calibration_error,
    depth_curve,
    judge,
    random_exits,
    reliability,
)
from looped.train.gates.observed import Held, Parts, Said, deployed, observe
from looped.train.gates.teaching import Deployment
from looped.train.gates.token_table import TokenTable

_CHANGE_POINTS = 8
_SAFE = 1e-6
LINEAR = "linear on embedding"
"""The baseline that is trained beside the students."""
CONSTANT = "constant depth"
"""The baseline that says the teacher's commonest depth every time."""


@dataclass(frozen=True)
class Score:
    """Gate against teacher at one pair of thresholds."""

    agreement: float
    kappa: float
    within_one: float
    mean_depth: float
    teacher_mean_depth: float
    positions: int


@dataclass(frozen=True)
class GateReport:
    """Held-out quality of one gate, on decode positions unless said otherwise; losses in nats a token.

    The teacher is folded at `floor`, the gate's min_depth; `raw_*` is the teacher as it is. Contexts leave at the
    teacher's exits at `teacher_threshold`; in `deployed_*` they leave at the gate's own, at `threshold`, which gives
    the teacher's mean depth. What needs hazards, or thresholds that mean the same, is None where there are none.
    `ece_*`: distance of predicted hazards from the teacher's, and from whether a loop says already what the last says.
    """

    gate: str
    kind: str
    teacher: str
    floor: int
    threshold: float
    teacher_threshold: float
    agreement: float
    kappa: float
    within_one: float
    mean_depth: float
    teacher_mean_depth: float
    agreement_same_threshold: float | None
    mean_agreement: float
    max_depth_gap: float | None
    raw_agreement: float
    raw_mean_depth: float
    confusion: list[list[int]]
    auroc: dict[str, float | None]
    kl: float | None
    brier: float | None
    ece_teacher: float | None
    ece_oracle: float | None
    ce: float
    ce_regret: float
    full_depth_ce: float
    same_token: float
    underthinking: float
    overthinking: float
    teacher_exits: Exits
    area: float
    baselines: dict[str, Exits]
    prompt: Score | None
    deployed_mean_depth: float
    deployed_ce: float
    positions: int
    thresholds: list[dict[str, Any]]
    calibration: list[dict[str, Any]] = field(default_factory=list)
    depth_curve: list[Point] = field(default_factory=list)
    reliability_teacher: list[Bin] = field(default_factory=list)
    reliability_oracle: list[Bin] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """What gates are scored on: documents, deployment, the teacher's threshold, and what thresholds are wanted for."""

    documents: list[Document]
    deployment: Deployment
    teacher_threshold: float
    batch_tokens: int
    wanted: Wanted = field(default_factory=Wanted)


def evaluate(
    model: LoopedLM, gates: Mapping[str, Gate], trial: Trial, table: TokenTable, baselines: Mapping[str, Gate]
) -> list[GateReport]:
    """Score gates, by the names they are saved under, and find their thresholds for the teacher's mean depth.

    `baselines` are gates that they are held against; `table` is another.
    """
    reports = {}
    floors = {name: trial.deployment.floor(gate.min_depth) for name, gate in gates.items()}
    for floor in sorted(set(floors.values())):
        group = {name: gate for name, gate in gates.items() if floors[name] == floor}
        parts = observe(
            model,
            group | dict(baselines),
            trial.documents,
            trial.deployment,
            trial.teacher_threshold,
            trial.batch_tokens,
            floor,
        )
        others = _baselines(parts.decode, trial.teacher_threshold, table, baselines)
        for name, gate in group.items():
            reports[name] = _report(model, name, gate, parts, trial, others)
    return [reports[name] for name in gates]


def _baselines(held: Held, threshold: float, table: TokenTable, trained: Mapping[str, Gate]) -> dict[str, Exits]:
    """The gates that have to be beaten, those with a dial at the teacher's mean depth."""
    wanted = exit_depths(held.teacher.curve, threshold)
    constant = torch.full_like(wanted, int(torch.bincount(wanted).argmax()))
    found = {CONSTANT: constant, "previous token's depth": held.before.clamp_min(held.floor)}
    loops = held.right.shape[1]
    change = Curve(held.changes[:, held.floor - 1 : loops - 1].double().cummin(-1).values, held.floor, below=True)
    dials = {"hidden-state change": change}
    by_token = table.curve(held.tokens, held.floor)
    if by_token is not None:
        dials["per-token table"] = by_token
    dials |= {name: held.gates[name].curve.from_depth(held.floor) for name in trained}
    mean = float(wanted.double().mean())
    found |= {name: exit_depths(dial, threshold_for(dial, mean)) for name, dial in dials.items()}
    judged = {name: judge(depths, wanted, held.losses, held.right) for name, depths in found.items()}
    return judged | {"random exits": random_exits(wanted, held.losses, held.right)}


def _report(
    model: LoopedLM, name: str, gate: Gate, parts: Parts, trial: Trial, baselines: dict[str, Exits]
) -> GateReport:
    held, asked = parts.decode, trial.teacher_threshold
    mine, teacher = held.gates[name].curve, held.teacher.curve
    wanted = exit_depths(teacher, asked)
    threshold = float(f"{threshold_for(mine, float(wanted.double().mean())):.6g}")
    exits = exit_depths(mine, threshold)
    raw = wanted
    if held.teacher.hazards is not None:
        raw = exit_depths(curve(held.teacher.hazards.double(), 1), asked)
    comparable = mine.below == teacher.below
    grid = tuple(_grid(trial.deployment, teacher))
    table = threshold_table(mine, teacher, grid)
    target = [row for row in table if teacher.below or row["threshold"] in TARGET_GRID]
    if not comparable:
        table = [{k: v for k, v in row.items() if k not in ("mean_depth", "agreement")} for row in table]
    judged = judge(exits, wanted, held.losses, held.right)
    points = depth_curve(mine, held.losses, held.right)
    hazards = _Hazards.of(gate, held.gates[name], held)
    depth, ce = deployed(model, gate, trial.documents, trial.deployment, threshold, trial.batch_tokens)
    prompt = parts.prompt
    return GateReport(
        gate=name,
        kind=gate.name,
        teacher=trial.deployment.teacher.name,
        floor=held.floor,
        threshold=threshold,
        teacher_threshold=asked,
        agreement=judged.agreement,
        kappa=judged.kappa,
        within_one=judged.within_one,
        mean_depth=judged.mean_depth,
        teacher_mean_depth=float(wanted.double().mean()),
        agreement_same_threshold=agreement(exit_depths(mine, asked), wanted) if comparable else None,
        mean_agreement=sum(row["matched_agreement"] for row in table) / len(table),
        max_depth_gap=max(abs(r["mean_depth"] - r["teacher_mean_depth"]) for r in target) if comparable else None,
        raw_agreement=agreement(exits, raw),
        raw_mean_depth=float(raw.double().mean()),
        confusion=confusion(exits, wanted, held.right.shape[1]).tolist(),
        auroc=auroc_by_depth(mine, wanted),
        kl=hazards.kl if hazards else None,
        brier=None if mine.below else brier(mine, wanted),
        ece_teacher=calibration_error(hazards.teacher) if hazards else None,
        ece_oracle=calibration_error(hazards.oracle) if hazards else None,
        ce=judged.ce,
        ce_regret=judged.ce_regret,
        full_depth_ce=float(held.losses[:, -1].double().mean()),
        same_token=judged.same_token,
        underthinking=judged.underthinking,
        overthinking=judged.overthinking,
        teacher_exits=judge(wanted, wanted, held.losses, held.right),
        area=area(points, held.right.shape[1]),
        baselines=baselines,
        prompt=_prompt(prompt, name, threshold, asked) if prompt is not None and name in prompt.gates else None,
        deployed_mean_depth=depth,
        deployed_ce=ce,
        positions=held.num,
        thresholds=table,
        calibration=calibrate(mine, held, trial.wanted),
        depth_curve=points,
        reliability_teacher=hazards.teacher if hazards else [],
        reliability_oracle=hazards.oracle if hazards else [],
    )


@dataclass(frozen=True)
class _Hazards:
    """Predicted hazards against the teacher's, where both have some."""

    kl: float
    teacher: list[Bin]
    oracle: list[Bin]

    @classmethod
    def of(cls, gate: Gate, said: Said, held: Held) -> _Hazards | None:
        if said.hazards is None or held.teacher.hazards is None:
            return None
        mine = fold(said.hazards.double(), held.floor - first_depth(gate) + 1)
        teacher = fold(held.teacher.hazards.double(), held.floor)
        weight = survival_before(teacher)
        right: Tensor = held.right[:, held.floor - 1 : -1].double()
        kl = float(hazard_kl(torch.logit(mine, eps=_SAFE), teacher).mean())
        return cls(kl, reliability(mine, teacher, weight), reliability(mine, right, weight))


def _grid(deployment: Deployment, teacher: Curve) -> list[float]:
    """Teacher thresholds to compare at; of a criterion evenly spread logarithms."""
    if not teacher.below:
        return [*GRID]
    ratio = deployment.high / max(deployment.low, 1e-9)
    low = max(deployment.low, 1e-9)
    return [float(f"{low * ratio ** (i / (_CHANGE_POINTS - 1)):.3g}") for i in range(_CHANGE_POINTS)]


def _prompt(held: Held, name: str, threshold: float, asked: float) -> Score:
    mine, teacher = held.gates[name].curve, held.teacher.curve
    exits, wanted = exit_depths(mine, threshold), exit_depths(teacher, asked)
    return Score(
        agreement=agreement(exits, wanted),
        kappa=weighted_kappa(exits, wanted, teacher.max_depth),
        within_one=float(((exits - wanted).abs() <= 1).double().mean()),
        mean_depth=mean_depth(mine, threshold),
        teacher_mean_depth=float(wanted.double().mean()),
        positions=held.num,
    )
