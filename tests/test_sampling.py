"""Every parameter of a draw against plain Python that knows nothing of tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looped import LoopedError, rng
from looped.sampling import Drawn, Lists, Seen, Table, draw, end_ids, ends, knobs_of, sample
from looped.sampling_options import FILTERED, FULL, GREEDY, RANDOM, Sampling, child_seed

V = 23
EOS = (0, 5)


def run(
    logits: list[list[float]] | torch.Tensor,
    params: list[Sampling],
    *,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    prompts: list[list[int]] | None = None,
    generated: list[list[int]] | None = None,
    level: int | None = None,
) -> Drawn:
    """`draw` for rows of one parameter set each."""
    n = len(params)
    rows = torch.as_tensor(logits, dtype=torch.float64) if isinstance(logits, list) else logits
    seeds, positions = seeds or [0] * n, positions or [0] * n
    prompts, generated = prompts or [[]] * n, generated or [[]] * n
    stops = [end_ids(p, EOS, False, rows.shape[1]) for p in params]
    table = Table.of(params, seeds, stops, 8, 6)
    floats, ints, *lists = (torch.from_numpy(column) for column in table)
    counts = torch.zeros(n, rows.shape[1], dtype=torch.int32)
    seen = torch.zeros(n, rows.shape[1], dtype=torch.bool)
    for row in range(n):
        for token in generated[row]:
            counts[row, token] += 1
        seen[row, prompts[row]] = True
    index = torch.tensor([len(tokens) for tokens in generated])
    level = max(p.level for p in params) if level is None else level
    at = torch.tensor(positions)
    return draw(rows, knobs_of(floats, ints), at, index, level, Lists(*lists), Seen(counts, seen))


def oracle(
    logits: list[float], p: Sampling, seed: int, position: int, prompt: list[int], generated: list[int]
) -> tuple[int, set[int]]:
    """The token and what might have been drawn, from the documentation alone."""
    values = list(logits)
    for token, bias in (p.logit_bias or {}).items():
        values[token] += bias
    for token in range(len(values)):
        times = generated.count(token)
        if token in prompt or times:
            values[token] = (
                values[token] / p.repetition_penalty if values[token] > 0 else values[token] * p.repetition_penalty
            )
        values[token] -= p.frequency_penalty * times + (p.presence_penalty if times else 0.0)
    if len(generated) < p.min_tokens:
        for token in (*EOS, *p.stop_token_ids):
            values[token] = -math.inf
    by_value = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if p.temperature == 0:
        return by_value[0], {by_value[0]}
    temperature = torch.tensor(p.temperature, dtype=torch.float32).item()
    weights = {token: math.exp((values[token] - values[by_value[0]]) / temperature) for token in by_value}
    kept = [token for token in by_value if weights[token] >= p.min_p]
    if p.top_k > 0:
        kept = kept[: p.top_k]
    if p.top_p < 1:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token] / total
            if mass >= p.top_p:
                break
        kept = nucleus
    uniform = rng.uniform(torch.tensor([seed]), torch.tensor([position]), rng.SAMPLING, len(values))[0].tolist()
    scores = {token: values[token] / temperature - math.log(-math.log(uniform[token])) for token in kept}
    return max(scores, key=scores.__getitem__), set(kept)


def logits_of(seed: int, n: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


ALONE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": -1},
    {"top_k": V + 5},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.01},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -2.0},
    {"logit_bias": {2: 5.0, 7: -100.0}},
    {"logit_bias": {0: 100.0}, "min_tokens": 4},
    {"min_tokens": 3},
    {"logprobs": 3},
]


@pytest.mark.parametrize("given_", ALONE, ids=str)
def test_each_parameter(given_: dict[str, Any]) -> None:
    rows = logits_of(1, 60)
    generated = [[(row * 7 + i) % V for i in range(row % 5)] * 2 for row in range(60)]
    prompts = [[row % V, 3, 3] for row in range(60)]
    p = Sampling(**given_)
    seeds, positions = list(range(60)), [row + 9 for row in range(60)]
    found = run(rows, [p] * 60, seeds=seeds, positions=positions, prompts=prompts, generated=generated)
    assert found.ok.all()
    for row in range(60):
        expected, _ = oracle(rows[row].tolist(), p, row, row + 9, prompts[row], generated[row])
        assert found.tokens[row] == expected, row


@st.composite
def samplings(draw_: st.DrawFn) -> Sampling:
    def maybe(value: Any, values: st.SearchStrategy[Any]) -> Any:
        return draw_(values) if draw_(st.booleans()) else value

    return Sampling(
        temperature=maybe(0.0, st.floats(0.05, 3)),
        top_p=maybe(1.0, st.floats(0.01, 1)),
        top_k=maybe(0, st.integers(-1, V + 1)),
        min_p=maybe(0.0, st.floats(0, 1)),
        repetition_penalty=maybe(1.0, st.floats(0.2, 3)),
        presence_penalty=maybe(0.0, st.floats(-2, 2)),
        frequency_penalty=maybe(0.0, st.floats(-2, 2)),
        logit_bias=maybe(None, st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=8)),
        min_tokens=maybe(0, st.integers(0, 8)),
        stop_token_ids=maybe((), st.lists(st.integers(0, V - 1), max_size=4, unique=True)),
        logprobs=maybe(None, st.integers(0, 20)),
    )


def tokens(max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, V - 1), max_size=max_size)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(samplings(), tokens(6), tokens(9)), min_size=1, max_size=4), st.integers(0, 10**6))
def test_all_together_and_any_batch(rows: list[tuple[Sampling, list[int], list[int]]], seed: int) -> None:
    """Each row of a mixed batch gives what it gives alone, at its own level and at the highest, and as the oracle."""
    logits = logits_of(seed, len(rows))
    params, prompts, generated = ([row[i] for row in rows] for i in range(3))
    seeds, positions = [seed + i for i in range(len(rows))], [seed % 97 + i for i in range(len(rows))]
    batch = run(logits, params, seeds=seeds, positions=positions, prompts=prompts, generated=generated)
    for i, p in enumerate(params):
        expected, _ = oracle(logits[i].tolist(), p, seeds[i], positions[i], prompts[i], generated[i])
        for level in (None, FULL):
            alone = run(
                logits[i : i + 1],
                [p],
                seeds=seeds[i : i + 1],
                positions=positions[i : i + 1],
                prompts=prompts[i : i + 1],
                generated=generated[i : i + 1],
                level=level,
            )
            assert alone.tokens[0] == batch.tokens[i] == expected


def test_filters_off_is_the_plain_draw() -> None:
    rows, n = logits_of(3, 200), 200
    temperature = torch.full((n,), 0.8)
    plain = sample(rows, temperature, torch.arange(n), torch.arange(n) + 5)
    for level in (RANDOM, FILTERED, FULL):
        found = run(rows, [Sampling(0.8)] * n, seeds=list(range(n)), positions=[i + 5 for i in range(n)], level=level)
        assert torch.equal(found.tokens, plain)


def test_the_filters_leave_exactly_what_they_say() -> None:
    """Thousands of draws meet every token of the oracle's set and no other."""
    logits = [3.0, 2.5, 2.0, 2.0, 2.0, 1.0, -1.0]
    for kwargs in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8}):
        p = Sampling(temperature=1.5, **kwargs)
        _, allowed = oracle(logits, p, 0, 0, [], [])
        found = run(torch.tensor([logits]).expand(4000, -1).double(), [p] * 4000, seeds=list(range(4000)))
        assert set(found.tokens.tolist()) == allowed


