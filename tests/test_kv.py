"""KV layouts against the design's table."""

from __future__ import annotations

import pytest

from looped.errors import LoopedError
from looped.kv import get_layout


@pytest.mark.parametrize(
    ("name", "planes", "written"),
    [
        ("depth", 4, [0, 1, 2, 3]),
        ("last-exited", 4, [0, 1, 2, 3]),
        ("ragged", 4, [0, 1, 2, 3]),
        ("shared", 1, [0, 0, 0, 0]),
        ("first-shared", 2, [0, 1, 1, 1]),
        ("modulo-1", 1, [0, 0, 0, 0]),
        ("modulo-3", 3, [0, 1, 2, 0]),
        ("modulo-9", 4, [0, 1, 2, 3]),
    ],
)
def test_planes(name: str, planes: int, written: list[int]) -> None:
    layout = get_layout(name)
    assert layout.num_planes(4) == planes
    assert [layout.write_plane(step) for step in (1, 2, 3, 4)] == written


@pytest.mark.parametrize(
    ("name", "exit_depth", "missing"),
    [
        ("last-exited", 1, ((1, 0), (2, 0), (3, 0))),
        ("ragged", 3, ((3, 2),)),
        ("ragged", 4, ()),
        ("shared", 1, ()),
        ("first-shared", 1, ((1, 0),)),
        ("first-shared", 2, ()),
        ("modulo-3", 2, ((2, 1),)),
        ("modulo-3", 3, ()),
    ],
)
def test_missing_planes(name: str, exit_depth: int, missing: tuple[tuple[int, int], ...]) -> None:
    assert get_layout(name).missing_planes(exit_depth, 4) == missing


@pytest.mark.parametrize("name", ["depth", "last-exited", "ragged", "shared", "first-shared", "modulo-2"])
@pytest.mark.parametrize("max_loops", [1, 2, 3, 5])
def test_every_plane_is_written_or_filled(name: str, max_loops: int) -> None:
    layout = get_layout(name)
    for exit_depth in range(1, max_loops + 1):
        written = {layout.write_plane(step) for step in range(1, exit_depth + 1)}
        filled = dict(layout.missing_planes(exit_depth, max_loops))
        assert written | set(filled) == set(range(layout.num_planes(max_loops)))
        assert not written & set(filled)
        assert set(filled.values()) <= written


def test_cut_sensitive_layouts_overwrite() -> None:
    assert {n: get_layout(n).cut_sensitive for n in ("depth", "ragged", "last-exited", "shared", "modulo-2")} == {
        "depth": False,
        "ragged": False,
        "last-exited": False,
        "shared": True,
        "modulo-2": True,
    }


def test_unknown_layouts() -> None:
    with pytest.raises(LoopedError, match="did you mean 'ragged'"):
        get_layout("raged")
    with pytest.raises(LoopedError, match="at least 1"):
        get_layout("modulo-0")
    with pytest.raises(LoopedError, match="such as modulo-2"):
        get_layout("modulo-m")
    with pytest.raises(LoopedError, match="given by name"):
        get_layout(3)  # type: ignore[arg-type]
