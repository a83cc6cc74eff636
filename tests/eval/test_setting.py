"""The grid and the names of its cells."""

from __future__ import annotations

from typing import Any

import pytest

from looped.errors import LoopedError
from looped.eval.setting import Setting, grid, label
from looped.model import LoopedLM


def test_the_grid_is_layouts_by_gates_by_thresholds() -> None:
    cells = grid(kvs=("ragged", "shared"), gates=("none", "ouro", "convergence"), thresholds=(0.5, 0.9))
    assert len(cells) == 2 * (1 + 2 * 2)
    assert cells[:3] == [
        Setting("ragged"),
        Setting("ragged", gate="ouro", threshold=0.5),
        Setting("ragged", gate="ouro", threshold=0.9),
    ]
    assert {cell.kv for cell in cells} == {"ragged", "shared"}


def test_the_prefill_belongs_to_cells_with_a_gate() -> None:
    ragged = Setting(prefill="ragged", prefill_threshold=0.3, prefill_protected=2)
    plain, gated = grid(gates=("none", "ouro"), prefill=ragged)
    assert plain == Setting()
    assert gated == Setting(gate="ouro", prefill="ragged", prefill_threshold=0.3, prefill_protected=2)


def test_fixed_depths_take_the_place_of_gates() -> None:
    assert grid(kvs=("depth",), depths=(1, 4)) == [Setting("depth", depth=1), Setting("depth", depth=4)]
    assert grid() == [Setting()]
    assert grid(gates=("ouro",)) == [Setting(gate="ouro")]


def test_equal_cells_are_scored_once() -> None:
    assert grid(kvs=("ragged", "ragged"), gates=("none", "none")) == [Setting("ragged")]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"depths": (2,), "gates": ("ouro",)}, "exclude each other"),
        ({"thresholds": (0.5,)}, "need a gate"),
        ({"min_depth": 2}, "need a gate"),
        ({"prefill": Setting(prefill="ragged")}, "ragged needs a gate"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoopedError, match=sentence):
        grid(**given)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (Setting("shared"), "shared full"),
        (Setting(None), "ragged full"),
        (Setting("depth", depth=2), "depth depth=2"),
        (Setting("ragged", gate="ouro", threshold=0.5), "ragged gate=ouro q=0.5"),
        (Setting("ragged", gate="ouro", threshold=0.5, min_depth=2), "ragged gate=ouro q=0.5 min=2"),
        (Setting("depth", gate="ouro", threshold=0.5), "depth gate=ouro q=0.5 dense"),
        (Setting(gate="ouro", threshold=0.5, prefill="ragged"), "ragged gate=ouro q=0.5 prefill=0.5"),
        (
            Setting("ragged", "ouro", 0.5, None, None, "sparse", "ragged", 0.3, True, 4),
            "ragged gate=ouro q=0.5 prefill=cosine-0.3 protected=4",
        ),
    ],
)
def test_a_cell_is_named_by_what_runs(model: LoopedLM, setting: Setting, name: str) -> None:
    assert label(setting, setting.policy(model)) == name
