"""Exit depths to replay in place of a gate: a distribution, lists, or a recording at some threshold."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from looped.analysis import depths as exit_depths
from looped.analysis import exit_files
from looped.analysis.worklist import WorkList, generator
from looped.errors import LoopedError

FLAG = "--replay-depths"


def replayed(
    text: str, work: WorkList, max_loops: int, threshold: float | None, seed: int
) -> tuple[list[list[int]], str]:
    """A list of depths for each request, its first entry (the prompt's pass) not used, and in words what they are.

    `text` is `uniform`, depth:share pairs, lists as JSON, a .json or .jsonl file of them, or an .npz of
    `looped record`, read at `threshold`. Lists are used again from the first where there are fewer than requests.
    Raises `LoopedError` for anything else.
    """
    if Path(text).suffix == ".npz":
        recorded = exit_files.read(Path(text))
        q = recorded.meta.threshold if threshold is None else threshold
        if recorded.meta.max_loops > max_loops:
            raise LoopedError(f"{text} was recorded with {recorded.meta.max_loops} loops; the model runs {max_loops}")
        lists = recorded.exits(q)
        return _given(lists, work, max_loops), f"exit depths of the {recorded.meta.gate} gate at {q:g} from {text}"
    if threshold is not None:
        raise LoopedError(f"--replay-threshold is for an .npz file of `looped record` as {FLAG}")
    if exit_depths.is_lists(text):
        lists = exit_depths.parse_lists(text, max_loops, FLAG)
        return _given(lists, work, max_loops), f"replayed exit depths, {len(lists)} lists"
    shares = exit_depths.parse_shares(text, max_loops, FLAG)
    shown = ", ".join(f"{depth}: {share:g}" for depth, share in sorted(shares.items()))
    note = f"replayed exit depths, drawn per token from {shown} with seed {seed}"
    return draw(work, shares, seed), note


def draw(work: WorkList, shares: dict[int, float], seed: int) -> list[list[int]]:
    """One exit depth for every token of every request, independent draws; entry 0, the prompt's, is not used."""
    rng = generator(seed)
    depths, p = np.array(list(shares)), np.array(list(shares.values()))
    return [rng.choice(depths, item.output_len, p=p / p.sum()).tolist() for item in work.items]


def _given(lists: list[exit_depths.Exits], work: WorkList, max_loops: int) -> list[list[int]]:
    """As long as each request needs: tokens past the end of a list run at full depth."""
    found = []
    for item, exits in zip(work.items, itertools.cycle(lists), strict=False):
        wanted = item.output_len - 1
        rest = [max_loops] * (wanted - len(exits))
        found.append([max_loops, *exits[:wanted], *rest])
    return found
