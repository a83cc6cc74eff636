"""Sampling on a GPU: in a CUDA graph, at a real vocabulary's width, equal to the CPU."""

from __future__ import annotations

import pytest
import torch

from looped import SamplingParams
from looped.infer.sampler import Sampler
from looped.sampling import Drawn, ends

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
