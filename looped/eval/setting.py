"""One cell of a grid: the KV layout and the depth policy that a model is scored under. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from looped.errors import LoopedError
from looped.server.choices import prefill_schedule

if TYPE_CHECKING:
    from looped.decode import DecodePolicy, PrefillSchedule
    from looped.gates import Gate
    from looped.kv import KVLayout
    from looped.model import LoopedLM

FULL_DEPTH = "none"


@dataclass(frozen=True)
class Setting:
    """KV layout and depth policy; None takes the model's layout, full depth, the gate's own threshold and min_depth.

    `prefill="ragged"` lets prompt tokens leave early, at `prefill_threshold` (None: that of the answer), with the first
    `prefill_protected` at full depth; with `prefill_cosine` the threshold falls to it from 1 over the prompt.
    """

    kv: str | KVLayout | None = None
    gate: str | Path | Gate | None = None
    threshold: float | None = None
    min_depth: int | None = None
    depth: int | None = None
    compute: str = "sparse"
    prefill: str = "dense"
    prefill_threshold: float | None = None
    prefill_cosine: bool = False
    prefill_protected: int = 0

    @property
    def schedule(self) -> float | PrefillSchedule | None:
        """The thresholds of a ragged prefill."""
        return prefill_schedule(self.prefill_threshold, self.prefill_cosine, self.prefill_protected)

    def policy(self, model: LoopedLM) -> DecodePolicy:
        """The setting with every default filled in. Raises `LoopedError` for what the model cannot run."""
        from looped.decode import resolve_policy

        return resolve_policy(
            model,
            self.kv,
            self.gate,
            self.threshold,
            self.min_depth,
            self.depth,
            self.compute,
            self.prefill,
            self.schedule,
        )

    def gate_label(self) -> str | None:
        """The gate as it was asked for: a name or a folder; of a gate object its own name."""
        if self.gate is None or isinstance(self.gate, str | Path):
            return None if self.gate is None else str(self.gate)
        return self.gate.name


def label(setting: Setting, policy: DecodePolicy) -> str:
    """The name of a setting in results: `ragged gate=ouro q=0.5`, `shared depth=2`, `depth full`."""
    parts = [policy.layout.name]
    if setting.gate is not None:
        parts += [f"gate={setting.gate_label()}", f"q={policy.threshold:g}"]
        parts += [f"min={setting.min_depth}"] if setting.min_depth is not None else []
        parts += ["dense"] if policy.dense_compute else []
    if policy.prefill is not None:
        schedule = policy.prefill
        parts.append(f"prefill={'cosine-' if schedule.cosine else ''}{schedule.threshold:g}")
        parts += [f"protected={schedule.protected}"] if schedule.protected else []
    if setting.depth is not None:
        parts.append(f"depth={setting.depth}")
    return " ".join(parts if len(parts) > 1 else [*parts, "full"])


def grid(
    kvs: Sequence[str] = (),
    gates: Sequence[str] = (),
    thresholds: Sequence[float] = (),
    depths: Sequence[int] = (),
    min_depth: int | None = None,
    compute: str = "sparse",
    prefill: Setting | None = None,
) -> list[Setting]:
    """All combinations of the lists. An empty list is the default; the gate `none` is full depth. `prefill` has the
    prefill of the cells that have a gate.

    Raises `LoopedError` where fixed depths and gates are asked for together, or a threshold or a ragged prefill without
    a gate.
    """
    if depths and gates:
        raise LoopedError("--depth and --gate exclude each other; a fixed depth needs no gate")
    if not gates and (thresholds or min_depth is not None):
        raise LoopedError("--threshold and --min-depth need a gate; name one with --gate")
    with_gate = prefill or Setting()
    if not gates and with_gate.prefill != "dense":
        raise LoopedError("--prefill ragged needs a gate; name one with --gate")
    policies: list[Setting] = [Setting(depth=depth) for depth in depths]
    for gate in gates:
        if gate == FULL_DEPTH:
            policies.append(Setting())
        else:
            cell = replace(with_gate, gate=gate, min_depth=min_depth)
            policies += [replace(cell, threshold=q) for q in thresholds or (None,)]
    cells = itertools.product(kvs or (None,), policies or [Setting()])
    settings = [replace(policy, kv=kv, compute=compute) for kv, policy in cells]
    return list(dict.fromkeys(settings))
