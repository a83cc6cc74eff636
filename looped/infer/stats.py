"""What an engine counts: tokens, depths, and the time of each stage. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from looped.infer.scheduler import Plan, Stage

if TYPE_CHECKING:
    from looped.infer.pages import KVUsage


@dataclass(frozen=True)
class StageStats:
    """Batches of one stage: how many, the rows in them (prompt tokens for a prefill), wall seconds."""

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0

    def since(self, earlier: StageStats) -> StageStats:
        """What came after an earlier count."""
        return StageStats(self.batches - earlier.batches, self.rows - earlier.rows, self.seconds - earlier.seconds)


@dataclass(frozen=True)
class Stats:
    """Totals of an engine. `depth_counts[r]` is the number of decode tokens that left after r loops (entry 0 unused).

    Decode tokens are all but the first token of each request, which the prefill produces at full depth.
    """

    prompt_tokens: int
    first_tokens: int
    decode_tokens: int
    depth_counts: tuple[int, ...]
    prompt_depth_counts: tuple[int, ...]
    """The same of prompt tokens, where a ragged prefill lets them leave; all 0 after dense ones."""
    preemptions: int
    stages: dict[Stage, StageStats]
    kv: KVUsage

    def since(self, earlier: Stats) -> Stats:
        """What was counted after `earlier`, a state of the same engine; its KV pool is as it is now."""

        def rest(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(a - b for a, b in zip(now, then, strict=True))

        return Stats(
            self.prompt_tokens - earlier.prompt_tokens,
            self.first_tokens - earlier.first_tokens,
            self.decode_tokens - earlier.decode_tokens,
            rest(self.depth_counts, earlier.depth_counts),
            rest(self.prompt_depth_counts, earlier.prompt_depth_counts),
            self.preemptions - earlier.preemptions,
            {stage: of.since(earlier.stages[stage]) for stage, of in self.stages.items()},
            self.kv,
        )

    @property
    def loop_steps(self) -> int:
        """Loop steps of the decode tokens: the sum of their exit depths."""
        return sum(depth * count for depth, count in enumerate(self.depth_counts))

    @property
    def tokens(self) -> int:
        """Tokens generated, first ones included."""
        return self.first_tokens + self.decode_tokens

    @property
    def seconds(self) -> float:
        """Time in stages, scheduling included."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def prefill_share(self) -> float:
        """Alpha of the end-to-end bound (continuous depth batching, eq. 2): the prefill's share of the time."""
        return self.stages[Stage.PREFILL].seconds / self.seconds if self.seconds else 0.0

    @property
    def mean_depth(self) -> float:
        """Mean exit depth of the decode tokens; NaN without any."""
        return self.loop_steps / self.decode_tokens if self.decode_tokens else float("nan")

    @property
    def mean_depth_with_first(self) -> float:
        """The same with each request's first token at full depth, as the paper's bound counts."""
        if not self.tokens:
            return float("nan")
        return (self.loop_steps + self.first_tokens * (len(self.depth_counts) - 1)) / self.tokens

    @property
    def mean_core_batch(self) -> float:
        """Mean rows of a core step; NaN without any."""
        core = self.stages[Stage.CORE]
        return core.rows / core.batches if core.batches else float("nan")


class Tally:
    """The running counts behind `Stats`."""

    def __init__(self, max_loops: int) -> None:
        self._stages = dict.fromkeys(Stage, StageStats())
        self._depths = [0] * (max_loops + 1)
        self._prompt_depths = [0] * (max_loops + 1)
        self._first = 0
        self._preemptions = 0

    def add_stage(self, plan: Plan, seconds: float) -> None:
        rows = plan.num_prompt_tokens if plan.stage is Stage.PREFILL else plan.rows or len(plan.slots)
        old = self._stages[plan.stage]
        self._stages[plan.stage] = StageStats(old.batches + 1, old.rows + rows, old.seconds + seconds)

    def add_token(self, depth: int, first: bool) -> None:
        if first:
            self._first += 1
        else:
            self._depths[depth] += 1

    def add_prompt_depths(self, depths: Iterable[int]) -> None:
        for depth in depths:
            self._prompt_depths[depth] += 1

    def add_preemption(self) -> None:
        self._preemptions += 1

    def stats(self, kv: KVUsage) -> Stats:
        prompt_tokens = self._stages[Stage.PREFILL].rows
        return Stats(
            prompt_tokens,
            self._first,
            sum(self._depths),
            tuple(self._depths),
            tuple(self._prompt_depths),
            self._preemptions,
            dict(self._stages),
            kv,
        )
