"""Counter-based random numbers and sampling."""

from __future__ import annotations

import math

import pytest
import torch

from looped import rng
from looped.sampling import sample


def uniform(seed: int, position: int, n: int = 4000, stream: int = 1) -> torch.Tensor:
    return rng.uniform(torch.tensor([seed]), torch.tensor([position]), stream, n)[0]


def test_uniform_is_uniform_and_open() -> None:
    u = uniform(0, 0, 100_000)
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert torch.histc(u, 10, 0, 1).min() > 9_500


@pytest.mark.parametrize(("a", "b"), [((0, 1, 1), (1, 0, 1)), ((0, 0, 1), (0, 1, 1)), ((5, 7, 1), (5, 7, 2))])
def test_streams_are_independent(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    x, y = (uniform(seed, position, stream=stream) for seed, position, stream in (a, b))
    assert abs(torch.corrcoef(torch.stack((x, y)))[0, 1]) < 0.06


def test_rows_do_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([3, 9, 3]), torch.tensor([1, 4, 2])
    batch = rng.uniform(seeds, positions, 1, 50)
    for row in range(3):
        alone = rng.uniform(seeds[row : row + 1], positions[row : row + 1], 1, 50)
        assert torch.equal(batch[row : row + 1], alone)


def test_extreme_seeds() -> None:
    for seed in (-(2**63), 2**63 - 1, -1):
        assert uniform(seed, 2**40).min() > 0


def test_the_largest_uniform_is_below_one() -> None:
    draws = rng.uniform(torch.arange(300), torch.zeros(300), 1, 50_000)
    assert draws.max() > 1 - 2**-22 and draws.max() < 1


def test_truncated_normal() -> None:
    z = rng.truncated_normal(torch.arange(50), torch.zeros(50), 2, 2000, 0.5, torch.float64)
    assert z.abs().max() <= 1.5
    # a normal cut at three deviations keeps 98.66 % of its scale
    assert abs(z.std() / 0.5 - 0.9866) < 0.005 and abs(z.mean()) < 0.01


def draw(logits: torch.Tensor, temperature: float, n: int) -> torch.Tensor:
    rows = logits.expand(n, -1)
    return sample(rows, torch.full((n,), temperature), torch.arange(n), torch.zeros(n, dtype=torch.long))


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    for temperature in (0.5, 1.0, 2.0):
        drawn = draw(logits, temperature, 20_000)
        found = torch.bincount(drawn, minlength=4) / 20_000
        torch.testing.assert_close(found, (logits / temperature).softmax(-1), atol=0.015, rtol=0)


def test_greedy_and_mixed_batches() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(40, -1)
    temperature = torch.tensor([0.0, 5.0]).repeat(20)
    drawn = sample(logits, temperature, torch.arange(40), torch.arange(40))
    assert (drawn[::2] == 1).all()
    assert (drawn[1::2] != 1).any()
