"""KV layouts as data: how many planes of recurrent K/V a token keeps, which one each loop step writes and reads.

A plane is one copy of a token's K/V in the core layers. Loop steps count from 1, planes from 0. Every layout reads the
plane it writes, so one page table indexed by plane serves a batch that mixes loop steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from looped.errors import LoopedError, unknown

LAYOUT_NAMES = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-m")


@dataclass(frozen=True)
class KVLayout:
    """One KV layout. `planes` is the fixed number of planes, or None for one plane a loop step."""

    name: str
    planes: int | None
    aliases: bool = False
    """Planes a token never wrote are page-table aliases of its last one; nothing is copied (`ragged`)."""
    needs_dense: bool = False
    """Every token must write every plane: full depth, or `compute="dense"` (`depth`)."""

    def num_planes(self, max_loops: int) -> int:
        """P, the planes a core layer keeps for one token of a model run with R = `max_loops`."""
        return max_loops if self.planes is None else min(self.planes, max_loops)

    def write_plane(self, step: int) -> int:
        """The plane that loop step `step` (from 1) writes, and that its queries read of earlier tokens."""
        if self.planes is None:
            return step - 1
        if self.name == "first-shared":
            return min(step - 1, 1)
        return (step - 1) % self.planes

    def missing_planes(self, exit_depth: int, max_loops: int) -> tuple[tuple[int, int], ...]:
        """(plane, source) pairs to fill when a token exits after `exit_depth` loops: planes it never wrote."""
        planes = self.num_planes(max_loops)
        return tuple((plane, exit_depth - 1) for plane in range(exit_depth, planes))

    @property
    def cut_sensitive(self) -> bool:
        """Planes are overwritten, so a prompt's result depends on how it is cut into chunks."""
        return self.planes is not None


def get_layout(layout: str | KVLayout) -> KVLayout:
    """The layout of a name: `depth`, `last-exited`, `ragged`, `shared`, `first-shared` or `modulo-m` for m >= 1."""
    if isinstance(layout, KVLayout):
        return layout
    if not isinstance(layout, str):
        raise LoopedError(f"a KV layout is given by name, one of {', '.join(LAYOUT_NAMES)}; got {layout!r}")
    match = re.fullmatch(r"modulo-(\d+)", layout)
    if match:
        if int(match[1]) < 1:
            raise LoopedError(f"KV layout {layout!r}: the number of planes must be at least 1")
        return KVLayout(layout, planes=int(match[1]))
    known = {
        "depth": KVLayout("depth", planes=None, needs_dense=True),
        "last-exited": KVLayout("last-exited", planes=None),
        "ragged": KVLayout("ragged", planes=None, aliases=True),
        "shared": KVLayout("shared", planes=1),
        "first-shared": KVLayout("first-shared", planes=2),
    }
    if layout == "modulo-m":
        raise LoopedError("KV layout 'modulo-m' needs its number of planes in place of m, such as modulo-2")
    if layout not in known:
        raise unknown("KV layout", layout, LAYOUT_NAMES)
    return known[layout]
