"""What the steps of an objective cost: loop steps, reads of the head, loops held for a backward pass."""

from __future__ import annotations

from typing import NamedTuple

from looped.config import ModelConfig
from looped.kv import get_layout
from looped.train.pretrain.recipe import Objective, Options, Recurrence
from looped.train.pretrain.rollout import Setting, loops_trained


class StepKind(NamedTuple):
    """A share of a run's micro-batches: loop steps with a backward pass, reads of the head, loops held at once."""

    share: float
    loops: float
    heads: float
    held: float


def step_kinds(options: Options, config: ModelConfig) -> list[StepKind]:
    """The kinds of step of a recipe, those that occur."""
    kinds = _ouro(options.objective, config) if config.exit_gate else _huginn(options.recurrence, config)
    return [kind for kind in kinds if kind.share > 0]


def _ouro(objective: Objective, config: ModelConfig) -> list[StepKind]:
    loops, held = _sampled(objective, config)
    dense = StepKind(1.0, loops, _mean_loops(objective, config), held)
    setting = _setting(objective)
    late = 0.0 if setting.layout.needs_dense else 1 - objective.ragged_from
    aware, kept = loops_trained(setting, config.max_loops), _held(setting, config.max_loops)
    if objective.aware == "reinforce":
        count = objective.trajectories
        both = StepKind(late, loops + count * aware, dense.heads + count, held + count * kept)
        return [dense._replace(share=1 - late), both]
    share = late * objective.kv_share
    heads = 1.0 if objective.aware == "alternate" else float(config.max_loops)
    return [dense._replace(share=1 - share), StepKind(share, aware, heads, kept)]


def _huginn(recurrence: Recurrence, config: ModelConfig) -> list[StepKind]:
    loops, held = _sampled(recurrence, config)
    heads = 2.0 if recurrence.shallow_weight else 1.0
    share = recurrence.kv_share * (1 - recurrence.kv_from)
    setting = _setting(recurrence)
    ratio = loops_trained(setting, 1), _held(setting, 1)
    return [StepKind(1 - share, loops, heads, held), StepKind(share, loops * ratio[0], heads, held * ratio[1])]


def _mean_loops(part: Objective | Recurrence, config: ModelConfig) -> float:
    known = {"fixed": float(config.max_loops), "uniform": (config.max_loops + 1) / 2}
    return known.get(part.sampling, min(part.mean, config.max_loops))


def _sampled(part: Objective | Recurrence, config: ModelConfig) -> tuple[float, float]:
    """Loops of a mean dense step, and the most that are held."""
    loops, most = _mean_loops(part, config), float(config.max_loops)
    if not part.backprop:
        return loops, most
    return loops - 2 / 3 * max(0.0, loops - part.backprop), min(most, part.backprop)


def _setting(part: Objective | Recurrence) -> Setting:
    return Setting(get_layout(part.kv), True, None, part.kv_passes, part.kv_gradient)


def _held(setting: Setting, num_loops: int) -> float:
    return num_loops * (2.0 if setting.layout.cut_sensitive and setting.gradient else 1.0)
