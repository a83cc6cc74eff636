"""Numbers for how well exits are predicted: ranking, calibration, what exits cost."""

# N positions, R loop steps, M depths

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from looped.gates.calibration import agreement, exit_depths, threshold_for, weighted_kappa
from looped.gates.dial import Curve

BINS = 10
_POINTS = 10


@dataclass(frozen=True)
class Exits:
    """Exit depths beside the teacher's and beside the last loop's tokens, on the same positions.

    `ce` in nats; `ce_regret` what the exits cost beyond the teacher's. `same_token`: the share of exits that put the
    token first that the last loop does. `underthinking`: exits that do not; `overthinking`: exits later than the first
    depth from which on every loop does.
    """

    agreement: float
    kappa: float
    within_one: float
    mean_depth: float
    ce: float
    ce_regret: float
    same_token: float
    underthinking: float
    overthinking: float


def judge(depths: Tensor, wanted: Tensor, losses: Tensor, right: Tensor) -> Exits:
    """Exit `depths` [N] against the teacher's `wanted` [N], with losses and `right` (see `Held`) [N, R]."""
    at_exit = right.gather(1, depths[:, None] - 1)[:, 0]
    late = depths > settled(right)
    ce = mean_at(losses, depths)
    return Exits(
        agreement=agreement(depths, wanted),
        kappa=weighted_kappa(depths, wanted, right.shape[1]),
        within_one=float(((depths - wanted).abs() <= 1).double().mean()),
        mean_depth=float(depths.double().mean()),
        ce=ce,
        ce_regret=ce - mean_at(losses, wanted),
        same_token=float(at_exit.double().mean()),
        underthinking=float((~at_exit).double().mean()),
        overthinking=float(late.double().mean()),
    )


def settled(right: Tensor) -> Tensor:
    """The first depth from which on every loop puts first what the last one does: bool [N, R] to [N]."""
    return right.shape[1] + 1 - right.flip(-1).long().cumprod(-1).sum(-1)


def mean_at(losses: Tensor, depths: Tensor) -> float:
    """Mean of losses [N, R] at depths [N]."""
    return float(losses.gather(1, depths[:, None] - 1).double().mean())


def random_exits(wanted: Tensor, losses: Tensor, right: Tensor) -> Exits:
    """What exits with the teacher's histogram, dealt out at random, are expected to give."""
    loops = right.shape[1]
    share = torch.bincount(wanted - 1, minlength=loops).double() / len(wanted)
    near = sum(share[d] * share[max(0, d - 1) : d + 2].sum() for d in range(loops))
    correct = (share * right.double().mean(0)).sum()
    depth = torch.arange(1, loops + 1, device=wanted.device)
    late = (share * (depth > settled(right)[:, None]).double().mean(0)).sum()
    ce = float((share * losses.double().mean(0)).sum())
    return Exits(
        agreement=float((share**2).sum()),
        kappa=0.0,
        within_one=float(near),
        mean_depth=float(wanted.double().mean()),
        ce=ce,
        ce_regret=ce - mean_at(losses, wanted),
        same_token=float(correct),
        underthinking=1 - float(correct),
        overthinking=float(late),
    )


def auroc(scores: Tensor, labels: Tensor) -> float | None:
    """Probability that a positive ranks above a negative, ties half: scores [N], bool labels [N]. None without both."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def auroc_by_depth(mine: Curve, wanted: Tensor) -> dict[str, float | None]:
    """How well a gate's value at each depth ranks the tokens that the teacher has let go by then."""
    sign = -1 if mine.below else 1
    depths = range(mine.min_depth, mine.max_depth)
    return {str(d): auroc(sign * mine.cumulative[:, i], wanted <= d) for i, d in enumerate(depths)}


def brier(mine: Curve, wanted: Tensor) -> float:
    """Mean over depths of the squared difference of C(d) and whether the teacher has let go by d."""
    depths = torch.arange(mine.min_depth, mine.max_depth, device=wanted.device)
    left = (wanted[:, None] <= depths).double()
    return float((mine.cumulative - left).square().mean())


@dataclass(frozen=True)
class Bin:
    """Predicted hazards between two tenths: their mean, that of what was to be, and their share of the weight."""

    predicted: float
    found: float
    share: float


def reliability(predicted: Tensor, found: Tensor, weight: Tensor | None = None) -> list[Bin]:
    """Bins of predictions [...] in 0..1 against what was to be [...], weighted [...]; empty ones are left out."""
    flat, target = predicted.flatten().double(), found.flatten().double()
    weights = torch.ones_like(flat) if weight is None else weight.flatten().double()
    place = (flat * BINS).long().clamp(0, BINS - 1)
    mass, mean, truth = (
        torch.zeros(BINS, dtype=torch.float64, device=flat.device).index_add_(0, place, x)
        for x in (weights, weights * flat, weights * target)
    )
    total = float(mass.sum())
    return [
        Bin(float(mean[i] / mass[i]), float(truth[i] / mass[i]), float(mass[i]) / total)
        for i in range(BINS)
        if float(mass[i]) > 0
    ]


def calibration_error(bins: list[Bin]) -> float:
    """Expected calibration error: the mean distance of predictions and what was to be."""
    return sum(item.share * abs(item.predicted - item.found) for item in bins)


@dataclass(frozen=True)
class Point:
    """The gate at one mean depth: how often its exits say what the last loop says, and their loss."""

    threshold: float
    mean_depth: float
    same_token: float
    ce: float


def depth_curve(mine: Curve, losses: Tensor, right: Tensor) -> list[Point]:
    """Points at mean depths spread evenly over those that the gate can give."""
    points = []
    span = mine.max_depth - mine.min_depth
    for step in range(_POINTS + 1):
        threshold = threshold_for(mine, mine.min_depth + span * step / _POINTS)
        depths = exit_depths(mine, threshold)
        same = float(right.gather(1, depths[:, None] - 1).double().mean())
        points.append(Point(threshold, float(depths.double().mean()), same, mean_at(losses, depths)))
    return sorted(points, key=lambda point: point.mean_depth)


def area(points: list[Point], max_depth: int) -> float:
    """Mean share of unchanged tokens over mean depths from the shallowest point to R, where nothing changes."""
    line = [(point.mean_depth, point.same_token) for point in points] + [(float(max_depth), 1.0)]
    width = line[-1][0] - line[0][0]
    if width <= 0:
        return line[-1][1]
    total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(line))
    return total / width
