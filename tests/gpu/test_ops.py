"""The kernels of a layer on a GPU, in the dtypes they serve: right, reproducible, and fit for graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from looped.model import ops
from looped.model.kernels import all as kernels
from looped.model.kernels import head, launch, matmul, products, stream
from looped.model.kernels.head import Head
from looped.model.kernels.matmul import Tile
from looped.model.kernels.stream import Stream
from looped.model.layers import Block, rotary, run_blocks
from tests.models import huginn_config, ouro_config

pytestmark = pytest.mark.gpu
HALVES = (torch.bfloat16, torch.float16)
# Rows around the edges of the tiles of 16, 32 and 64.
ROWS = (1, 2, 15, 16, 17, 32, 33, 64)
# Ouro's products; sizes that divide by nothing but eight; a width below a block.
SIZES = [(2048, 6144), (2048, 2048), (5632, 2048), (1000, 2008), (520, 264), (64, 72)]
MARGIN = 6e-3


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def distance(out: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def poison() -> None:
    """Memory that is handed out next holds NaN."""
    torch.cuda.synchronize()
    torch.full((64 << 20,), float("nan"), device="cuda")


def serves(x: Tensor, w: Tensor) -> None:
    if not stream.streams(x, w):
        pytest.skip("the kernels are for Hopper")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("kind", ["stream", "matmul"])
def test_products(kind: str, inner: int, outer: int, dtype: torch.dtype) -> None:
    w = draw(outer, inner, dtype=dtype, seed=1) * inner**-0.5
    for num_rows in ROWS:
        x = draw(num_rows, inner, dtype=dtype, seed=num_rows)
        if kind == "stream":
            serves(x, w)
        wide = x.double() @ w.double().T
        gate, up = wide.chunk(2, -1)
        poison()
        parts = stream.stream_parts(x, w) if kind == "stream" else matmul.linear_parts(x, w)
        assert distance(parts.float().sum(0), wide) < MARGIN
        gated = stream.stream_gated(x, w) if kind == "stream" else matmul.gated_linear(x, w)
        assert distance(gated, torch.nn.functional.silu(gate) * up) < MARGIN


@pytest.mark.parametrize("sizes", [Stream(64, 64, 3, 3), Stream(128, 64, 2, 4, 8), Stream(64, 256, 2, 2)], ids=str)
def test_stream_sizes(sizes: Stream) -> None:
    x, w = draw(20, 1000), draw(520, 1000, seed=1) / 32
    serves(x, w)
    wide = x.double() @ w.double().T
    gate, up = wide.chunk(2, -1)
    poison()
    assert distance(stream.stream_parts(x, w, sizes).float().sum(0), wide) < MARGIN
    if sizes.num_warps == 4:
        gated = stream.stream_gated(x, w, sizes._replace(splits=1))
        assert distance(gated, torch.nn.functional.silu(gate) * up) < MARGIN


@pytest.mark.parametrize(("width", "outer"), [(5280, 5280), (520, 264), (64, 72), (1000, 520)])
def test_projecting_two_side_by_side(width: int, outer: int) -> None:
    """Steps do not divide the first one's width: its last one must not see the second."""
    w = draw(outer, 2 * width, seed=1) * (2 * width) ** -0.5
    for num_rows in (1, 17, 64):
        x, y = draw(num_rows, width, seed=num_rows), draw(num_rows, width, seed=99)
        serves(x, w)
        for sizes in (None, Stream(64, 64, 3, 3)):
            poison()
            parts = stream.stream_parts(x, w, sizes, more_x_ND=y)
            assert distance(parts.float().sum(0), torch.cat((x, y), -1).double() @ w.double().T) < MARGIN


@pytest.mark.parametrize("swap", [False, True])
def test_matmul_asks_ahead(swap: bool) -> None:
    x, w = draw(16, 2048), draw(512, 2048, seed=1) / 45
    parts = matmul.linear_parts(x, w, Tile(64, 128, 4, 3, 4, swap, 512))
    assert distance(parts.sum(0), x.double() @ w.double().T) < MARGIN


