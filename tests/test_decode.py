"""The reference decoder: its own invariants. Golden outputs are in tests/model/test_fixtures.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from looped.decode import PrefillSchedule, generate
from looped.errors import LoopedError
from looped.gates import FixedGate, ReplayGate
from looped.model import LoopedLM
from tests.models import micro_huginn, micro_ouro, random_lookahead, random_pre_loop

PROMPT = [7, 3, 19, 4, 4, 28, 55, 1, 9, 12, 40]
OURO, HUGINN = micro_ouro(), micro_huginn()
EVERY = dict(max_new_tokens=12, ignore_eos=True)


def run(model: LoopedLM = OURO, **options: Any) -> tuple[list[int], list[int]]:
    made = generate(model, PROMPT, **(EVERY | options))
    return made.token_ids, made.depths


def cacheless(model: LoopedLM, tokens: int, **options: Any) -> list[int]:
    """Greedy decoding with the whole sequence recomputed at every token."""
    ids = list(PROMPT)
    for _ in range(tokens):
        ids.append(int(model.logits(torch.tensor([ids]), **options)[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("layout", ["depth", "last-exited", "ragged"])
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_full_depth_equals_the_cacheless_forward(layout: str, depth: int | None) -> None:
    for model in (OURO, HUGINN):
        tokens, depths = run(model, layout=layout, depth=depth)
        assert tokens == cacheless(model, 12, depth=depth)
        assert depths == [depth or model.config.max_loops] * 12


def test_huginn_from_zeros() -> None:
    assert run(HUGINN, layout="depth", state="zeros")[0] == cacheless(HUGINN, 12, state="zeros")


@pytest.mark.parametrize("chunk", [1, 3, 10, 11, 50])
def test_prompt_cuts_do_not_matter_without_overwriting(chunk: int) -> None:
    assert run(HUGINN, layout="depth", chunk_size=chunk) == run(HUGINN, layout="depth")
    ragged = dict(layout="ragged", gate="convergence", threshold=0.3)
    assert run(HUGINN, **ragged, chunk_size=chunk) == run(HUGINN, **ragged)


def test_prompt_cuts_matter_with_overwriting() -> None:
    logits_by_cut = {tuple(run(HUGINN, layout="shared", chunk_size=chunk)[0]) for chunk in (1, 2, 5, 11)}
    assert len(logits_by_cut) > 1


GATES: list[dict[str, Any]] = [
    dict(gate="ouro", threshold=0.5),
    dict(gate="ouro", threshold=0.3, min_depth=2),
    dict(gate=random_lookahead(OURO), threshold=0.5),
    dict(gate=random_pre_loop(OURO), threshold=0.5),
    dict(gate="delayed-ouro", threshold=0.4),
    dict(gate=FixedGate(2)),
]


@pytest.mark.parametrize("options", GATES)
def test_ragged_is_last_exited(options: dict[str, Any]) -> None:
    assert run(layout="ragged", **options) == run(layout="last-exited", **options)


@pytest.mark.parametrize("options", GATES[:3])
def test_ragged_is_last_exited_in_a_ragged_prefill(options: dict[str, Any]) -> None:
    wanted = run(layout="last-exited", prefill="ragged", **options)
    assert run(layout="ragged", prefill="ragged", **options) == wanted


def test_gates_use_several_depths() -> None:
    depths = {depth for options in GATES[:3] for depth in run(layout="ragged", **options)[1]}
    assert depths == {1, 2, 3, 4}


@pytest.mark.parametrize("layout", ["ragged", "shared", "first-shared", "modulo-2"])
def test_replaying_depths_reproduces_the_tokens(layout: str) -> None:
    tokens, depths = run(layout=layout, gate="ouro", threshold=0.5)
    assert len(set(depths)) > 1
    assert run(layout=layout, gate=ReplayGate(depths)) == (tokens, depths)


def test_dense_compute_reads_earlier_outputs_over_full_caches() -> None:
    """The token at depth e comes from z_e of a full-depth run: official Ouro early exit."""
    tokens, depths = run(layout="depth", gate="ouro", threshold=0.5)
    assert run(layout="ragged", compute="dense", gate="ouro", threshold=0.5) == (tokens, depths)
    ids = list(PROMPT)
    for token, depth in zip(tokens, depths, strict=True):
        assert token == int(OURO.logits(torch.tensor([ids]), depth=depth)[0, -1].argmax())
        ids.append(token)


def test_first_token_runs_at_full_depth_after_a_dense_prefill() -> None:
    assert run(gate=FixedGate(1))[1] == [4] + [1] * 11
    assert run(gate="ouro", threshold=0.0, prefill="ragged")[1] == [1] * 12


def test_prefill_threshold_is_apart_from_decode() -> None:
    full_prompt = run(layout="ragged", gate="ouro", threshold=0.5)
    assert run(layout="ragged", gate="ouro", threshold=0.5, prefill="ragged", prefill_threshold=1.0) == full_prompt
    protected = PrefillSchedule(0.5, protected=len(PROMPT))
    assert (
        run(layout="ragged", gate="ouro", threshold=0.5, prefill="ragged", prefill_threshold=protected) == full_prompt
    )
    assert run(layout="ragged", gate="ouro", threshold=0.5, prefill="ragged", prefill_threshold=0.1) != full_prompt


def test_cosine_schedule() -> None:
    at = torch.arange(5)
    falling = PrefillSchedule(0.5, cosine=True).thresholds(at, 5)
    torch.testing.assert_close(falling, torch.tensor([1.0, 0.926777, 0.75, 0.573223, 0.5]).double(), atol=1e-5, rtol=0)
    assert PrefillSchedule(0.7).thresholds(at, 5).tolist() == [0.7] * 5


def test_eos_ends_the_sequence_and_is_kept() -> None:
    tokens, _ = run()
    eos = tokens[3]
    stopped = generate(micro_ouro(eos_ids=(eos,)), PROMPT, max_new_tokens=12)
    assert stopped.token_ids == tokens[: tokens.index(eos) + 1]
    assert stopped.finish_reason == "stop"
    assert generate(micro_ouro(eos_ids=(eos,)), PROMPT, **EVERY).token_ids == tokens


def test_context_ends_the_sequence() -> None:
    short = micro_ouro(max_positions=14)
    made = generate(short, PROMPT, max_new_tokens=99, ignore_eos=True)
    assert len(made.token_ids) == 3 and made.finish_reason == "length"
    with pytest.raises(LoopedError, match="the context of 11 leaves room for 10"):
        generate(micro_ouro(max_positions=11), PROMPT)


def test_sampling_depends_on_seed_and_position() -> None:
    warm = dict(temperature=1.0)
    assert run(**warm, seed=3) == run(**warm, seed=3)
    assert run(**warm, seed=3) != run(**warm, seed=4)
    one = generate(OURO, PROMPT, max_new_tokens=1, temperature=1.0, seed=3, ignore_eos=True).token_ids
    rest = generate(OURO, PROMPT + one, max_new_tokens=11, temperature=1.0, seed=3, ignore_eos=True).token_ids
    assert one + rest == run(**warm, seed=3)[0]


def test_huginn_noise_depends_on_the_seed() -> None:
    assert run(HUGINN, seed=1) == run(HUGINN, seed=1)
    state = HUGINN.init_state(torch.tensor([1, 2]), torch.tensor([5, 5]))
    assert state is not None and not torch.equal(state[0], state[1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(layout="raged"), "did you mean 'ragged'"),
        (dict(gate="our"), "did you mean 'ouro'"),
        (dict(gate="ouro", threshold=1.5), "outside the range"),
        (dict(gate="ouro", min_depth=0), "min_depth must be between"),
        (dict(gate="ouro", min_depth=9), "min_depth must be between"),
        (dict(depth=0), "depth must be between"),
        (dict(depth=5), "depth must be between"),
        (dict(compute="spars"), "did you mean 'sparse'"),
        (dict(prefill="raged"), "did you mean 'ragged'"),
        (dict(threshold=0.5), "need a gate"),
        (dict(prefill="ragged"), "need a gate"),
        (dict(gate="ouro", prefill_threshold=0.5), "needs prefill='ragged'"),
        (dict(chunk_size=0), "chunk_size"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-1.0), "temperature"),
        (dict(state="ones"), "state must be"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LoopedError, match=sentence):
        run(**options)


@pytest.mark.parametrize("prompt", [[], [61], [-1]])
def test_bad_prompts(prompt: list[int]) -> None:
    with pytest.raises(LoopedError, match="prompt"):
        generate(OURO, prompt)


def test_a_carry_cannot_run_in_a_ragged_prefill() -> None:
    with pytest.raises(LoopedError, match="cannot run in a ragged prefill"):
        run(gate=random_pre_loop(OURO), threshold=0.5, prefill="ragged")
