"""The `triton` backend's compiled kernels on a GPU: the cases of `test_triton`, every dtype, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from looped.infer.backends.base import DecodeBatch
from looped.infer.backends.kernels.decode_groups import decode_groups
from looped.infer.backends.kernels.decode_heads import decode_heads
from looped.infer.backends.kernels.planes import copy_planes
from looped.infer.backends.kernels.splits import make_scratch
from looped.infer.backends.triton import TritonBackend
from tests.infer import paged
from tests.infer.paged import PagedPool, Part, Shape

pytestmark = pytest.mark.gpu

BACKEND = TritonBackend()
# bfloat16 and float16: one rounding of the weights and one of the output, whose size is about one.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-10}
DTYPES = list(TOLERANCE)
OURO, GROUPED, HUGINN = Shape(16, 16, 128), Shape(32, 8, 128), Shape(55, 55, 96)
SIZES = [(OURO, 1), (OURO, 16), (OURO, 64), (GROUPED, 1), (GROUPED, 16), (HUGINN, 16), (HUGINN, 5)]
SIZES += [
    (Shape(4, 2, 8), 16),
    (Shape(3, 3, 8), 1),
    (Shape(6, 2, 64), 64),
    (Shape(2, 2, 256), 16),
    (Shape(48, 1, 96), 16),
]


@pytest.mark.parametrize(("shape", "page_size"), SIZES, ids=str)
def test_decode(shape: Shape, page_size: int) -> None:
    lens = [*paged.edge_lens(page_size), 256, 257, 258, 1030, 3000]
    case = paged.decode_case(shape, page_size, lens, torch.bfloat16, "cuda")
    paged.assert_decode(BACKEND, case, shape, TOLERANCE[torch.bfloat16], layers=(0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [OURO, GROUPED, Shape(4, 2, 8), Shape(3, 3, 8)], ids=str)
def test_decode_dtypes(shape: Shape, dtype: torch.dtype) -> None:
    case = paged.decode_case(shape, 16, [1, 16, 17, 70, 257, 900], dtype, "cuda")
    paged.assert_decode(BACKEND, case, shape, TOLERANCE[dtype], layers=(0, 1))


@pytest.mark.parametrize(("shape", "page_size"), SIZES, ids=str)
def test_prefill(shape: Shape, page_size: int) -> None:
    pool, batch = paged.prefill_case(shape, page_size, paged.parts(page_size), torch.bfloat16, "cuda")
    paged.assert_prefill(BACKEND, pool, batch, shape, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [OURO, GROUPED, Shape(4, 2, 8), Shape(3, 3, 8)], ids=str)
def test_prefill_dtypes(shape: Shape, dtype: torch.dtype) -> None:
    work = [Part(0, list(range(200))), Part(40, list(range(40, 400, 3))), Part(700, list(range(700, 760)))]
    pool, batch = paged.prefill_case(shape, 16, work, dtype, "cuda")
    paged.assert_prefill(BACKEND, pool, batch, shape, TOLERANCE[dtype])


def test_prefill_of_single_rows() -> None:
    """Short pieces, which have small tiles."""
    pool, batch = paged.prefill_case(OURO, 16, [Part(n, [n]) for n in (0, 15, 16, 900)], torch.bfloat16, "cuda")
    paged.assert_prefill(BACKEND, pool, batch, OURO, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("shape", [OURO, GROUPED], ids=str)
def test_rows_do_not_depend_on_the_batch(shape: Shape) -> None:
    """The same bits alone and in a batch, for any `max_len`, however many programs share the splits, every time; also
    where rows are so long that their splits grow."""
    decode = decode_heads if shape.heads == shape.kv_heads else decode_groups
    lens = [33, 66, 129, 130, 400, 700, 2900, 3000]
    pool, batch, real = paged.decode_case(shape, 16, lens, torch.bfloat16, "cuda", padding=0)
    kv, table = pool.layer(0), pool.table_SPB
    q, k, v = paged.projections(real, shape, pool)
    for keys, most in ((256, 32), (64, 8)):
        wanted = None
        for max_len, num_sms in ((3000, 132), (3000, 1), (9000, 1000), (3000, 20)):
            scratch = make_scratch(batch.positions, shape.heads, kv, max_len, num_sms, keys, most)
            for _ in range(20):
                out = decode(kv, table, 16, batch, scratch, q, k, v)
                wanted = out if wanted is None else wanted
                assert torch.equal(out, wanted)
            assert not scratch.arrived.any()
        assert wanted is not None
        paged.assert_rows(pool, 0, wanted, q, *batch[:3], TOLERANCE[torch.bfloat16])
        for row in range(real):
            one = slice(row, row + 1)
            alone = DecodeBatch(*(x[one] for x in batch[:3]), max_len=3000)
            scratch = make_scratch(alone.positions, shape.heads, kv, 3000, 132, keys, most)
            assert torch.equal(decode(kv, table, 16, alone, scratch, q[one], k[one], v[one]), wanted[one])


class Captured:
    """Both layers of a decode batch as a CUDA graph over buffers that stay where they are."""

    def __init__(self, shape: Shape, pool: PagedPool, batch: DecodeBatch) -> None:
        self.pool, self.batch = pool, batch
        self.inputs = [paged.projections(len(batch.slots), shape, pool) for _ in range(paged.LAYERS)]
        self.outs: list[Tensor] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = self.run()

    def run(self) -> list[Tensor]:
        attend = BACKEND.decode(self.pool, self.batch)  # type: ignore[arg-type]
        return [attend(layer, *self.inputs[layer]) for layer in range(paged.LAYERS)]

    def load(self, other: paged.Decode) -> None:
        """The pool and rows of another case into the captured buffers."""
        self.pool.data.copy_(other.pool.data)
        self.pool.table_SPB.copy_(other.pool.table_SPB)
        for mine, theirs in zip(self.batch[:3], other.batch[:3], strict=True):
            mine.copy_(theirs)


@pytest.mark.parametrize(("shape", "page_size"), [(OURO, 16), (OURO, 1), (GROUPED, 16)], ids=str)
def test_a_captured_graph_serves_every_length(shape: Shape, page_size: int) -> None:
    """Captured once for rows of up to 2,000 keys; replayed with other lengths, planes, pages, and slots."""
    dtype, most = torch.bfloat16, 2000
    first = paged.decode_case(shape, page_size, [1, 1, 1, 1, 1, 1], dtype, "cuda", max_len=most)
    captured = Captured(shape, first.pool, first.batch)
    for lens in ([2000, 1999, 1, 256, 257, 258], [1, 2, 3, 4, 5, 6], [17, 2000, 16, 15, 1000, 33]):
        case = paged.decode_case(shape, page_size, lens, dtype, "cuda", max_len=most)
        captured.load(case)
        captured.graph.replay()
        for layer, out in enumerate(captured.outs):
            q, k, v = captured.inputs[layer]
            at = [x[: case.real] for x in case.batch[:3]]
            paged.assert_rows(captured.pool, layer, out, q, *at, TOLERANCE[dtype])
            paged.assert_stored(captured.pool, layer, case.pool.layer(layer), *at, k, v)
        replayed = [out.clone() for out in captured.outs]
        captured.load(case)
        eager = captured.run()
        assert all(torch.equal(a[: case.real], b[: case.real]) for a, b in zip(eager, replayed, strict=True))


@pytest.mark.parametrize("page_size", [1, 16])
def test_copy_planes(page_size: int) -> None:
    torch.manual_seed(0)
    pool = paged.make_pool(OURO, page_size, 4, 4, 40, torch.bfloat16, "cuda")
    pool.data.normal_()
    rows = ([1, 2, 3, 4, 0], [0, 17, 39, 16, 0], [1, 2, 3, 4, 7])
    slots, positions, depths = (torch.tensor(x, device="cuda") for x in rows)
    for flags in ([True, True, False, True, False], [False, False, True, True, False], [False] * 5):
        leaving = torch.tensor(flags, device="cuda")
        wanted = paged.copied_planes(pool, slots, positions, depths, leaving)
        copy_planes(pool, slots, positions, depths, leaving, 4)  # type: ignore[arg-type]
        assert torch.equal(pool.data, wanted)
