"""Teacher-forced passes at full depth, and what a gate would compare with its threshold after each loop step."""

# T tokens of a sequence, D width, R loop steps

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from looped.analysis.exit_files import FORMAT, Meta, Recorded
from looped.analysis.worklist import WorkItem, WorkList
from looped.errors import LoopedError
from looped.gates import Criterion, DelayGate, Entry, ForeseenConvergenceGate, Gate, LookaheadGate, OuroGate, Params
from looped.gates.hazard import StepGate
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.progress import progress


@torch.inference_mode()
def record(model: LoopedLM, gate: Gate, work: WorkList) -> Recorded:
    """The values of `gate` on the decode tokens of the list's reference answers, for every depth.

    The token behind the prompt comes from the prompt's own pass, and the last token of an answer has none, so an
    answer of n tokens has n - 1. Raises `LoopedError` for a gate whose decisions depend on where earlier tokens left,
    and for requests without an answer.
    """
    inner = gate.inner if isinstance(gate, DelayGate) else gate
    # What coda layers read of earlier tokens is what these left with.
    apart = not (inner.needs_logits and model.config.num_coda_layers)
    known = OuroGate | StepGate | LookaheadGate | ForeseenConvergenceGate | Criterion
    if not isinstance(inner, known) or not apart:
        raise LoopedError(
            f"the {gate.name} gate looks at where earlier tokens left, which differs by threshold: its exits cannot be "
            "recorded in one pass; use `looped bench offline --record-exits`"
        )
    if not all(item.reference for item in work.items):
        raise LoopedError(f"{work.source} has requests without a reference answer; give a file that has them")
    values = []
    with progress(len(work.items), "record") as bar:
        for item in work.items:
            values.append(_values(model, inner, item))
            bar.advance()
    table = np.concatenate(values)
    if isinstance(gate, DelayGate) or isinstance(inner, LookaheadGate | ForeseenConvergenceGate):
        # What is decided at one step is about the next.
        table = np.concatenate((np.full_like(table[:, :1], np.nan), table[:, :-1]), 1)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    rule = inner.rule if isinstance(inner, Criterion) else "at-least"
    rule = "below" if isinstance(inner, ForeseenConvergenceGate) else rule
    threshold = gate.default_threshold(model.config)
    name, revision, loops = model.name, model.revision, model.config.max_loops
    meta = Meta(FORMAT, name, revision, gate.name, rule, gate.min_depth, loops, threshold, work.source)
    return Recorded(offsets, table, meta)


def _values(model: LoopedLM, gate: Gate, item: WorkItem) -> NDArray[np.float32]:
    """[decode tokens, R]: column r - 1 is what the gate sees after loop step r."""
    ids = torch.tensor([(*item.prompt_ids, *item.reference[:-1])], device=model.device)
    if ids.shape[1] > model.config.max_positions:
        raise LoopedError(
            f"a request has {ids.shape[1]} tokens, the context of {model.name} has {model.config.max_positions}"
        )
    positions = torch.arange(ids.shape[1], device=model.device)
    first = len(item.prompt_ids)
    noise = model.init_state(torch.zeros_like(ids), positions.expand_as(ids))
    h, injection = model.prelude(ids, positions, dense_causal, noise)
    columns, before = [], model.readout(h)[0, first:]
    survival = torch.ones(ids.shape[1] - first, device=model.device)
    if isinstance(gate, Criterion):
        ones = torch.ones_like(positions[first:])
        state, _ = gate.start(Entry(model.readout(h)[0, first:], None, None, ones, ones), Params(ones, ones, ones))
    for step in range(1, model.config.max_loops + 1):
        h = model.core(h, injection, positions, step, dense_causal)
        z = model.readout(h)[0, first:]
        at = torch.full(z.shape[:1], step, device=z.device)
        if isinstance(gate, Criterion):
            seen = model.coda(h[0, first:], positions[first:], dense_causal) if gate.needs_logits else z
            state, value = gate.measure(state, seen)
            columns.append(value)
        elif isinstance(gate, OuroGate):
            survival = survival * (1 - gate.hazard(z))
            columns.append(1 - survival)
        elif isinstance(gate, StepGate):
            survival = survival * (1 - gate.hazard(z, at))
            columns.append(1 - survival)
        elif isinstance(gate, LookaheadGate):
            survival = survival * (1 - gate.hazard(z, at, before))
            columns.append(1 - survival)
        elif isinstance(gate, ForeseenConvergenceGate):
            columns.append(gate.expected(z, before, at).exp())
        before = z
    table: NDArray[np.float32] = torch.stack(columns, 1).float().cpu().numpy()
    return table