def test_a_row_is_the_same_in_any_batch_of_its_bucket() -> None:
    w, x = draw(2048, 2048, seed=1) / 45, draw(64, 2048)
    for rows in (range(1, 17), range(17, 33), range(33, 65)):
        whole = products.linear_parts(x[: rows[-1]], w), products.gated_linear(x[: rows[-1]], w)
        for num_rows in (rows[0], rows[len(rows) // 2]):
            parts, gated = products.linear_parts(x[:num_rows], w), products.gated_linear(x[:num_rows], w)
            assert torch.equal(parts, whole[0][:, :num_rows]) and torch.equal(gated, whole[1][:num_rows])


def check_head(num_rows: int, inner: int, vocab_size: int, dtype: torch.dtype, *sizes: Head | None) -> None:
    w = draw(vocab_size, inner, dtype=dtype, seed=1) * inner**-0.5
    w[vocab_size // 2 :] = w[: vocab_size - vocab_size // 2].clone()  # every logit of the first half occurs twice
    x = draw(num_rows, inner, dtype=dtype, seed=num_rows)
    serves(x, w)
    wide, before = x.double() @ w.double().T, None
    for each in sizes:
        poison()
        logits = head.head_logits(x, w, each)
        assert distance(logits, wide) < MARGIN
        tokens, ok = head.head_largest(x, w, each)
        assert bool(ok.all()) and torch.equal(tokens, logits.float().max(-1).indices)
        assert before is None or torch.equal(logits, before), "the sizes of a launch change nothing"
        before = logits


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65, 200, 256])
def test_head(num_rows: int) -> None:
    check_head(num_rows, 2048, 49152, torch.bfloat16, None)


@pytest.mark.parametrize(
    ("num_rows", "inner", "vocab_size", "dtype"),
    [(33, 520, 1000, torch.float16), (5, 64, 65, torch.bfloat16), (64, 1000, 40008, torch.float16)],
)
def test_head_of_any_size(num_rows: int, inner: int, vocab_size: int, dtype: torch.dtype) -> None:
    check_head(num_rows, inner, vocab_size, dtype, None)


@pytest.mark.parametrize("num_rows", [3, 50])
def test_head_by_other_launches(num_rows: int) -> None:
    """One tile a program and many, and last tiles that lie behind the vocabulary."""
    sizes = (Head(64, 64, 2, 8), Head(128, 128, 3, 1), Head(128, 64, 4, 1, 8, 1))
    check_head(num_rows, 520, 20008, torch.bfloat16, *sizes)


@pytest.mark.parametrize("num_rows", [3, 64, 100])
def test_likeliest_token_of_rows_that_are_not_finite(num_rows: int) -> None:
    w, x = draw(49152, 2048, seed=1) / 45, draw(num_rows, 2048)
    x[1, 7] = float("nan")
    w[40000] = 0.0
    x[2] = 0.0  # all logits are equal
    with torch.inference_mode():
        tokens, ok = ops.head_largest(x, w)
        most, expected = ops.head(x, w).float().max(-1)
    assert torch.equal(tokens, expected) and int(tokens[2]) == 0
    assert torch.equal(ok, most.isfinite()) and ok.tolist() == [row != 1 for row in range(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 65, 256])
def test_largest_of_logits(num_rows: int) -> None:
    logits = (draw(num_rows, 49152) * 8).round() / 8
    tokens, ok = kernels.largest_of(logits)
    assert torch.equal(tokens, logits.float().max(-1).indices) and bool(ok.all())


def test_angles_of_long_contexts() -> None:
    positions = torch.arange(0, 131072, 37, device="cuda")
    with ops.plain():
        rope = ops.rotary(positions, 128, 1e6, True, torch.bfloat16)
    cos, sin = kernels.angle_rows(positions, ops.frequencies(128, 1e6, torch.float32, positions.device), torch.float32)
    assert (cos - rope.cos[:, 0]).abs().max() < 1e-5 and (sin - rope.sin[:, 0]).abs().max() < 1e-5


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mixes q, k and v of a row and depends on the layer; no cache."""
    group = q.shape[-2] // k.shape[-2]
    weight = torch.sigmoid((q * k.repeat_interleave(group, -2)).sum(-1, keepdim=True) * 0.1 + layer % 2)
    return (weight * v.repeat_interleave(group, -2)).to(q.dtype)


def blocks(family: str, dtype: torch.dtype, num_layers: int, wide: bool = False) -> tuple[torch.nn.ModuleList, object]:
    shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    if wide:
        shape = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "num_heads": 8, "num_kv_heads": 8}
    config = ouro_config(**shape) if family == "ouro" else huginn_config(**shape)
    torch.manual_seed(0)
    chain = torch.nn.ModuleList(Block(config) for _ in range(num_layers))
    for name, param in chain.named_parameters():
        if param.dim() == 1 or "bias" in name:
            param.data += 0.2 * torch.randn_like(param)
    return chain.to("cuda", dtype).requires_grad_(False), config


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_blocks_are_the_plain_ones(family: str, dtype: torch.dtype) -> None:
    chain, config = blocks(family, dtype, 2)
    norm = chain[0].norm_1
    for num_rows in (*ROWS, 65, 200):
        x, positions = draw(num_rows, 128, dtype=dtype), torch.arange(num_rows, device="cuda") * 7
        with torch.inference_mode():
            got = run_blocks(chain, x, rotary(positions, config, dtype), 0, attend, norm)
            with ops.plain():
                expected = run_blocks(chain, x, rotary(positions, config, dtype), 0, attend, norm)
            wide = chain.double()
            exact = run_blocks(wide, x.double(), rotary(positions, config, torch.float64), 0, attend, wide[0].norm_1)
            chain = chain.to(dtype)
        # As close to what exact arithmetic gives as the plain operations are.
        assert distance(got, exact) < 1.3 * distance(expected, exact) + 1e-4


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_overlapped_launches_change_no_bit(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve layers whose kernels start before their predecessors end, in a graph, many times over."""
    chain, config = blocks("ouro", torch.bfloat16, 12, wide=True)
    x, positions = draw(num_rows, 1024), torch.arange(num_rows, device="cuda") * 7

    def run() -> Tensor:
        return run_blocks(chain, x, rotary(positions, config, x.dtype), 0, lambda _, q, k, v: q + v - k)

    with torch.inference_mode():
        with monkeypatch.context() as patch:
            for module in (launch, matmul, stream):
                patch.setattr(module, "overlaps", lambda device: False)
            expected = run().clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(300):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("num_rows", [1, 40, 64])
def test_a_captured_chain_that_ends_in_the_head(num_rows: int) -> None:
    """The head's weights are on their way before its rows exist: it must see this replay's, not the last's."""
    w, weight, move = draw(20000, 512, seed=1) / 22, draw(512, seed=2), draw(num_rows, 512, seed=3)
    x = draw(num_rows, 512)
    serves(x, w)

    def run() -> tuple[Tensor, Tensor]:
        x.add_(move)
        return kernels.head_largest(kernels.norm_rows(x, weight, 1e-6), w)

    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens, ok = run()
        for _ in range(100):
            graph.replay()
            most, expected = head.head_logits(kernels.norm_rows(x, weight, 1e-6), w).float().max(-1)
            assert torch.equal(tokens, expected) and torch.equal(ok, most.isfinite())


def test_what_is_said() -> None:
    said = ops.describe(torch.device("cuda"), torch.bfloat16)
    assert "Triton" in said and "64 rows" in said
    assert ops.describe(torch.device("cuda"), torch.float64) == "plain PyTorch"
