"""Training-free criteria by other means, and the reference decoder that runs the coda for them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from looped.decode import PrefillSchedule, generate
from looped.errors import LoopedError
from looped.gates import (
    ArgmaxStabilityGate,
    ConvergenceGate,
    CosineGate,
    Criterion,
    DelayGate,
    EntropyDiffGate,
    Entry,
    KLGate,
    MinPKLGate,
    Params,
    get_gate,
    load_gate,
)
from looped.gates.criteria import CRITERIA
from looped.gates.registry import GATE_NAMES
from tests.conftest import Ran
from tests.gates.test_policies import LOOPS, drive
from tests.models import micro_huginn, micro_ouro

VOCAB = 61
ON_LOGITS = [kind for kind in CRITERIA if kind.needs_logits]


def measured(gate: Criterion, seen: list[Tensor], before: Tensor) -> Tensor:
    """What a criterion measures after each step: [R, B]."""
    rows = torch.ones(before.shape[0], dtype=torch.long)
    state, ahead = gate.start(Entry(before, None, None, rows, rows), Params(rows.double(), rows, rows * LOOPS))
    assert not ahead.any()
    values = []
    for step in seen:
        state, value = gate.measure(state, step)
        values.append(value)
    return torch.stack(values)


def random_logits(rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) for _ in range(LOOPS)]


def test_convergence_compares_with_the_state_before() -> None:
    states = [torch.tensor([[x]]).double() for x in (1.0, 2.0, 2.2, 2.21, 2.2101)]
    # relative changes: .5, .0909, .0045, .00005
    assert drive(ConvergenceGate(), states, 0.1, min_depth=2) == [2]
    assert drive(ConvergenceGate(), states, 0.01, min_depth=2) == [3]
    assert drive(ConvergenceGate(), states, 0.6, min_depth=1) == [1]
    assert drive(ConvergenceGate(), states, 0.0, min_depth=1) == [4]


def test_cosine() -> None:
    angles = [0.0, 0.5, 0.6, 0.61, 0.61]
    states = [torch.tensor([[math.cos(a), math.sin(a)]]).double() * (1 + r) for r, a in enumerate(angles)]
    found = measured(CosineGate(), states[1:], states[0])[:, 0]
    torch.testing.assert_close(found, torch.tensor([1 - math.cos(x) for x in (0.5, 0.1, 0.01, 0.0)]).double())
    assert drive(CosineGate(), states, 0.01) == [2]
    assert drive(CosineGate(), states, 1e-3) == [3]
    assert drive(CosineGate(), states, 0.5) == [1]
    assert drive(CosineGate(), states, 0.0) == [4]


def test_cosine_of_a_start_from_zeros() -> None:
    found = measured(CosineGate(), [torch.ones(1, 4).double()], torch.zeros(1, 4).double())
    assert found.tolist() == [[1.0]]


def test_entropy_difference() -> None:
    seen = random_logits()
    entropy = torch.stack([torch.distributions.Categorical(logits=x).entropy() for x in seen])
    before = torch.cat((torch.full_like(entropy[:1], 100.0), entropy[:-1]))
    torch.testing.assert_close(measured(EntropyDiffGate(), seen, seen[0]), (entropy - before).abs())


def bound(kind: type[Criterion]) -> Criterion:
    gate = kind().bind(micro_ouro(vocab_size=VOCAB))
    assert isinstance(gate, Criterion)
    return gate


def test_kl() -> None:
    seen = random_logits()
    p = [torch.full((3, VOCAB), 1 / VOCAB).double(), *(x.softmax(-1) for x in seen)]
    wanted = [(a * (a / b).log()).sum(-1) for a, b in itertools.pairwise(p)]  # KL(before || now)
    torch.testing.assert_close(measured(bound(KLGate), seen, seen[0]), torch.stack(wanted))


def test_min_p_kl() -> None:
    seen = random_logits()
    p = [torch.full((3, VOCAB), 1 / VOCAB).double()]
    for logits in seen:
        kept = torch.stack([torch.stack([x if x >= row.max() / 10 else x * 0 + 1 / VOCAB for x in row]) for row in
                            logits.softmax(-1)])  # fmt: skip
        p.append(kept / kept.sum(-1, keepdim=True))
    wanted = [(a * (a / b).log()).sum(-1) for a, b in itertools.pairwise(p)]
    found = measured(bound(MinPKLGate), seen, seen[0])
    torch.testing.assert_close(found, torch.stack(wanted))
    assert not torch.allclose(found, measured(bound(KLGate), seen, seen[0]))


def test_argmax_stability_counts_equal_predictions_in_a_row() -> None:
    tokens = [3, 3, 5, 5]
    seen = [F.one_hot(torch.tensor([t, 7]), VOCAB).double() for t in tokens]
    assert measured(ArgmaxStabilityGate(), seen, seen[0]).T.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    states = [seen[0], *seen]
    assert drive(ArgmaxStabilityGate(), states, 1.0) == [2, 2]
    assert drive(ArgmaxStabilityGate(), states, 2.0) == [4, 3]
    assert drive(ArgmaxStabilityGate(), states, 1.0, min_depth=3) == [4, 3]
    assert drive(DelayGate(ArgmaxStabilityGate()), states, 1.0, min_depth=2) == [3, 3]


def test_half_precision_is_measured_in_single() -> None:
    logits = [x.bfloat16() for x in random_logits()]
    for kind in ON_LOGITS:
        gate = bound(kind)
        wide = measured(gate, [x.float() for x in logits], logits[0].float())
        assert torch.equal(measured(gate, logits, logits[0]), wide)


@pytest.mark.parametrize("kind", ON_LOGITS)
@pytest.mark.parametrize("threshold", [0.3, 1.0, 2.0])
def test_the_decoder_shows_them_the_logits_of_every_step(kind: type[Criterion], threshold: float) -> None:
    """Under `last-exited`, after a full-depth prompt, step r of a token is that of a run without a cache at depth r."""
    model, prompt = micro_ouro(), [5, 9, 2, 40, 17]
    if kind is ArgmaxStabilityGate:
        threshold = math.ceil(threshold)
    made = generate(model, prompt, gate=kind(), threshold=threshold, max_new_tokens=2, ignore_eos=True)
    ids = torch.tensor([[*prompt, made.token_ids[0]]])
    logits = [model.logits(ids, depth)[:, -1] for depth in range(1, LOOPS + 1)]
    values = measured(bound(kind), logits, logits[0])[:, 0]
    holds = values >= threshold if kind.rule == "count" else values < threshold
    depth = min([*(holds.nonzero()[:, 0] + 1).tolist(), LOOPS])
    assert made.depths == [LOOPS, depth]
    assert made.token_ids[1] == int(logits[depth - 1].argmax())


def test_the_coda_keeps_what_a_token_left_with() -> None:
    """Tokens that leave by logits at step 1 go on exactly as tokens that a fixed gate takes out at step 1."""
    model = micro_huginn()
    by_logits = generate(model, [5, 9, 2], gate="kl", threshold=1e9, max_new_tokens=8, ignore_eos=True)
    fixed = generate(model, [5, 9, 2], gate="fixed-1", max_new_tokens=8, ignore_eos=True)
    assert by_logits == fixed
    dense = generate(model, [5, 9, 2], gate="kl", threshold=1e9, compute="dense", max_new_tokens=8, ignore_eos=True)
    assert dense == generate(model, [5, 9, 2], gate="fixed-1", compute="dense", max_new_tokens=8, ignore_eos=True)


def test_a_block_leaves_by_the_mean_of_states_and_by_the_last_prediction() -> None:
    states = [torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [1.0]]), torch.tensor([[2.0], [1.25]])]
    states = [x.double() for x in (*states, states[-1], states[-1])]
    # Relative changes .5 and 0, then 0 and .2: means .25 and .1.
    block = ConvergenceGate().as_block()
    assert drive(block, states, 0.3) == [1, 1]
    assert drive(block, states, 0.15) == [2, 2]
    assert drive(ConvergenceGate(), states, 0.15) == [2, 1]
    assert drive(DelayGate(ConvergenceGate()).as_block(), states, 0.15, min_depth=2) == [3, 3]
    seen = [F.one_hot(torch.tensor([3, t]), VOCAB).double() for t in (1, 2, 2, 2)]
    assert drive(ArgmaxStabilityGate().as_block(), [seen[0], *seen], 1.0) == [3, 3]
    with pytest.raises(LoopedError, match="one by one; a block needs a training-free criterion"):
        get_gate("fixed-2", micro_ouro()).as_block()


def test_blocks_in_the_decoder() -> None:
    model, together = micro_huginn(), PrefillSchedule(1e9, block=True)
    made = generate(model, [5, 9, 2], gate="kl", prefill="ragged", prefill_threshold=together, max_new_tokens=1)
    assert made.depths == [1] and made.token_ids == generate(model, [5, 9, 2], depth=1, max_new_tokens=1).token_ids
    with pytest.raises(LoopedError, match="one by one; a block"):
        generate(micro_ouro(), [5], gate="ouro", prefill="ragged", prefill_threshold=PrefillSchedule(0.5, block=True))
    for more in ({"cosine": True}, {"protected": 2}):
        with pytest.raises(LoopedError, match="one threshold and no protected tokens"):
            PrefillSchedule(0.5, block=True, **more)


@pytest.mark.parametrize("kind", CRITERIA)
def test_names_defaults_and_thresholds(kind: type[Criterion]) -> None:
    name, ouro, huginn = kind.kind, micro_ouro(), micro_huginn(exit_threshold=0.03)
    defaults = {"convergence": 0.03, "cosine": 1e-3, "entropy-diff": 1e-3, "kl": 1e-3, "minp-kl": 1e-5}
    for gate in (get_gate(name, ouro), load_gate(name), get_gate(f"delayed-{name}", huginn)):
        assert gate.name.removeprefix("delayed-") == name
        assert gate.default_threshold(huginn.config) == defaults.get(name, 5)
        assert gate.check_threshold(7.0) == 7.0
        for bad in (-1.0, math.nan, -math.inf):
            with pytest.raises(LoopedError, match="outside the range"):
                gate.check_threshold(bad)
    assert {name, f"delayed-{name}"} <= set(GATE_NAMES)
    assert DelayGate(kind()).min_depth == kind().min_depth + 1 == (3 if name == "convergence" else 2)
    assert DelayGate(kind()).needs_logits == kind.needs_logits


@pytest.mark.parametrize("gate", [ArgmaxStabilityGate(), DelayGate(ArgmaxStabilityGate())])
def test_loop_steps_are_counted_in_whole_numbers(gate: Criterion) -> None:
    for bad in (2.5, math.inf):
        with pytest.raises(LoopedError, match="counts loop steps, so its threshold is whole"):
            gate.check_threshold(bad)
    with pytest.raises(LoopedError, match="outside the range 1 to inf"):
        gate.check_threshold(0)


@pytest.mark.parametrize(
    ("gate", "threshold", "complaint"),
    [
        ("argmax-stability", 2.5, "counts loop steps, so its threshold is whole; got 2.5"),
        ("argmax-stability", 0, "outside the range 1 to inf"),
        ("delayed-kl", -1, "outside the range 0 to inf of the kl gate"),
        ("minp-kI", 0.1, "did you mean 'minp-kl'"),
    ],
)
@pytest.mark.parametrize("words", [("generate", "Hi"), ("eval", "wordmath", "--limit", 1), ("bench", "offline")])
def test_commands_refuse_bad_thresholds(
    cli: Callable[..., Ran], words: tuple[object, ...], gate: str, threshold: float, complaint: str
) -> None:
    assert complaint in cli(*words, "--device", "cpu", "--gate", gate, "--threshold", threshold).refusal


@pytest.mark.parametrize("gate", ["entropy-diff", "delayed-cosine"])
def test_a_command_runs_them(cli: Callable[..., Ran], gate: str) -> None:
    words = ("--gate", gate, "--threshold", 0.3, "--max-tokens", 6, "--ignore-eos", "--device", "cpu", "--json")
    ran = cli("generate", "Q: 2+3?", *words)
    assert ran.code == 0, ran.err
    depths = json.loads(ran.out.splitlines()[-1])["depths"]
    assert len(depths) == 6 and min(depths[1:]) < depths[0]
