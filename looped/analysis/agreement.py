"""Timing never changes output: what the bench's runs generated, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from looped.errors import LoopedError

if TYPE_CHECKING:
    from looped.analysis.drive import Generated, Run
    from looped.model import LoopedLM

Runs = Mapping[str, Sequence["Run"]]


def check_outputs(model: LoopedLM, runs: Runs, wanted: int | None, replayed: bool, again: Callable[[], Runs]) -> str:
    """Compare tokens and depths of all rounds and of both gated schedulers; returns in words how that went.

    `wanted` is the number of tokens that every run must have generated, None if any will do; `replayed` says that the
    depths were given; `again` runs the gated schedulers in float64. Raises `LoopedError` for logits that are not
    finite, `RuntimeError` for outputs that differ.

    Batches of different sizes round differently, which can tip a token whose two best logits are nearly equal. On a
    CPU rounds have the same batches, and where schedulers differ, float64 tells. On a GPU batches depend on timing, so
    there depths are compared where they were given, and for the rest the differing requests are counted.
    """
    if any(run.failed for done in runs.values() for run in done):
        raise LoopedError(f"the logits of {model.name} are not finite, so there is no speed to measure")
    if wanted is not None:
        counts = {mode: [run.tokens for run in done] for mode, done in runs.items()}
        if {count for of_mode in counts.values() for count in of_mode} != {wanted}:
            raise RuntimeError(f"the schedulers generated different numbers of tokens: {counts}")
    if model.device.type == "cuda" and model.dtype != torch.float64:
        return _loosely(runs, replayed)
    for mode, done in runs.items():
        if any(run.outputs != done[0].outputs for run in done):
            raise RuntimeError(f"{mode} generated different tokens or depths in two rounds of the same work list")
    gated = [mode for mode in runs if mode != "cb"]
    if len(gated) < 2:
        return "not compared: fewer than two schedulers with exits ran"
    first, second = (runs[mode][0].outputs for mode in gated)
    differing = _differing(first, second)
    if not differing:
        return f"{' and '.join(gated)}: the same tokens and exit depths"
    if model.dtype != torch.float64:
        wide = again()
        if not _differing(*(wide[mode][0].outputs for mode in gated)):
            return (
                f"{' and '.join(gated)}: the same tokens and exit depths in float64; in {_name(model)} rounding tips "
                f"{differing} of {len(first)} requests"
            )
    raise RuntimeError(f"{' and '.join(gated)} generated different tokens or depths; timing must never change output")


def _loosely(runs: Runs, replayed: bool) -> str:
    gated = [run.outputs for mode, done in runs.items() if mode != "cb" for run in done]
    if len(gated) < 2:
        return "not compared: fewer than two runs with exits"
    if replayed and any([depths for _, depths in run] != [depths for _, depths in gated[0]] for run in gated):
        raise RuntimeError("two runs had different exit depths, though the depths were given")
    most = max(_differing(gated[0], run) for run in gated)
    same = "the given exit depths in all of them; " if replayed else ""
    return (
        f"{len(gated)} runs with exits: {same}batches that depend on timing round differently, which tipped a token in "
        f"at most {most} of {len(gated[0])} requests"
    )


def _differing(first: Sequence[Generated], second: Sequence[Generated]) -> int:
    return sum(a != b for a, b in zip(first, second, strict=True))


def _name(model: LoopedLM) -> str:
    return str(model.dtype).removeprefix("torch.")
