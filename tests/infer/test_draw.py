"""The drawing kernels against `looped.sampling.draw`. Without a GPU Triton's interpreter runs them."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # must stand before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

import triton.language as tl
from triton import jit

from looped import SamplingParams as P
from looped.infer.backends import triton  # noqa: F401  (makes the interpreter ready)
from looped.infer.backends.kernels import draw, draw_narrow
from tests.infer.draws import case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's logarithms and exponentials are numpy's: their arguments here are none that it warns of in earnest.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WARM = [P(0.0), P(0.7), P(1.0), P(1e-7), P(30.0)]
NARROW = [
    P(0.7, top_p=0.95),
    P(1.5, top_k=20),
    P(1.0, top_k=40, top_p=0.8),
    P(0.8, min_p=0.1),
    P(1.3, top_k=60, top_p=0.9, min_p=0.02),
    P(0.0, top_k=3),
]
CHANGED = [
    P(0.9, top_p=0.7, logit_bias={0: 3.0, 7: -100.0, 129: 2.5}),
    P(0.0, min_tokens=9, stop_token_ids=(3, 64, 130)),
    P(1.0, top_k=5, min_tokens=9, stop_token_ids=(0, 2), logit_bias={2: 50.0, 3: 0.0}),
]
PENALIZED = [
    P(1.0, top_p=0.9, repetition_penalty=1.7, frequency_penalty=0.3, logit_bias={5: 1.0}),
    P(0.0, presence_penalty=-1.5, repetition_penalty=0.8, min_tokens=9),
    P(0.8, top_k=9, frequency_penalty=1.1),
]


def logits(num_rows: int, vocab_size: int = 131, scale: float = 3.0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(DEVICE, dtype)


noise, noise_bound = draw._noise, draw._noise_bound


@jit
def bounded_noise(noises, bounds, STEP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = 16777215 - i * STEP
    tl.store(noises + i, noise(bits))
    tl.store(bounds + i, noise_bound(bits))


@pytest.mark.parametrize("step", [1, 1024])
def test_the_bound_of_the_noise(step: int) -> None:
    """Above it everywhere, and close to it where the largest are."""
    noises, bounds = torch.empty(2, 16384, dtype=torch.float64, device=DEVICE)
    bounded_noise[(16,)](noises, bounds, STEP=step, BLOCK=1024)
    assert bool((bounds > noises).all())
    assert (bounds - noises)[noises > 3].max() < 0.1
    assert 17 < noises.max() < bounds.max() < 17.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_temperature(dtype: torch.dtype) -> None:
    case(logits(5, dtype=dtype), WARM).agrees(128)


@pytest.mark.parametrize("params", [NARROW, CHANGED], ids=["narrow", "changed"])
def test_narrowed(params: list[P]) -> None:
    case(logits(len(params)), params).agrees(128)
    case(logits(len(params), scale=0.3, dtype=torch.float32), params).agrees(256)


def test_penalties() -> None:
    case(logits(3), PENALIZED).agrees(128)


def test_higher_levels_draw_the_same() -> None:
    given = case(logits(5), WARM)
    expected, ok, *_ = given.found()
    for level in (2, 3):
        higher = case(logits(6), [*WARM, PENALIZED[2]], level=level)._replace(logits=logits(5), at=given.at)
        higher = higher._replace(positions=given.positions, index=given.index)
        tokens, fine, *_ = higher.found(128)
        assert torch.equal(tokens, expected) and torch.equal(fine, ok)


@pytest.mark.parametrize("step", [1.0, 1000.0])
def test_ties(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values, the last time one alone: the cut falls among equals, whose lower ids stay."""
    monkeypatch.setattr(draw_narrow, "BLOCK", 32)  # lists longer than a program's look
    rows = (logits(len(NARROW)) / step).round() * step
    assert rows.unique().numel() < 30
    case(rows, NARROW).agrees(128)


def test_the_cut_falls_exactly_between_equals() -> None:
    """Half of the mass of eight equal tokens is that of four: what reaches it is enough."""
    given = case(torch.zeros(3, 8, device=DEVICE), [P(1.0, top_p=0.5), P(1.0, top_p=0.51), P(1.0, top_k=6, top_p=0.5)])
    kept = given.agrees().kept
    assert kept is not None and kept.sum(-1).tolist() == [4, 5, 3]


def test_quotients_that_meet() -> None:
    """Neighbours in float64 that division makes equal are ties, and the noise decides as among others."""
    rows = torch.full((2, 40), 1.0, dtype=torch.float64, device=DEVICE)
    rows[:, 1::2] = torch.nextafter(rows[:, 1::2], torch.tensor(2.0, dtype=torch.float64, device=DEVICE))
    given = case(rows, [P(1.7, top_k=7), P(1.7, top_p=0.3)])
    assert (rows / given.knobs.temperature[:, None]).unique().numel() < 4
    given.agrees(128)


def test_minus_infinity() -> None:
    rows = logits(len(NARROW))
    rows[:, 3::2] = -torch.inf
    case(rows, [P(1.0, top_k=100), P(1.0, top_k=80, top_p=0.99), *NARROW[2:]]).agrees(128)


def test_rows_that_cannot_be_drawn() -> None:
    """NaN, infinity, nothing left: said by `ok`, row by row, and the others are drawn as ever."""
    rows = logits(6)
    rows[0, 70], rows[1, 5], rows[2] = torch.nan, torch.inf, -torch.inf
    for params in ([P(0.9)], [P(0.9, top_p=0.8)], [P(0.0)]):
        given = case(rows, params)
        assert given.agrees(128).ok.tolist() == [False, False, False, True, True, True]
    only = torch.full((2, 70), -torch.inf, device=DEVICE)
    only[:, 66] = 0.0
    given = case(only, [P(1.0, min_tokens=5, stop_token_ids=(66,)), P(1.0, top_p=0.5)])
    assert given.agrees(64).ok.tolist() == [False, True]


@pytest.mark.parametrize("vocab_size", [1, 2, 33])
def test_small_vocabularies(vocab_size: int) -> None:
    params = [P(1.0, top_k=1), P(1.0, top_p=1e-9), P(1.0, top_k=32, top_p=0.999, min_p=1e-5)]
    case(logits(3, vocab_size), params).agrees(128)


def test_a_draw_depends_on_its_row_alone() -> None:
    """Where logits lie, what else is drawn and how a row is divided change nothing."""
    given = case(logits(6), NARROW)
    tokens = given.found(128).tokens
    order = torch.tensor([4, 0, 2], device=DEVICE)
    wide = torch.zeros(3, 200, dtype=torch.float64, device=DEVICE)[:, 11:142]
    wide.copy_(given.logits[order])
    some = given._replace(logits=wide, at=given.at[order], positions=given.positions[order], index=given.index[order])
    assert torch.equal(some.found(64).tokens, tokens[order])