def test_ties_go_to_the_lower_id() -> None:
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert run([logits], [Sampling(0.0)]).tokens.tolist() == [1]
    for kwargs in ({"top_k": 1}, {"top_p": 1e-6}):
        found = run([logits] * 300, [Sampling(**kwargs)] * 300, seeds=list(range(300)))
        assert set(found.tokens.tolist()) == {1}
    found = run([logits] * 300, [Sampling(top_k=2)] * 300, seeds=list(range(300)))
    assert set(found.tokens.tolist()) == {1, 2}
    found = run([logits] * 300, [Sampling(min_p=1.0)] * 300, seeds=list(range(300)))
    assert set(found.tokens.tolist()) == {1, 2, 3}


def test_top_k_of_one_is_greedy() -> None:
    rows = logits_of(4, 100)
    found = run(rows, [Sampling(temperature=2.0, top_k=1)] * 100, seeds=list(range(100)))
    assert torch.equal(found.tokens, rows.argmax(-1))


def test_penalties_change_greedy_tokens_too() -> None:
    logits = [[2.0, 1.9, 0.0, -1.0]]
    for p in (Sampling(0, repetition_penalty=1.2), Sampling(0, presence_penalty=0.2), Sampling(0, frequency_penalty=1)):
        assert run(logits, [p], generated=[[0]]).tokens.tolist() == [1]
    # the prompt counts for repetition alone
    assert run(logits, [Sampling(0, repetition_penalty=1.2)], prompts=[[0]]).tokens.tolist() == [1]
    assert run(logits, [Sampling(0, presence_penalty=2)], prompts=[[0]]).tokens.tolist() == [0]
    assert run(logits, [Sampling(0, frequency_penalty=2)], prompts=[[0]]).tokens.tolist() == [0]


