"""The engine's modes one by one against the reference decoder, in float64, freed memory filled with NaN.

`test_equality.py` has the grid of layouts, gates and schedulers; here every other option meets them, two by two in the
default run and all with all behind `slow`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from looped import SamplingParams
from looped.decode import PrefillSchedule
from looped.infer import Engine, Request
from looped.kv import get_layout
from tests.infer.harness import (
    REPLAYED,
    exits_modes,
    has_gate,
    make_engine,
    micro,
    pairs,
    prompts,
    reference,
    run,
)

FAMILIES = ("ouro", "huginn")
LAYOUTS = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-3")
GATES = ("none", "ouro", "convergence", "delay", "lookahead", "pre-loop", "hybrid", "replay", "fixed-1", "fixed-R")
RAGGED_GATES = ("ouro", "convergence", "delay", "lookahead")
SCHEDULES = (PrefillSchedule(0.5), PrefillSchedule(0.3, cosine=True, protected=3))
WIDTHS = ((1, 1), (2, 1), (2, 2), (5, 1), (5, 2), (5, 5))
MAX_TOKENS = 4
GREEDY = SamplingParams(0, MAX_TOKENS, ignore_eos=True)


def check(
    family: str,
    mode: str,
    layout: str,
    gate: str,
    work: tuple[tuple[int, ...], ...] | None = None,
    params: SamplingParams = GREEDY,
    schedule: PrefillSchedule | None = None,
    **options: Any,
) -> Engine:
    """Run an engine and compare every request with the reference; the engine, empty again."""
    if layout == "ragged":
        options["page_size"] = None
    if schedule is not None:
        options |= {"prefill": "ragged", "prefill_threshold": schedule}
    engine = make_engine(family, mode, layout, gate, **options)
    compare(engine, family, mode, layout, gate, prompts() if work is None else work, params, schedule)
    return engine


def compare(
    engine: Engine,
    family: str,
    mode: str,
    layout: str,
    gate: str,
    work: tuple[tuple[int, ...], ...],
    params: SamplingParams = GREEDY,
    schedule: PrefillSchedule | None = None,
) -> None:
    results = run(engine, work, params)
    chunk = engine.options.chunk_size if engine.policy.layout.cut_sensitive else None
    for number, (result, prompt) in enumerate(zip(results, work, strict=True)):
        expected = reference(
            family,
            "last-exited" if layout == "ragged" else layout,
            "none" if mode == "cb" else gate,
            prompt,
            params.max_tokens,
            params.temperature,
            chunk,
            engine.options.compute,
            seed=engine.options.seed if params.seed is None else params.seed,
            prefill_threshold=schedule,
            replayed=number % len(REPLAYED) if gate == "replay" and mode != "cb" else 0,
        )
        assert (result.token_ids, result.depths) == expected, number


def chunked(layout: str, chunk: int | None = 8) -> int | None:
    """A chunk grid where cuts matter."""
    return chunk if get_layout(layout).cut_sensitive else None


# All options with each other.

CHOICES: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "layout": LAYOUTS,
    "gate": GATES,
    "mode": ("refill", "no-refill", "cb"),
    "exits": ("sync", "lookahead", "device"),
    "pad_batches": (False, True),
    "page_size": (1, 16, 64),
    "chunk_size": (None, 5, 16),
    "width": WIDTHS,
    "max_num_batched_tokens": (8, 20, 8192),
    "compute": ("sparse", "dense"),
}


def option_rows(rows: list[dict[str, Any]]) -> list[Any]:
    out = []
    for number, row in enumerate(rows):
        if not has_gate(row["family"], row["gate"]):
            row = {**row, "gate": "convergence"}
        if row["exits"] not in exits_modes(row["family"], row["gate"], row["mode"]):
            row = {**row, "exits": ("sync", "device")[number % 2]}
        name = "-".join(str(row[key]) for key in ("family", "layout", "gate", "mode", "exits"))
        out.append(pytest.param(row, id=f"{number}-{name}"))
    return out


def check_row(row: dict[str, Any]) -> None:
    row = dict(row)
    width, coda_batch = row.pop("width")
    check(**row, work=prompts()[1:], max_num_seqs=width, min_coda_batch=coda_batch)


@pytest.mark.parametrize("row", option_rows(pairs(**CHOICES)))
def test_pairs_of_options(row: dict[str, Any]) -> None:
    check_row(row)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
def test_all_options(family: str, layout: str, gate: str) -> None:
    """Schedulers, exits modes, widths and coda batches all with each other; the rest rotates."""
    if not has_gate(family, gate):
        pytest.skip("no such gate")
    rest = pairs(**{key: CHOICES[key] for key in ("pad_batches", "page_size", "chunk_size", "max_num_batched_tokens")})
    turns = itertools.cycle(rest)
    for mode, width in itertools.product(CHOICES["mode"], WIDTHS):
        for exits in exits_modes(family, gate, mode):
            row = {"family": family, "layout": layout, "gate": gate, "mode": mode, "exits": exits, "width": width}
            check_row(row | next(turns))


# Exits at both ends.


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gate", ["fixed-1", "fixed-R"])
def test_every_token_leaves_first_or_last(gate: str, layout: str, exits: str) -> None:
    mode = "no-refill" if gate == "fixed-1" and exits == "sync" else "refill"
    check("ouro", mode, layout, gate, exits=exits, chunk_size=chunked(layout), max_num_seqs=3)


# Ragged prefill.


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["constant", "cosine"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prefill(family: str, layout: str, schedule: PrefillSchedule) -> None:
    """Under `last-exited`, `ragged` and `depth` a prompt may be cut anywhere, elsewhere on a grid."""
    gates = [gate for gate in RAGGED_GATES if has_gate(family, gate)][SCHEDULES.index(schedule) :: 2]
    turns = itertools.cycle([("refill", 7), ("no-refill", 8192), ("no-refill", 7)])
    for number, gate in enumerate(gates):
        mode, budget = next(turns)
        ways = exits_modes(family, gate)
        options = {"exits": ways[number % len(ways)], "chunk_size": chunked(layout), "max_num_batched_tokens": budget}
        engine = check(family, mode, layout, gate, prompts((1, 15, 33, 8)), schedule=schedule, **options)
        counts = engine.stats.prompt_depth_counts
        assert sum(counts) == 57 and (gate == "delay" or sum(counts[:-1]))


@pytest.mark.parametrize("compute", ["sparse", "dense"])
@pytest.mark.parametrize("exits", ["sync", "device"])
def test_ragged_equals_last_exited_to_the_bit(exits: str, compute: str) -> None:
    """Two storages of one function, prompts that leave early included: states and outputs are the same bits."""
    engines = [
        make_engine(
            "ouro", "refill", layout, "ouro", page_size=1, max_num_seqs=3, exits=exits, compute=compute,
            prefill="ragged", prefill_threshold=SCHEDULES[0], max_num_batched_tokens=20,
        )
        for layout in ("ragged", "last-exited")
    ]  # fmt: skip
    for engine in engines:
        for number, prompt in enumerate(prompts()):
            engine.add(Request(str(number), prompt, SamplingParams(0, 9, ignore_eos=True)))
    while engines[0].has_work:
        outputs = [engine.step() for engine in engines]
        assert outputs[0] == outputs[1]
        assert torch.equal(*(engine.runner.state.h for engine in engines))
    assert not engines[1].has_work
    rows = [engine.kv.usage().rows for engine in engines]
    assert rows[0] < rows[1] if compute == "sparse" else rows[0] == rows[1]


# Preemption.


@pytest.mark.parametrize("mode", ["refill", "no-refill", "cb"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_preempted_sequences_go_on_exactly(preemption: str, layout: str, mode: str) -> None:
    if preemption == "recompute" and get_layout(layout).cut_sensitive:
        pytest.skip("refused: the layout overwrites planes")
    work, params = prompts((9, 11, 10, 12)), SamplingParams(0, 9, ignore_eos=True)
    planes = get_layout(layout).num_planes(4)
    page_size = None if layout == "ragged" else 4
    # Room for one sequence and a half.
    pages = planes * (24 if layout == "ragged" else 8)
    for gate, exits in (("lookahead", "sync"), ("hybrid", "lookahead"), ("lookahead", "device")):
        engine = check(
            "ouro", mode, layout, gate, work, params, exits=exits, preemption=preemption, page_size=page_size,
            num_pages=pages, max_num_seqs=3, chunk_size=chunked(layout), min_free_slots=1,
        )  # fmt: skip
        assert engine.stats.preemptions


@pytest.mark.parametrize("layout", ["depth", "last-exited", "ragged"])
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_preempted_with_dense_compute(preemption: str, layout: str) -> None:
    """Layers behind the core keep K/V of the states that tokens left with, not of those after R loops."""
    pages = {"num_pages": 110} if layout == "ragged" else {"num_pages": 30, "page_size": 4}
    engine = check(
        "huginn", "refill", layout, "lookahead", prompts((9, 11, 10)), SamplingParams(0, 9, ignore_eos=True),
        compute="dense", preemption=preemption, max_num_seqs=3, min_free_slots=1, **pages,
    )  # fmt: skip
    assert engine.stats.preemptions


@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_a_sequence_that_comes_back_is_not_taken_for_the_one_before(compute: str) -> None:
    """Its slot was another's a moment ago, whose last core step is still unread: that says nothing about it."""
    work, restored = prompts((8, 8)), 0
    params = SamplingParams(0, 12, ignore_eos=True)
    expected = reference("ouro", "last-exited", "replay", work[1], 12, compute=compute, replayed=1)
    for steps in range(20):
        engine = make_engine(
            "ouro", "refill", "last-exited", "replay", compute=compute, exits="lookahead", preemption="offload",
            max_num_seqs=2, page_size=4, num_pages=28, min_free_slots=1,
        )  # fmt: skip
        for number, prompt in enumerate(work):
            engine.add(Request(str(number), prompt, params, ordinal=number))
        made = []
        while not engine.stats.preemptions:
            made += engine.step()
        for _ in range(steps):
            made += engine.step()
        if engine.abort("0"):
            restored += 1
        while engine.has_work:
            made += engine.step()
        mine = [output for output in made if output.key == "1"]
        assert ([output.token for output in mine], [output.depth for output in mine]) == expected
    assert restored > 4


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
@pytest.mark.parametrize("layout", ["last-exited", "ragged"])
@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_preempted_after_a_ragged_prefill(exits: str, layout: str, preemption: str) -> None:
    """`recompute` replays the depths at which prompt tokens left."""
    pages = {"num_pages": 116} if layout == "ragged" else {"num_pages": 45, "page_size": 4}
    engine = check(
        "huginn", "refill", layout, "lookahead", prompts((9, 11, 10, 12, 9)), SamplingParams(0.8, 12, True),
        SCHEDULES[0], exits=exits, preemption=preemption, max_num_seqs=3, min_free_slots=1, **pages,
    )  # fmt: skip
    assert engine.stats.preemptions


