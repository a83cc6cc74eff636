"""Gates with weights, in every form, in the engine against the reference decoder, exactly, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from looped import SamplingParams
from looped.decode import PrefillSchedule
from tests.infer.harness import exits_modes, gate_case, micro, pairs, prompts, reference
from tests.infer.test_modes import check, chunked
from tests.trained import ALL

WORK = prompts((1, 15, 5))
SIX = SamplingParams(0, 6, ignore_eos=True)
FAMILIES = ("ouro", "huginn")

CHOICES: dict[str, tuple[Any, ...]] = {
    "gate": tuple(ALL),
    "family": FAMILIES,
    "layout": ("last-exited", "ragged", "shared"),
    "mode": ("refill", "no-refill"),
    "exits": ("sync", "lookahead", "device"),
    "pad_batches": (False, True),
    "compute": ("sparse", "dense"),
}


@pytest.mark.parametrize("row", pairs(**CHOICES), ids=lambda row: "-".join(map(str, row.values())))
def test_engine_equals_reference(row: dict[str, Any]) -> None:
    family, gate, layout, mode = (row.pop(name) for name in ("family", "gate", "layout", "mode"))
    if row["exits"] not in exits_modes(family, gate) or row["compute"] == "dense":
        row["exits"] = "sync"
    check(family, mode, layout, gate, WORK, SIX, max_num_seqs=2, chunk_size=chunked(layout), **row)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ALL)
def test_exits_spread_over_depths(family: str, gate: str) -> None:
    depths = [d for prompt in WORK for d in reference(family, "last-exited", gate, prompt, 8)[1][1:]]
    assert len(set(depths)) > 1 and min(depths) < micro(family).config.max_loops


@pytest.mark.parametrize("gate", [name for name in ALL if not gate_case("ouro", name).gate.uses_carry])
def test_ragged_prefill(gate: str) -> None:
    threshold = gate_case("ouro", gate).threshold
    assert threshold is not None
    check("ouro", "refill", "ragged", gate, WORK, SIX, PrefillSchedule(threshold), max_num_seqs=2)


def test_a_pre_loop_gate_that_sees_the_token_alone_needs_no_token_before() -> None:
    gates = {
        name: gate_case("ouro", name).gate for name in ("pre-loop-embedding", "pre-loop-depth-mlp", "hybrid-change")
    }
    assert [gate.uses_carry for gate in gates.values() if gate is not None] == [False, True, True]
