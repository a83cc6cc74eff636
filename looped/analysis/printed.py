"""What went into the four traces that the paper on continuous depth batching prints (tables 2 and 3), not the tables.

A trace shows counts, not who exits when. These requests are derived from it: prompt lengths such that prompts complete
where the table says, and exit depths by request and token that give each loop row its exits. The three Ouro traces come
from one list: the no-refill one shows how many of the first three tokens leave at each step, and the other two show at
which depth those left that came first. Tokens whose exit no row shows run at full depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from looped.analysis.depths import Exits
from looped.analysis.simulate import Workload

NUM_STAGES = 20
_NUM_PROMPTS = 256
_OUTPUT_LEN = 100
T = TypeVar("T")


@dataclass(frozen=True)
class Preset:
    """A workload with the scheduler and model that ran it. W, M and S are the paper's defaults."""

    source: str
    mode: str
    min_coda_batch: int
    fully_looped: bool
    max_loops: int
    work: Workload


def _spread(runs: Sequence[tuple[int, T]]) -> list[T]:
    """(times, value) pairs written out."""
    return [value for times, value in runs for _ in range(times)]


def _workload(prompt_lens: Sequence[tuple[int, int]], exits: Sequence[tuple[int, Exits]], max_loops: int) -> Workload:
    """Requests of runs of (times, prompt tokens) and (times, first exits); none of them ends within the table, and of
    those behind them, which stay in the queue, nothing is known."""
    prompts, depths = _spread(prompt_lens), _spread(exits)
    prompts += [100] * (_NUM_PROMPTS - len(prompts))
    depths += [()] * (_NUM_PROMPTS - len(depths))
    full = tuple(depth + (max_loops,) * (_OUTPUT_LEN - len(depth)) for depth in depths)
    return Workload(tuple(prompts), full)


_OURO = _workload(
    # 8,192 tokens: 20 prompts and a piece of the next; 8,192: that, 31 more and a piece; 1,998: that and 11 more.
    [(20, 400), (1, 392), (31, 250), (1, 342), (10, 172), (1, 178)],
    [
        (1, (2, 2, 2)),
        *[(9, (3, 2, 2)), (7, (3, 3, 2)), (10, (3, 3, 3)), (3, (3, 4, 3))],
        *[(3, (4, 2, 3)), (22, (4, 3, 3)), (1, (4, 4, 3)), (8, (4, 4, 4))],
    ],
    max_loops=4,
)
_HUGINN = _workload(
    [(20, 400), (1, 392), (32, 240), (1, 412), (9, 168), (1, 173)],
    [(7, (7,)), (22, (8,)), (18, (9,))],
    max_loops=16,
)

PRESETS = {
    "table-2-ouro": Preset("workload of table 2, left: Ouro", "refill", 1, True, 4, _OURO),
    "table-2-huginn": Preset("workload of table 2, right: Huginn", "refill", 1, False, 16, _HUGINN),
    "table-3-no-refill": Preset("workload of table 3, left: Ouro", "no-refill", 1, True, 4, _OURO),
    "table-3-refill": Preset("workload of table 3, right: Ouro", "refill", 16, True, 4, _OURO),
}