def test_min_tokens_keeps_ends_out() -> None:
    logits = torch.full((1, 8), -9.0).double()
    logits[0, 0], logits[0, 6], logits[0, 2] = 9.0, 8.0, 7.0
    p = Sampling(0, min_tokens=2, stop_token_ids=(6,))
    assert run(logits, [p], generated=[[1]]).tokens.tolist() == [2]
    assert run(logits, [p], generated=[[1, 1]]).tokens.tolist() == [0]


def test_ends() -> None:
    ids = torch.tensor([[0, 6, -1]] * 4)
    tokens_, index, least = torch.tensor([0, 6, 1, 0]), torch.tensor([3, 2, 9, 1]), torch.tensor([2] * 4)
    assert ends(tokens_, ids, least, index).tolist() == [True, True, False, False]
    assert end_ids(Sampling(stop_token_ids=(5, 7, 99)), EOS, False, V) == [0, 5, 7]
    assert end_ids(Sampling(stop_token_ids=(7,)), EOS, True, V) == [7]


def test_a_bad_row_disturbs_no_other() -> None:
    good = logits_of(5, 5)
    params = [Sampling(0.9, top_p=0.8, logprobs=2), Sampling(0), Sampling(1.0), Sampling(0.5, top_k=3), Sampling(1.0)]
    expected = run(good, params)
    bad = good.clone()
    bad[1, 3], bad[2, 4], bad[4] = math.nan, math.inf, -math.inf
    for level in (GREEDY, RANDOM, FILTERED, FULL):
        found = run(bad, params, level=level)
        assert found.ok.tolist() == [True, False, False, True, False]
        assert ((found.tokens >= 0) & (found.tokens < V)).all()
    for row in (0, 3):
        assert found.tokens[row] == expected.tokens[row]
        assert found.logprob is not None and expected.logprob is not None
        assert found.logprob[row] == expected.logprob[row]


def test_a_row_with_nothing_left_is_not_ok() -> None:
    logits = [[1.0] + [-math.inf] * 6]
    assert run(logits, [Sampling(0)]).ok.tolist() == [True]
    assert run(logits, [Sampling(0, min_tokens=1)]).ok.tolist() == [False]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [2.0, 1.0, 0.5, 0.5, -3.0, -math.inf]
    p = Sampling(0.3, top_k=2, logit_bias={4: 50.0}, repetition_penalty=2.0, logprobs=4)
    found = run([logits], [p], prompts=[[0]])
    assert found.tokens.tolist() == [4]
    assert found.logprob is not None and found.top_ids is not None and found.top_logprobs is not None
    total = math.log(sum(math.exp(x) for x in logits))
    assert found.logprob.item() == pytest.approx(-3.0 - total, abs=1e-12)
    assert found.top_ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.top_logprobs[0].tolist() == pytest.approx([x - total for x in logits], abs=1e-12)
    assert run(logits_of(0), [Sampling(0.7, top_p=0.5)]).logprob is None
    wide = run(torch.randn(2, 50).double(), [Sampling(0, logprobs=1)] * 2)
    assert wide.top_ids is not None and wide.top_ids.shape == (2, 20)


