"""Training-free criteria in the engine against the reference decoder, exactly, in float64.

Those on logits run the coda after every core step, so models with layers there, and with several, matter most.
"""

from __future__ import annotations

from typing import Any

import pytest

from looped import LoopedError, SamplingParams, generate
from looped.decode import PrefillSchedule
from looped.infer import Request
from tests.infer.harness import drain, exits_modes, gate_case, make_engine, micro, pairs, prompts, reference
from tests.infer.test_modes import check, chunked

FAMILIES = ("ouro", "huginn", "coda-ouro")
GATES = ("cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability", "delayed-kl")
ON_LOGITS = GATES[1:]
WORK = prompts((1, 15, 5))
SIX = SamplingParams(0, 6, ignore_eos=True)

CHOICES: dict[str, tuple[Any, ...]] = {
    "family": FAMILIES,
    "gate": GATES,
    "layout": ("last-exited", "ragged", "shared", "modulo-3"),
    "mode": ("refill", "no-refill"),
    "exits": ("sync", "lookahead", "device"),
    "pad_batches": (False, True),
    "min_coda_batch": (1, 2),
    "compute": ("sparse", "dense"),
}


@pytest.mark.parametrize("row", pairs(**CHOICES), ids=lambda row: "-".join(map(str, row.values())))
def test_engine_equals_reference(row: dict[str, Any]) -> None:
    family, gate, layout, mode = (row.pop(name) for name in ("family", "gate", "layout", "mode"))
    if row["exits"] not in exits_modes(family, gate) and row["compute"] == "sparse":
        row["exits"] = "sync"
    check(family, mode, layout, gate, WORK, SIX, max_num_seqs=2, chunk_size=chunked(layout), **row)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", GATES)
def test_exits_spread_over_depths(family: str, gate: str) -> None:
    depths = [d for prompt in WORK for d in reference(family, "last-exited", gate, prompt, 8)[1][1:]]
    assert len(set(depths)) > 1 and min(depths) < micro(family).config.max_loops


@pytest.mark.parametrize("exits", ["sync", "device"])
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_preempted_in_the_middle_of_the_loop(exits: str, preemption: str) -> None:
    engine = check(
        "coda-ouro", "refill", "last-exited", "entropy-diff", prompts((9, 9, 9)),
        SamplingParams(0, 12, ignore_eos=True), exits=exits, preemption=preemption, max_num_seqs=3, page_size=4,
        num_pages=44, min_free_slots=1,
    )  # fmt: skip
    assert engine.stats.preemptions


@pytest.mark.parametrize("exits", ["sync", "device"])
def test_every_request_has_its_own_threshold_and_floor(exits: str) -> None:
    engine = make_engine("huginn", "refill", "last-exited", "kl", exits=exits)
    own = [(0.05, None), (2.0, None), (None, 3), (0.0, None), (0.5, 2)]
    for number, (threshold, floor) in enumerate(own):
        params = SamplingParams(0, 8, ignore_eos=True, exit_threshold=threshold, min_depth=floor)
        engine.add(Request(str(number), prompts()[number], params))
    outputs = drain(engine)
    for number, (threshold, floor) in enumerate(own):
        made = reference(
            "huginn", "last-exited", "kl", prompts()[number], 8, threshold=threshold, min_depth=floor
        )  # fmt: skip
        assert ([o.token for o in outputs[str(number)]], [o.depth for o in outputs[str(number)]]) == made


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("layout", ["last-exited", "ragged"])
def test_ragged_prefill_where_a_token_is_alone_with_its_logits(gate: str, layout: str) -> None:
    threshold = gate_case("ouro", gate).threshold
    assert threshold is not None
    check("ouro", "refill", layout, gate, WORK, SIX, PrefillSchedule(threshold), max_num_batched_tokens=7)


@pytest.mark.parametrize("gate", ON_LOGITS)
def test_ragged_prefill_is_refused_where_coda_layers_see_other_tokens(gate: str) -> None:
    with pytest.raises(LoopedError, match="looks at logits"):
        make_engine("huginn", gate=gate, prefill="ragged")
    with pytest.raises(LoopedError, match="looks at logits"):
        generate(micro("huginn"), [1, 2], gate=gate, prefill="ragged")


def test_a_block_is_refused() -> None:
    with pytest.raises(LoopedError, match="prompt tokens leave one by one"):
        make_engine("huginn", gate="kl", prefill="ragged", prefill_threshold=PrefillSchedule(0.5, block=True))


def test_mixed_prefill() -> None:
    check("huginn", "refill", "last-exited", "entropy-diff", WORK, SIX, mix_prefill=True, max_num_seqs=2)


def test_a_bad_threshold_of_a_request_is_refused() -> None:
    engine = make_engine("ouro", gate="argmax-stability")
    for bad, message in ((1.5, "counts loop steps"), (0.0, "outside the range")):
        with pytest.raises(LoopedError, match=message):
            engine.add(Request("0", (1, 2), SamplingParams(0, 4, exit_threshold=bad)))
