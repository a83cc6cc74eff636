"""One cell of a grid: the KV layout and the depth policy that a model is scored under. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from looped.errors import LoopedError

if TYPE_CHECKING:
    from looped.decode import DecodePolicy
    from looped.gates import Gate
    from looped.kv import KVLayout
    from looped.model import LoopedLM

FULL_DEPTH = "none"


@dataclass(frozen=True)
class Setting:
    """KV layout and depth policy; None takes the model's layout, full depth, the gate's own threshold and min_depth."""

    kv: str | KVLayout | None = None
    gate: str | Path | Gate | None = None
    threshold: float | None = None
    min_depth: int | None = None
    depth: int | None = None
    compute: str = "sparse"

    def policy(self, model: LoopedLM) -> DecodePolicy:
        """The setting with every default filled in. Raises `LoopedError` for what the model cannot run."""
        from looped.decode import resolve_policy

        return resolve_policy(model, self.kv, self.gate, self.threshold, self.min_depth, self.depth, self.compute)

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
) -> list[Setting]:
    """All combinations of the lists. An empty list is the default; the gate `none` is full depth.

    Raises `LoopedError` where fixed depths and gates are asked for together, or a threshold without a gate.
    """
    if depths and gates:
        raise LoopedError("--depth and --gate exclude each other; a fixed depth needs no gate")
    if not gates and (thresholds or min_depth is not None):
        raise LoopedError("--threshold and --min-depth need a gate; name one with --gate")
    policies: list[Setting] = [Setting(depth=depth) for depth in depths]
    for gate in gates:
        if gate == FULL_DEPTH:
            policies.append(Setting())
        else:
            policies += [Setting(gate=gate, threshold=q, min_depth=min_depth) for q in thresholds or (None,)]
    cells = itertools.product(kvs or (None,), policies or [Setting()])
    settings = [Setting(kv, p.gate, p.threshold, p.min_depth, p.depth, compute) for kv, p in cells]
    return list(dict.fromkeys(settings))
