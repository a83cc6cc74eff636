"""The operations of a layer: plain ones against the formulas, kernels against plain ones.

Without a GPU the kernels run through Triton's interpreter, whose bfloat16 products are wrong: float32 and float16 here,
bfloat16 in tests/gpu/test_ops.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # must stand before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from looped.infer.backends.kernels import interpreter
from looped.model import ops
from looped.model.attention import dense_causal
from looped.model.kernels import all as kernels
from looped.model.kernels.matmul import Tile, gated_linear, linear_parts
from looped.model.layers import run_blocks
from tests.models import huginn_config, ouro_config, random_model

if interpreter.interpreting():
    interpreter.repair()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels serve half precision; the interpreter alone runs them in float32.
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float16,)
# Part of a wide tile, even and uneven splits, more parts than blocks, both orientations.
TILES = [
    Tile(32, 32, 1, 1, 4, False, 0),
    Tile(16, 32, 3, 1, 4, False, 0),
    Tile(16, 64, 2, 2, 2, False, 0),
    Tile(64, 64, 2, 1, 4, True, 0),
]
SIZES = [(128, 96), (160, 80), (352, 64)]
EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products(num_rows: int, inner: int, outer: int, tile: Tile, dtype: torch.dtype) -> None:
    x = draw(num_rows, inner, dtype=dtype)
    w = draw(2 * outer, inner, dtype=dtype, seed=1) * inner**-0.5
    parts = linear_parts(x, w, tile)
    assert parts.shape == (tile.splits, num_rows, 2 * outer)
    close(parts.float().sum(0), x.double() @ w.double().T, dtype)
    with ops.plain():
        close(gated_linear(x, w, tile), ops.gated(x, w), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_rows_apart(dtype: torch.dtype) -> None:
    """Rows of x may lie in a wider tensor, and weights may be a checkpoint's whose sizes divide by nothing."""
    x = draw(5, 3, 48, dtype=dtype)[:, 1]
    w = draw(2 * 33, 48, dtype=dtype, seed=1)
    close(linear_parts(x, w).float().sum(0), x.double() @ w.double().T, dtype)
    with ops.plain():
        close(gated_linear(x, w), ops.gated(x, w), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 48), (5, 96)])
