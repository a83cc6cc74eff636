"""Sampling on a GPU: in a CUDA graph, at a real vocabulary's width, equal to the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from looped import SamplingParams
from looped.infer.sampler import Sampler
from looped.sampling import Drawn, ends
from tests.infer.draws import case

pytestmark = pytest.mark.gpu

V, SLOTS = 49152, 65
KINDS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.2, top_p=0.9),
    SamplingParams(0.7, top_k=50, min_p=0.02),
    SamplingParams(1.0, logit_bias={3: 4.0, 9: -50.0}),
    SamplingParams(0.0, min_tokens=4, stop_token_ids=(7, 8)),
    SamplingParams(1.0, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(0.9, logprobs=3, top_p=0.8),
]


def stops(sampler: Sampler, tokens: torch.Tensor, slots: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Whether tokens end the sequences in their slots."""
    return ends(tokens, sampler.end_ids[slots], sampler.min_tokens[slots], index)


def admitted(device: str, kinds: list[SamplingParams]) -> Sampler:
    sampler = Sampler(SLOTS, V, (0,), torch.device(device))
    n = SLOTS - 1
    prompts = [[slot, 2 * slot, 99] for slot in range(1, SLOTS)]
    params = [kinds[i % len(kinds)] for i in range(n)]
    sampler.admit(list(range(1, SLOTS)), params, list(range(n)), prompts, [[5, 5, 6]] * n)
    return sampler


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.randn(SLOTS - 1, V, generator=torch.Generator().manual_seed(0)) * 3
    at = torch.arange(1, SLOTS)
    return logits.to(device), at.to(device), (at + 7).to(device), torch.full_like(at, 3).to(device)


def same(a: Drawn, b: Drawn) -> bool:
    return all(
        x is y is None or (x is not None and y is not None and torch.allclose(x.cpu(), y.cpu(), atol=1e-9))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("level", range(Sampler.LEVELS))
def test_a_captured_draw_equals_the_cpu(level: int) -> None:
    kinds = [params for params in KINDS if Sampler.level(params) <= level]
    here, there = admitted("cpu", kinds), admitted("cuda", kinds)
    expected = here(*inputs("cpu"), level)
    logits, at, positions, index = inputs("cuda")
    admitted("cuda", kinds)(logits, at, positions, index, level)  # warm-up, on counts of its own
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(logits)
    with torch.cuda.graph(graph):
        found = there(static, at, positions, index, level)
        stops(there, found.tokens, at, index)
    for _ in range(2):
        fresh = admitted("cpu", kinds)
        static.copy_(logits)
        there.admit(
            list(range(1, SLOTS)),
            [kinds[i % len(kinds)] for i in range(SLOTS - 1)],
            list(range(SLOTS - 1)),
            [[slot, 2 * slot, 99] for slot in range(1, SLOTS)],
            [[5, 5, 6]] * (SLOTS - 1),
        )
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, expected) and same(expected, fresh(*inputs("cpu"), level))


@pytest.mark.parametrize("level", range(Sampler.LEVELS))
def test_batches_do_not_matter(level: int) -> None:
    kinds = [params for params in KINDS if Sampler.level(params) <= level]
    logits, at, positions, index = inputs("cuda")
    together = admitted("cuda", kinds)(logits, at, positions, index, level)
    alone = admitted("cuda", kinds)
    for row in range(0, SLOTS - 1, 7):
        one = slice(row, row + 1)
        drawn = alone(logits[one], at[one], positions[one], index[one], level)
        assert drawn.tokens[0] == together.tokens[row]


def test_nothing_waits_for_the_device() -> None:
    sampler = Sampler(SLOTS, V, (0,), torch.device("cuda"))
    logits = torch.zeros(SLOTS - 1, V, device="cuda")
    at = torch.arange(1, SLOTS, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        n = len(KINDS)
        sampler.admit(list(range(1, n + 1)), KINDS, [0] * n, [[1, 2]] * n, [[3]] * n)
        for level in range(Sampler.LEVELS):
            drawn = sampler(logits, at, at, at, level)
            stops(sampler, drawn.tokens, at, at)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wide(num_rows: int, vocab_size: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator, device="cuda") * scale).to(dtype)


def random_params(number: int) -> SamplingParams:
    r = random.Random(number)
    return SamplingParams(
        r.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        top_k=r.choice([0, 0, 1, 20, 50, 1000, 40000]),
        top_p=r.choice([1.0, 0.1, 0.8, 0.95, 0.999]),
        min_p=r.choice([0.0, 0.0, 0.01, 0.3]),
        logit_bias=r.choice([None, None, {r.randrange(1000): r.uniform(-9, 9) for _ in range(40)}]),
        min_tokens=r.choice([0, 5]),
        stop_token_ids=[r.randrange(1000) for _ in range(r.randrange(4))],
        frequency_penalty=r.choice([0.0, 0.5]),
        repetition_penalty=r.choice([1.0, 1.3]),
    )


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(V, torch.bfloat16), (50257, torch.float16), (1001, torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.02, 1.0, 4.0])
def test_kernels_draw_by_the_definition(vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    """Tokens, and what they were drawn from: logits in half precision have many equals."""
    logits = wide(96, vocab_size, scale, dtype)
    case(logits, [SamplingParams(t) for t in (0.0, 0.3, 0.7, 1.0, 2.0)]).agrees()
    narrow = [
        SamplingParams(0.7, top_p=0.95),
        SamplingParams(1.0, top_p=0.5),
        SamplingParams(1.0, top_k=50),
        SamplingParams(0.6, top_k=20, top_p=0.95),
        SamplingParams(1.0, min_p=0.05),
        SamplingParams(1.0, top_k=30000, top_p=0.999, min_p=1e-4),
    ]
    case(logits, [each for each in narrow if each.top_k < vocab_size]).agrees()
    case(logits, [random_params(number) for number in range(96)]).agrees()


def test_kernels_on_rows_without_differences() -> None:
    logits = torch.zeros(3, V, device="cuda", dtype=torch.bfloat16)
    params = [SamplingParams(1.0, top_p=0.5), SamplingParams(1.0, top_k=999), SamplingParams(1.0, top_k=999, top_p=0.5)]
    kept = case(logits, params).agrees().kept
    assert kept is not None and kept.sum(-1).tolist() == [V // 2, 999, 500]