# The prefix cache.


@pytest.mark.parametrize("exits", ["sync", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hot_prefix_cache_changes_nothing(family: str, layout: str, exits: str) -> None:
    """The same requests twice: the second time their prompts are found. Huginn's K/V depend on the seed as well."""
    gate = "convergence"
    page_size = None if layout == "ragged" else 8
    engine = make_engine(
        family, "refill", layout, gate, prefix_caching=True, chunk_size=chunked(layout), page_size=page_size,
        exits=exits, seed=5,
    )  # fmt: skip
    shared = prompts((40,))[0]
    work = (shared[:33], shared[:17], shared[:40], (*shared[:32], 7, 7), prompts()[4])
    drawn = SamplingParams(0.8, MAX_TOKENS, ignore_eos=True)
    hits = []
    for params in (drawn, drawn, SamplingParams(0.8, MAX_TOKENS, ignore_eos=True, seed=6)):
        before = engine.kv.usage().hit_tokens
        for number, prompt in enumerate(work):
            engine.add(Request(str(number), prompt, params, ordinal=number))
        outputs: dict[str, list[Any]] = {}
        while engine.has_work:
            for output in engine.step():
                outputs.setdefault(output.key, []).append(output)
            engine.kv.check()
        for number, prompt in enumerate(work):
            expected = reference(
                family, layout, gate, prompt, MAX_TOKENS, 0.8, chunked(layout),
                seed=5 if params.seed is None else params.seed,
            )  # fmt: skip
            made = outputs[str(number)]
            assert ([o.token for o in made], [o.depth for o in made]) == expected
        hits.append(engine.kv.usage().hit_tokens - before)
    # All whole blocks but those with a prompt's last token.
    assert hits[1] >= 32 + 16 + 32 + 32 and hits[1] > hits[0]
    assert hits[2] == (hits[0] if family == "huginn" else hits[1])


@pytest.mark.parametrize("layout", ["last-exited", "ragged"])
def test_a_hot_prefix_cache_after_a_ragged_prefill(layout: str) -> None:
    engine = make_engine(
        "ouro", "refill", layout, "ouro", prefix_caching=True, prefill="ragged", prefill_threshold=SCHEDULES[0]
    )
    work = (prompts()[3], prompts()[2], prompts()[3])
    cold = [_alone(engine, prompt) for prompt in work[:2]]
    assert [_alone(engine, prompt) for prompt in work[:2]] == cold
    assert engine.kv.usage().hit_tokens == 32
    for made, prompt in zip(cold, work, strict=False):
        assert made == reference("ouro", "last-exited", "ouro", prompt, MAX_TOKENS, prefill_threshold=SCHEDULES[0])


def _alone(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[int], list[int]]:
    engine.add(Request("alone", prompt, GREEDY))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [output.token for output in outputs if output.token is not None], [output.depth for output in outputs]


# Prompts that ride along.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_prefill(family: str, layout: str) -> None:
    for gate, mode, exits in (("convergence", "refill", "sync"), ("hybrid", "no-refill", "lookahead")):
        check(
            family, mode, layout, gate, exits=exits, mix_prefill=True, chunk_size=chunked(layout),
            max_num_batched_tokens=12, max_num_seqs=3, min_free_slots=1,
        )  # fmt: skip


# Edges.


@pytest.mark.parametrize("exits", ["sync", "device"])
@pytest.mark.parametrize("layout", ["ragged", "last-exited", "shared"])
def test_lengths_around_every_edge(layout: str, exits: str) -> None:
    """Prompts one short of, on and past the edges of chunks, pages and the context, and their last tokens as well."""
    context = micro("ouro").config.max_positions
    lens = (7, 8, 9, 15, 16, 17, context - 2, context - 1)
    check("ouro", "refill", layout, "lookahead", prompts(lens), exits=exits, chunk_size=8, max_num_batched_tokens=16)
    for new in (1, 2, 8, 9, 10):  # with 7 prompt tokens, the last one that is stored is around a page's end
        params = SamplingParams(0, new, ignore_eos=True)
        check("ouro", "refill", layout, "lookahead", prompts((7,)), params, exits=exits, page_size=8)


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9])
def test_batches_around_the_sizes_of_graphs(rows: int, exits: str) -> None:
    work = prompts((3,) * rows)
    check("ouro", "refill", "ragged", "lookahead", work, exits=exits, pad_batches=True, max_num_seqs=rows)


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("mode", ["refill", "no-refill", "cb"])
def test_one_slot_free(mode: str, exits: str) -> None:
    """One more request than slots, and a scheduler that would wait for all of them to be free."""
    for free in (1, 4):
        check("ouro", mode, "ragged", "lookahead", prompts(), exits=exits, max_num_seqs=4, min_free_slots=free)


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("preemption", ["auto", "off"])
def test_a_pool_full_to_the_last_page(preemption: str, layout: str, exits: str) -> None:
    """What two sequences store is all there is, to the page."""
    planes, new = get_layout(layout).num_planes(4), 5
    page_size = 1 if layout == "ragged" else 4
    work, params = prompts((8, 8)), SamplingParams(0, new, ignore_eos=True)
    pages = 2 * planes * (12 // page_size)
    engine = check(
        "ouro", "cb", layout, "none", work, params, exits=exits, num_pages=pages, page_size=page_size,
        preemption=preemption, chunk_size=chunked(layout), min_free_slots=1,
    )  # fmt: skip
    assert engine.kv.usage().peak_pages == pages and not engine.stats.preemptions