def test_projecting_two_side_by_side(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, y = draw(num_rows, width, dtype=dtype), draw(num_rows, width, dtype=dtype, seed=1)
    w, norm = draw(width, 2 * width, dtype=dtype, seed=2) / 8, ops.Norm(draw(width, dtype=dtype, seed=3), EPS)
    parts = kernels.joined_parts(x, y, w)
    with ops.plain():
        plain, normed = ops.joined(x, y, w, norm)
        assert normed is None
        expected = plain, ops.rms_norm(plain, norm)
    close(plain, torch.cat((x, y), -1).double() @ w.double().T, dtype)
    for mine, wanted in zip(kernels.sum_norm_rows(parts, *norm, dtype), expected, strict=True):
        close(mine, wanted, dtype)


def logits_of_all_kinds(vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Ties, zeros of both signs, infinities, and NaN of both signs."""
    x = (draw(10, vocab_size, dtype=dtype) * 4).round() / 4
    inf, nan = float("inf"), float("nan")
    x[1, 5], x[1, 60], x[2, 3], x[3], x[4] = nan, nan, inf, -inf, -x[4].abs() - 1
    x[5], x[6], x[6, 44], x[7, 2] = -0.0, -inf, -3.0, -torch.tensor(nan, dtype=dtype)
    x[5, 9] = 0.0
    x[8, 7], x[8, 50] = x[8].max() + 1, x[8].max() + 1
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab_size", "chunk"), [(61, 8192), (1000, 64), (1024, 256), (1030, 8192)])
def test_largest(vocab_size: int, chunk: int, dtype: torch.dtype) -> None:
    logits = logits_of_all_kinds(vocab_size, dtype)
    most, expected = logits.float().max(-1)
    for rows in (logits, torch.cat((logits, logits), 1)[:, :vocab_size]):
        tokens, ok = kernels.largest_of(rows, chunk)
        assert torch.equal(tokens, expected) and torch.equal(ok, most.isfinite())
    tokens, ok = ops.largest(logits.float())
    assert torch.equal(tokens, expected) and torch.equal(ok, most.isfinite())


def test_a_row_is_the_same_in_any_batch_of_its_bucket() -> None:
    w = draw(96, 128, dtype=torch.float32, seed=1)
    x = draw(16, 128, dtype=torch.float32)
    alone = linear_parts(x[3:4], w)
    assert torch.equal(linear_parts(x, w)[:, 3:4], alone)
    assert torch.equal(linear_parts(x[2:9], w)[:, 1:2], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 128, 330])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x = draw(5, width, dtype=dtype) * 3
    norm = ops.Norm(1 + 0.2 * draw(width, dtype=dtype, seed=1), EPS)
    with ops.plain():
        close(kernels.norm_rows(x, *norm), ops.rms_norm(x, norm), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("after_sum", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("follow", [False, True])
def test_merge(follow: bool, splits: int, after_sum: bool, dtype: torch.dtype) -> None:
    width = 72
    x, weight = draw(4, width, dtype=dtype), torch.eye(width, device=DEVICE, dtype=dtype)
    parts = draw(splits, 4, width, dtype=torch.float32 if splits > 1 else dtype, seed=1)
    norm = ops.Norm(1 + 0.2 * draw(width, dtype=dtype, seed=2), EPS)
    following = ops.Norm(1 + 0.2 * draw(width, dtype=dtype, seed=3), 1e-5) if follow else None
    with ops.plain():
        total, normed = ops.merge(x, parts.sum(0).to(dtype), weight, norm, after_sum, following)
    got, got_normed = kernels.merge_rows(x, parts, *norm, after_sum, *(following or (None, 0.0)))
    close(got, total, dtype)
    assert (got_normed is None) == (following is None)
    if got_normed is not None:
        close(got_normed, normed, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [ops.Heads(6, 2, 16, False), ops.Heads(3, 3, 24, False)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_rope(biased: bool, heads: ops.Heads, interleaved: bool, dtype: torch.dtype) -> None:
    if biased and heads.num_heads != heads.num_kv_heads:
        pytest.skip("biases are for as many key heads as query heads")
    heads = heads._replace(interleaved=interleaved)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    parts = draw(2, 5, width, dtype=torch.float32)
    bias = draw(2, 1, heads.num_heads, heads.head_dim, dtype=dtype, seed=1) if biased else None
    positions = torch.tensor([0, 1, 77, 4095, 65535], device=DEVICE)
    with ops.plain():
        rope = ops.rotary(positions, heads.head_dim, 1e6, interleaved, dtype)
        identity = torch.eye(width, device=DEVICE, dtype=dtype)
        q, k, v = ops.qkv(parts.sum(0).to(dtype), identity, bias, rope, heads)
    turned = heads.num_heads + heads.num_kv_heads
    out = kernels.rope_rows(
        parts, bias, rope.cos.flatten(1), rope.sin.flatten(1), turned, heads.head_dim, interleaved, dtype
    )
    close(out[:, :turned], torch.cat((q, k), 1), dtype)
    assert torch.equal(out[:, turned:], v)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles(interleaved: bool) -> None:
    positions = torch.tensor([0, 1, 77, 4095, 65535], device=DEVICE)
    with ops.plain():
        rope = ops.rotary(positions, 96, 50000.0, interleaved, torch.float16)
    frequencies = ops.frequencies(96, 50000.0, torch.float32, positions.device)
    cos, sin = kernels.angle_rows(positions, frequencies, rope.cos.dtype)
    assert (cos - rope.cos[:, 0]).abs().max() < 1e-3 and (sin - rope.sin[:, 0]).abs().max() < 1e-3


def test_silu_mul() -> None:
    x = draw(3, 80, dtype=torch.float32)
    gate, up = x.chunk(2, -1)
    close(kernels.silu_mul_rows(x), torch.nn.functional.silu(gate) * up, torch.float32)


@pytest.mark.parametrize("config", [ouro_config(), huginn_config()], ids=lambda config: config.family)
def test_chained_blocks_are_the_blocks(config) -> None:
    """The norm that a block ends with for the next one changes nothing: bit for bit where operations are plain."""
    model = random_model(config).to(DEVICE)
    x = draw(2, 7, config.hidden_size, dtype=torch.float64)
    rope = ops.rotary(torch.arange(7, device=DEVICE), config.head_dim, 1e4, config.rope_interleaved, x.dtype)
    expected = x
    for layer, block in enumerate(model.core_blocks):
        expected = block(expected, rope, layer, dense_causal)
    assert torch.equal(run_blocks(model.core_blocks, x, rope, 0, dense_causal), expected)
    final = run_blocks(model.core_blocks, x, rope, 0, dense_causal, model.norm)
    assert torch.equal(final, model.norm(expected))


def test_kernels_serve_halves_without_gradients() -> None:
    x, weight = draw(2, 8, dtype=torch.float16), draw(8, 8, dtype=torch.float16)
    trained = torch.nn.Parameter(weight)
    assert ops.fused(x, trained) is None
    assert (ops.fused(x, weight, None) is None) == (DEVICE == "cpu")
    with torch.no_grad():
        assert (ops.fused(x, trained) is None) == (DEVICE == "cpu")
    assert ops.fused(x.float(), weight) is None and ops.fused(x, weight.float()) is None
    with ops.plain():
        assert ops.fused(x, weight) is None
        assert ops.describe(torch.device("cuda"), torch.float16) == "plain PyTorch"
    assert ops.describe(torch.device("cpu"), torch.float16) == "plain PyTorch"
    assert ops.describe(torch.device("cuda"), torch.float64) == "plain PyTorch"
