"""Reading and writing the rows of `DeviceState` around the stages: fixed shapes, no wait, fit for a CUDA graph.

These are the PyTorch versions, which say what happens; on a GPU with Triton `row_ops` gives kernels that do the same
(`backends/kernels/rows.py`). Padding rows have slot 0 and may be many; slot 0 stays idle.
"""

# S slots, N rows, D width, E end ids

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from looped.sampling import ends

if TYPE_CHECKING:
    from looped.infer.state import DeviceState

# Phases of a slot: the queue its token stands in.
IDLE, PRELUDE, CORE, CODA = range(4)


class RowOps(NamedTuple):
    """The functions below, or kernels that do the same."""

    begin: Callable[[DeviceState, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    outcome: Callable[[DeviceState, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    fresh: Callable[[DeviceState, Tensor], tuple[Tensor, Tensor, Tensor]]
    leave: Callable[[DeviceState, Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
    enter: Callable[[DeviceState, Tensor, Tensor, Tensor], None]
    land: Callable[[DeviceState, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    select: Callable[[DeviceState, int, int], Tensor]
    tally: Callable[[DeviceState], Tensor]


def row_ops(device: torch.device) -> RowOps:
    """Kernels on a GPU that has Triton, else PyTorch."""
    module = sys.modules[__name__]
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from looped.infer.backends.kernels import rows as module
    return RowOps(*(getattr(module, name) for name in RowOps._fields))


def begin(state: DeviceState, planes: Tensor, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a core step needs of its rows: positions, the step each is about to run, the plane it writes (`planes`, by
    step), and h [N, D]. Padding runs step 1."""
    steps = torch.where(at_N > 0, state.step[at_N] + 1, 1)
    return state.position[at_N], steps, planes[steps], state.h[at_N]


def outcome(state: DeviceState, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the coda needs of its rows: slots, positions, the depths that their tokens left at, and h [N, D]. Rows of
    slots that stand in another queue become padding."""
    at = torch.where(state.phase[at_N] == CODA, at_N, 0)
    depth = state.step if state.depth is None else state.depth
    h = state.h if state.exit_h is None else state.exit_h
    return at, state.position[at], depth[at], h[at]


def fresh(state: DeviceState, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the prelude needs of its rows: slots, positions and tokens [N]. Rows of slots that stand in another queue
    become padding."""
    at = torch.where(state.phase[at_N] == PRELUDE, at_N, 0)
    return at, state.position[at], state.token[at]


def leave(
    state: DeviceState, tick: Tensor, at_N: Tensor, steps_N: Tensor, h_ND: Tensor, said_N: Tensor | None, late: bool
) -> Tensor:
    """Put a core step's results back and move its rows on: to the coda's queue at their largest depth and where the
    gate says so (`said_N`; with `late`, what it said one step before). Returns who left, padding apart: bool [N]."""
    live = at_N > 0
    out = steps_N >= state.max_depth[at_N]
    if said_N is not None:
        out = out | (state.ahead[at_N] if late else said_N)
        state.ahead[at_N] = said_N
    state.h[at_N] = h_ND
    state.step[at_N] = torch.where(live, steps_N, 0)
    _move(state, tick, at_N, torch.where(out, CODA, CORE))
    return out & live


def enter(state: DeviceState, tick: Tensor, at_N: Tensor, h_ND: Tensor) -> None:
    """Take new tokens into the loop, before their first step."""
    state.h[at_N] = h_ND
    state.step.index_fill_(0, at_N, 0)  # a plain assignment would copy its number from the host
    _move(state, tick, at_N, CORE)


def land(
    state: DeviceState,
    tick: Tensor,
    at_N: Tensor,
    tokens_N: Tensor,
    ok_N: Tensor,
    positions_N: Tensor,
    depths_N: Tensor,
    ends_SE: Tensor,
    min_tokens_S: Tensor,
) -> Tensor:
    """New tokens behind `positions`: their rows go to the prelude's queue, or idle where the sequence ends: at one of
    its end ids (`ends_SE`, once `min_tokens_S` tokens were there), at its full length, or where the logits were not
    finite (`ok_N`). Returns slots, tokens, depths and `ok` [4, N]."""
    live = at_N > 0
    index = state.index[at_N]
    following = torch.where(live, positions_N + 1, 0)
    stops = ends(tokens_N, ends_SE[at_N], min_tokens_S[at_N], index)
    over = stops | (following + 1 >= state.max_len[at_N]) | ~ok_N
    state.token[at_N] = torch.where(live, tokens_N, 0)
    state.position[at_N] = following
    state.index[at_N] = torch.where(live, index + 1, 0)
    _move(state, tick, at_N, torch.where(over, IDLE, PRELUDE))
    return torch.stack((at_N, tokens_N, depths_N, ok_N.long()))


def select(state: DeviceState, phase: int, rows: int) -> Tensor:
    """The slots that stand in a queue, those that have waited longest first: [rows], padded with slot 0."""
    inside = state.phase == phase
    never = torch.iinfo(torch.long).max
    order = torch.where(inside, state.since, never).argsort(stable=True)[:rows]
    return torch.where(inside[order], order, 0)


def tally(state: DeviceState) -> Tensor:
    """How many slots stand in the prelude, core and coda queues: [3]."""
    return torch.stack([(state.phase == phase).sum() for phase in (PRELUDE, CORE, CODA)])


def _move(state: DeviceState, tick: Tensor, at_N: Tensor, phase: Tensor | int) -> None:
    state.phase[at_N] = torch.where(at_N > 0, phase, IDLE)
    state.since[at_N] = tick