def test_narrow_dtypes() -> None:
    rows = logits_of(6, 30).bfloat16()
    p = Sampling(0.9, top_k=5, top_p=0.9, repetition_penalty=1.3)
    wide = run(rows.double(), [p] * 30, seeds=list(range(30)))
    assert torch.equal(run(rows, [p] * 30, seeds=list(range(30))).tokens, wide.tokens)
    assert torch.equal(run(rows, [Sampling(0)] * 30).tokens, rows.float().argmax(-1))


def test_extremes_stay_in_range() -> None:
    rows = logits_of(7, 4) * 1e4
    for p in (
        Sampling(1e-30),
        Sampling(1e-6, top_p=0.5),
        Sampling(1e30, min_p=0.5),
        Sampling(repetition_penalty=1e-300),
        Sampling(repetition_penalty=1e300, top_k=2**62, min_tokens=2**62),
    ):
        found = run(rows, [p] * 4, prompts=[[1, 2]] * 4, seeds=[-(2**63), 2**63 - 1, 0, 1])
        assert ((found.tokens >= 0) & (found.tokens < V)).all()
    assert torch.equal(run(rows, [Sampling(1e-6, top_p=0.5)] * 4).tokens, rows.argmax(-1))


@pytest.mark.parametrize("level", [GREEDY, RANDOM, FILTERED, FULL])
def test_nothing_is_read_back(level: int) -> None:
    """Meta tensors have no values: whoever asked for one would fail. A CUDA graph could not hold it either."""
    table = Table.of([Sampling()] * 3, [0] * 3, [(1,)] * 3, 4, 2)
    floats, ints, *lists = (torch.from_numpy(column).to("meta") for column in table)
    knobs, at = knobs_of(floats, ints), torch.empty(3, dtype=torch.long, device="meta")
    seen = Seen(torch.empty(3, V, dtype=torch.int32, device="meta"), torch.empty(3, V, dtype=torch.bool, device="meta"))
    drawn = draw(torch.empty(3, V, device="meta"), knobs, at, at, level, Lists(*lists), seen)
    assert drawn.tokens.shape == drawn.ok.shape == (3,)
    assert ends(drawn.tokens, lists[2], knobs.min_tokens, at).shape == (3,)
    assert (drawn.logprob is not None) == (level == FULL)


def test_inputs_are_left_alone() -> None:
    rows, params = logits_of(8, 6), [Sampling(0.8, top_p=0.6, repetition_penalty=1.5, min_tokens=3)] * 6
    before = rows.clone()
    for level in (GREEDY, RANDOM, FILTERED, FULL):
        run(rows, params, level=level)
        assert torch.equal(rows, before)


def test_levels() -> None:
    assert Sampling(0).level == Sampling(0, top_p=0.5, top_k=3, min_p=0.1).level == GREEDY
    assert Sampling(1, stop_token_ids=(3,)).level == RANDOM
    for kwargs in ({"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.1}, {"logit_bias": {1: 1.0}}, {"min_tokens": 1}):
        assert Sampling(**kwargs).level == FILTERED
    assert Sampling(0, logit_bias={1: 1.0}).level == Sampling(0, min_tokens=2).level == FILTERED
    for kwargs in ({"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": -1}):
        assert Sampling(0, **kwargs).level == Sampling(**kwargs).level == FULL


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": None}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"logit_bias": {1: "2"}}, "logit_bias of token 1"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1024"),
        ({"stop_token_ids": range(65)}, "64"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_refused(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(LoopedError, match=said):
        Sampling(**kwargs)


def test_biased_tokens_must_exist() -> None:
    for token in (-1, V):
        with pytest.raises(LoopedError, match="logit_bias"):
            Sampling(logit_bias={token: 1.0}).check_vocab(V)
    Sampling(logit_bias={0: 1.0, V - 1: 1.0}).check_vocab(V)


def test_child_seeds() -> None:
    assert child_seed(7, 0) == 7
    seeds = {child_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(-(2**63) <= child_seed(seed, 3) < 2**63 for seed in (-(2**63), 2**63 - 1, 0))
