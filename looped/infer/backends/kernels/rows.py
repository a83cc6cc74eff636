"""The engine's rows by slot, read and written around the stages: one kernel where PyTorch takes five to fifteen.

Kernels that end a stage are launched to start while their predecessor ends; those that may begin one are not.
"""

# S slots, N rows, D width, E end ids
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped.infer.backends.kernels.lookup import padded
from looped.model.kernels.launch import after_previous, launch_options

WIDE = 1024
BLOCK = 128
RANKED = 16
IDLE, PRELUDE, CORE, CODA = (tl.constexpr(phase) for phase in range(4))


@triton.jit
def _copy_row(source, target, width, WIDE: tl.constexpr):
    for start in range(0, width, WIDE):
        at = start + tl.arange(0, WIDE)
        tl.store(target + at, tl.load(source + at, mask=at < width, other=0.0), mask=at < width)


@triton.jit
def _begin(
    slots, position, step, planes, h, positions_out, steps_out, planes_out, h_out, width, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    now = tl.where(slot > 0, tl.load(step + slot) + 1, 1)
    tl.store(positions_out + row, tl.load(position + slot))
    tl.store(steps_out + row, now)
    tl.store(planes_out + row, tl.load(planes + now))
    _copy_row(h + slot * width, h_out + row * width, width, WIDE)


@triton.jit
def _standing_rows(
    slots, phase, position, depth, h, slots_out, positions_out, depths_out, h_out, width,
    WANTED: tl.constexpr, COPY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    slot = tl.where(tl.load(phase + slot) == WANTED, slot, 0)
    tl.store(slots_out + row, slot)
    tl.store(positions_out + row, tl.load(position + slot))
    tl.store(depths_out + row, tl.load(depth + slot))
    if COPY:
        _copy_row(h + slot * width, h_out + row * width, width, WIDE)


@triton.jit
def _leave(
    slots, steps, h_in, decision, tick, h, step, ahead, phase, since, max_depth, leaving_out, width,
    GATED: tl.constexpr, LATE: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    now = tl.load(steps + row)
    out = now >= tl.load(max_depth + slot)
    if GATED:
        said = tl.load(decision + row) != 0
        out = out | (tl.load(ahead + slot) != 0) if LATE else out | said
        tl.store(ahead + slot, said)
    live = slot > 0
    tl.store(step + slot, tl.where(live, now, 0))
    tl.store(phase + slot, tl.where(live, tl.where(out, CODA, CORE), IDLE).to(tl.int64))
    tl.store(since + slot, tl.load(tick))
    tl.store(leaving_out + row, out & live)
    _copy_row(h_in + row * width, h + slot * width, width, WIDE)


@triton.jit
def _enter(slots, h_in, tick, h, step, phase, since, width, WIDE: tl.constexpr, OVERLAP: tl.constexpr):
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    tl.store(step + slot, tl.zeros((), tl.int64))
    tl.store(phase + slot, tl.where(slot > 0, CORE, IDLE).to(tl.int64))
    tl.store(since + slot, tl.load(tick))
    _copy_row(h_in + row * width, h + slot * width, width, WIDE)


@triton.jit(do_not_specialize=["num_rows"])
def _land(
    slots, tokens, ok, positions, depths, tick, ends, min_tokens, token, position, index, max_len, phase, since, out,
    num_rows, min_stride, ENDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N,). A row's end ids are read at once: one after the other each would wait for the memory."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    drawn = tl.load(tokens + row)
    fine = tl.load(ok + row) != 0
    live = slot > 0
    following = tl.where(live, tl.load(positions + row) + 1, 0)
    number = tl.load(index + slot)
    end = tl.arange(0, BLOCK)
    is_end = tl.load(ends + slot * ENDS + end, mask=end < ENDS, other=-1) == drawn
    stops = (tl.max(is_end.to(tl.int32), 0) > 0) & (number >= tl.load(min_tokens + slot * min_stride))
    over = stops | (following + 1 >= tl.load(max_len + slot)) | (fine == 0)
    # Padding rows are many and all write slot 0: its values must come out the same whichever is last.
    tl.store(token + slot, tl.where(live, drawn, 0))
    tl.store(position + slot, following)
    tl.store(index + slot, tl.where(live, number + 1, 0))
    tl.store(phase + slot, tl.where(live & (over == 0), PRELUDE, IDLE).to(tl.int64))
    tl.store(since + slot, tl.load(tick))
    tl.store(out + row, slot)
    tl.store(out + num_rows + row, drawn)
    tl.store(out + 2 * num_rows + row, tl.load(depths + row))
    tl.store(out + 3 * num_rows + row, fine.to(tl.int64))


@triton.jit
def _rank(phase, since, out, wanted, num_slots, num_rows, RANKED: tl.constexpr, BLOCK: tl.constexpr):
    slot = (tl.program_id(0) * RANKED + tl.arange(0, RANKED)).to(tl.int64)
    here = (slot < num_slots) & (tl.load(phase + slot, mask=slot < num_slots, other=-1) == wanted)
    mine = tl.load(since + slot, mask=here, other=0)
    rank = tl.zeros((RANKED,), tl.int64)
    waiting = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_slots, BLOCK):
        other = start + tl.arange(0, BLOCK)
        waits = (other < num_slots) & (tl.load(phase + other, mask=other < num_slots, other=-1) == wanted)
        theirs = tl.load(since + other, mask=waits, other=0)
        same = theirs[None, :] == mine[:, None]
        before = (theirs[None, :] < mine[:, None]) | (same & (other[None, :] < slot[:, None]))
        rank += tl.sum((before & waits[None, :]).to(tl.int64), 1)
        waiting += waits.to(tl.int64)
    tl.store(out + rank, slot, mask=here & (rank < num_rows))
    if tl.program_id(0) == 0:  # places that nobody takes
        first = tl.sum(waiting, 0)
        for start in range(0, num_rows, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(out + place, tl.zeros((BLOCK,), tl.int64), mask=(place >= first) & (place < num_rows))


@triton.jit
def _count(phase, out, num_slots, BLOCK: tl.constexpr):
    wanted = tl.program_id(0) + 1
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += (tl.load(phase + slot, mask=slot < num_slots, other=0) == wanted).to(tl.int64)
    tl.store(out + wanted - 1, tl.sum(total, 0))


def begin(state, planes: Tensor, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `rowops.begin`."""
    width = state.h.shape[1]
    positions, steps, rows = torch.empty((3, len(at_N)), dtype=torch.long, device=at_N.device)
    h = torch.empty((len(at_N), width), dtype=state.h.dtype, device=at_N.device)
    _begin[(len(at_N),)](
        at_N, state.position, state.step, planes, state.h, positions, steps, rows, h, width, WIDE=_wide(width)
    )  # fmt: skip
    return positions, steps, rows, h


def outcome(state, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `rowops.outcome`."""
    h = state.h if state.exit_h is None else state.exit_h
    h_ND = torch.empty((len(at_N), h.shape[1]), dtype=h.dtype, device=at_N.device)
    return *_standing(state, at_N, CODA, state.step if state.depth is None else state.depth, h, h_ND), h_ND


def fresh(state, at_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `rowops.fresh`."""
    return _standing(state, at_N, PRELUDE, state.token, state.h, None)


def _standing(
    state, at_N: Tensor, phase: tl.constexpr, column: Tensor, h: Tensor, h_ND: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows that stand in a queue, the others being padding: slots, positions, the numbers in `column`, and h."""
    slots, positions, values = torch.empty((3, len(at_N)), dtype=torch.long, device=at_N.device)
    width = h.shape[1]
    _standing_rows[(len(at_N),)](
        at_N, state.phase, state.position, column, h, slots, positions, values, h if h_ND is None else h_ND, width,
        WANTED=phase.value, COPY=h_ND is not None, WIDE=_wide(width),
    )  # fmt: skip
    return slots, positions, values


def leave(
    state, tick: Tensor, at_N: Tensor, steps_N: Tensor, h_ND: Tensor, said_N: Tensor | None, late: bool
) -> Tensor:
    """See `rowops.leave`."""
    width = state.h.shape[1]
    leaving = torch.empty(len(at_N), dtype=torch.bool, device=at_N.device)
    _leave[(len(at_N),)](
        at_N, steps_N, h_ND.contiguous(), leaving if said_N is None else said_N, tick, state.h, state.step, state.ahead,
        state.phase, state.since, state.max_depth, leaving, width,
        GATED=said_N is not None, LATE=late, WIDE=_wide(width), **launch_options(at_N.device),
    )  # fmt: skip
    return leaving


def enter(state, tick: Tensor, at_N: Tensor, h_ND: Tensor) -> None:
    """See `rowops.enter`."""
    width = state.h.shape[1]
    _enter[(len(at_N),)](
        at_N, h_ND.contiguous(), tick, state.h, state.step, state.phase, state.since, width, WIDE=_wide(width),
        **launch_options(at_N.device),
    )  # fmt: skip


def land(
    state, tick: Tensor, at_N: Tensor, tokens_N: Tensor, ok_N: Tensor, positions_N: Tensor, depths_N: Tensor,
    ends_SE: Tensor, min_tokens_S: Tensor,
) -> Tensor:  # fmt: skip
    """See `rowops.land`."""
    num_rows, num_ends = len(at_N), ends_SE.shape[1]
    out = torch.empty((4, num_rows), dtype=torch.long, device=at_N.device)
    _land[(num_rows,)](
        at_N, tokens_N, ok_N, positions_N, depths_N, tick, ends_SE, min_tokens_S, state.token, state.position,
        state.index, state.max_len, state.phase, state.since, out,
        num_rows, min_tokens_S.stride(0), ENDS=num_ends, BLOCK=padded(num_ends), num_warps=1,
        **launch_options(at_N.device),
    )  # fmt: skip
    return out


def select(state, phase: int, rows: int) -> Tensor:
    """See `rowops.select`."""
    out = torch.empty(rows, dtype=torch.long, device=state.phase.device)
    slots = state.num_slots
    _rank[(-(-slots // RANKED),)](state.phase, state.since, out, phase, slots, rows, RANKED=RANKED, BLOCK=BLOCK)
    return out


def tally(state) -> Tensor:
    """See `rowops.tally`."""
    out = torch.empty(3, dtype=torch.long, device=state.phase.device)
    _count[(3,)](state.phase, out, state.num_slots, BLOCK=BLOCK, num_warps=1)
    return out


def _wide(width: int) -> int:
    return min(padded(width), WIDE)
