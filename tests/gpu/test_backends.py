"""Every attention backend and library on its own, against `sdpa` in float32 on the same pages."""

import importlib

import pytest
import torch

from looped.errors import LoopedError
from looped.infer.backends import flash
from looped.infer.backends.base import DecodeBatch, Piece, PrefillBatch, piece_table
from looped.infer.backends.choose import choose_backend
from looped.infer.backends.flash import FlashBackend
from looped.infer.backends.sdpa import SdpaBackend

pytestmark = pytest.mark.gpu

LIBRARIES = {kind.title: kind for kind in flash.LIBRARIES}
# Relative error of attention in half precision.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(64, 4, 2), (96, 3, 3), (128, 8, 1), (128, 4, 4)]  # head dim, query heads, key/value heads


@pytest.fixture(params=["triton", *LIBRARIES])
def backend(request):
    if request.param == "triton":
        return choose_backend("triton", (1,), 64, torch.float16, torch.device("cuda")).backend
    kind = LIBRARIES[request.param]
    capability = torch.cuda.get_device_capability()[0]
    if capability not in kind.capabilities:
        pytest.skip(f"{kind.title} does not serve this GPU")
    try:
        functions = importlib.import_module(kind.module)
    except ModuleNotFoundError:
        pytest.skip(f"{kind.title} is not installed")
    if not hasattr(functions, kind.entry):
        pytest.skip(f"{kind.title} is not installed")
    return FlashBackend(kind(functions, capability))


class PagePool:
    """Layers of pages in shuffled order. Page 0 is padding; whatever no token was written to is NaN."""

    def __init__(self, slots, planes, max_len, page_size, kv_heads, head_dim, dtype, num_layers=2):
        generator = torch.Generator().manual_seed(page_size + head_dim)
        blocks = -(-max_len // page_size)
        num_pages = (slots - 1) * planes * blocks
        pages = torch.randperm(num_pages, generator=generator).int() + 1
        table = torch.zeros(slots, planes, blocks, dtype=torch.int32)
        table[1:] = pages.view(slots - 1, planes, blocks)
        self.page_size, self.table_SPB = page_size, table.cuda()
        shape = (num_layers, (num_pages + 1) * page_size, 2, kv_heads, head_dim)
        self.data = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
        self.data[:, :page_size] = 0

    def layer(self, layer):
        return self.data[layer]

    def rows(self, slots, planes, positions):
        pages = self.table_SPB[slots, planes, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def write(self, slots, planes, length):
        """Random K/V for all tokens of some (slot, plane)."""
        for slot, plane, end in zip(slots, planes, length, strict=True):
            at = torch.arange(end, device="cuda")
            rows = self.rows(torch.full_like(at, slot), torch.full_like(at, plane), at)
            self.data[:, rows] = torch.randn_like(self.data[:, rows])

    def wide(self):
        """The same pages in float32, of their own."""
        copy = object.__new__(PagePool)
        copy.page_size, copy.table_SPB, copy.data = self.page_size, self.table_SPB, self.data.float()
        return copy


def on_gpu(values):
    return torch.tensor(values, device="cuda")


def draw(n, heads, kv_heads, head_dim, dtype):
    """q, k and v of n rows; k and v are slices of one tensor, as a fused projection leaves them."""
    q = torch.randn(n, heads, head_dim, device="cuda", dtype=dtype)
    kv = torch.randn(n, 2 * kv_heads, head_dim, device="cuda", dtype=dtype)
    return q, kv[:, :kv_heads], kv[:, kv_heads:]


def error(out, expected):
    assert out.isfinite().all()
    return float((out.float() - expected).norm() / expected.norm())


def checked(backend, page_size, head_dim, dtype):
    """Skip what the backend refuses, by its own word."""
    try:
        backend.check(page_size, head_dim, dtype, "cuda")
    except LoopedError as refusal:
        pytest.skip(str(refusal))


def lengths(page_size):
    edges = [1, 2, page_size - 1, page_size, page_size + 1, 3 * page_size, 127, 128, 129, 500, 700]
    return [max(length, 1) for length in edges]


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_decode(backend, page_size, head_dim, heads, kv_heads, dtype):
    checked(backend, page_size, head_dim, dtype)
    torch.manual_seed(0)
    lens = lengths(page_size)
    n, planes = len(lens), 3
    pool = PagePool(n + 1, planes, 800, page_size, kv_heads, head_dim, dtype)
    slots, at_planes = [*range(1, n + 1)], [i % planes for i in range(n)]
    pool.write(slots, at_planes, [length - 1 for length in lens])
    reference = pool.wide()
    padded = [on_gpu([*values, 0, 0]) for values in (slots, at_planes, [length - 1 for length in lens])]
    batch = DecodeBatch(*padded, 800)
    attend, expect = backend.decode(pool, batch), SdpaBackend().decode(reference, batch)
    before = pool.data.clone()
    for layer in range(2):
        q, k, v = draw(n + 2, heads, kv_heads, head_dim, dtype)
        k[-2:], v[-2:] = 0, 0  # padding rows share a place; all write the same, so that it is known
        out, expected = attend(layer, q, k, v), expect(layer, q.float(), k.float(), v.float())
        assert error(out[:n], expected[:n]) < TOLERANCE[dtype]
        assert out.isfinite().all()
        rows = pool.rows(*padded)
        before[layer, rows] = torch.stack((k, v), 1)
    torch.testing.assert_close(pool.data, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [1, 4])
def test_long_contexts_of_few_sequences(backend, page_size, heads):
    checked(backend, page_size, 128, torch.bfloat16)
    torch.manual_seed(0)
    lens = [6000, 4097, 3]
    pool = PagePool(4, 1, 6016, page_size, 1, 128, torch.bfloat16, num_layers=1)
    pool.write([1, 2, 3], [0, 0, 0], [length - 1 for length in lens])
    batch = DecodeBatch(on_gpu([1, 2, 3]), on_gpu([0, 0, 0]), on_gpu([length - 1 for length in lens]), 6016)
    q, k, v = draw(3, heads, 1, 128, torch.bfloat16)
    expected = SdpaBackend().decode(pool.wide(), batch)(0, q.float(), k.float(), v.float())
    assert error(backend.decode(pool, batch)(0, q, k, v), expected) < 1e-2


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_a_captured_decode_serves_other_rows_and_lengths(backend, page_size):
    """What a graph froze is sizes alone: slots, planes, positions, tables and lengths are read anew."""
    checked(backend, page_size, 64, torch.float16)
    torch.manual_seed(0)
    pool = PagePool(9, 2, 1024, page_size, 2, 64, torch.float16)
    pool.write([*range(1, 9)] * 2, [0] * 8 + [1] * 8, [1024] * 16)
    slots, planes, positions = (torch.zeros(6, dtype=torch.long, device="cuda") for _ in range(3))
    q, k, v = draw(6, 4, 2, 64, torch.float16)
    batch = DecodeBatch(slots, planes, positions, 1024)

    def stage():
        attend = backend.decode(pool, batch)
        return attend(0, q, k, v), attend(1, q, k, v)

    from looped.infer.graphs import Graphs

    graphs = Graphs(torch.device("cuda"), True, 6)
    graphs.capture("decode", stage)
    assert "decode" in graphs and graphs.num_bytes >= 0 and graphs.seconds > 0
    cases = [([3, 1, 8, 2, 5, 0], 1000), ([1, 2, 0, 0, 0, 0], 3), ([8, 7, 6, 5, 4, 3], 600)]
    for chosen, most in cases:
        slots.copy_(on_gpu(chosen))
        planes.copy_(on_gpu([i % 2 for i in range(6)]) * (slots > 0))
        positions.copy_(on_gpu([most - 1 - i * most // 7 for i in range(6)]) * (slots > 0))
        q.normal_()
        reference = pool.wide()
        expected = [SdpaBackend().decode(reference, batch)(i, q.float(), k.float(), v.float()) for i in range(2)]
        real = slots > 0
        for out, wanted in zip(graphs.run("decode", stage), expected, strict=True):
            assert error(out[real], wanted[real]) < TOLERANCE[torch.float16]
        eager = stage()
        for out, wanted in zip(graphs.run("decode", stage), eager, strict=True):
            assert torch.equal(out[real], wanted[real])


PIECES = {
    "whole": [(1, 0, 40), (2, 0, 1), (3, 0, 130)],
    "later": [(1, 17, 90), (3, 64, 65), (2, 128, 160), (4, 3, 300)],
}


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("cut", PIECES)
def test_prefill(backend, page_size, head_dim, heads, kv_heads, cut):
    dtype = torch.bfloat16
    checked(backend, page_size, head_dim, dtype)
    torch.manual_seed(0)
    pool = PagePool(5, 2, 512, page_size, kv_heads, head_dim, dtype)
    if page_size % 128 == 0 and backend.name == "flash":
        pool.data.nan_to_num_(0)  # whole pages may be loaded, so what lies behind a sequence's end must be finite
    batch = packed(PIECES[cut])
    for plane in range(2):
        for slot, first, _ in PIECES[cut]:
            pool.write([slot], [plane], [first])
        reference = pool.wide()
        attend, expect = backend.prefill(pool, batch, plane), SdpaBackend().prefill(reference, batch, plane)
        for layer in range(2):
            q, k, v = draw(len(batch.slots), heads, kv_heads, head_dim, dtype)
            expected = expect(layer, q.float(), k.float(), v.float())
            assert error(attend(layer, q, k, v), expected) < TOLERANCE[dtype]
            rows = pool.rows(batch.slots, torch.full_like(batch.slots, plane), batch.positions)
            assert torch.equal(pool.data[layer, rows], torch.stack((k, v), 1))


CAPTURED = {16: [[], [(1, 0, 16)], [(2, 5, 6), (3, 0, 3), (1, 480, 485)], [(4, 0, 1)]]}
CAPTURED[128] = [*CAPTURED[16], [(1, 0, 65), (2, 0, 62)], [(3, 300, 428)], [(i, 0, 25) for i in range(1, 6)]]
CAPTURED[1024] = [*CAPTURED[128], [(i, 0, 200) for i in range(1, 6)], [(2, 0, 512), (5, 1, 512)], [(1, 0, 128)]]


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("size", CAPTURED)
def test_a_captured_prefill_serves_other_pieces(backend, page_size, size, heads, kv_heads):
    """What a graph froze is the number of rows and of places alone; padding rows are finite."""
    from looped.infer.graphs import Graphs

    if not backend.pads_prefill:
        pytest.skip("its prefills are not captured")
    dtype, places = torch.bfloat16, 7
    checked(backend, page_size, 64, dtype)
    torch.manual_seed(0)
    pool = PagePool(6, 2, 512, page_size, kv_heads, 64, dtype)
    if page_size % 128 == 0 and backend.name == "flash":
        pool.data.nan_to_num_(0)
    rows = torch.zeros(2, size, dtype=torch.long, device="cuda")
    table = torch.zeros(3, places + 1, dtype=torch.int32, device="cuda")
    q, k, v = draw(size, heads, kv_heads, 64, dtype)

    def load(pieces):
        real = packed(pieces) if pieces else None
        count = len(real.slots) if real else 0
        mine = (*(real.pieces if real else ()), *((Piece(0, count, size, 0, 1),) if count < size else ()))
        rows.zero_()
        if real:
            rows[0, :count], rows[1, :count] = real.slots, real.positions
        table.copy_(torch.from_numpy(piece_table(mine, places)))
        return real

    def stage():
        batch = PrefillBatch(rows[0], rows[1], table, (Piece(0, 0, size, 0, 1),), size, 512)
        return tuple(backend.prefill(pool, batch, plane)(plane, q, k, v) for plane in range(2))

    graphs = Graphs(torch.device("cuda"), True, 6)
    load([])
    graphs.capture("prefill", stage)
    for pieces in CAPTURED[size]:
        real = load(pieces)
        n = len(real.slots) if real else 0
        q.normal_()
        k.normal_()
        for slot, first, _ in pieces:
            pool.write([slot] * 2, [0, 1], [first] * 2)
        reference = pool.wide()
        outs = [out.clone() for out in graphs.run("prefill", stage)]
        assert all(out.isfinite().all() for out in outs)
        if real is not None:
            for plane, out in enumerate(outs):
                expect = SdpaBackend().prefill(reference, real, plane)
                assert error(out[:n], expect(plane, q[:n].float(), k[:n].float(), v[:n].float())) < TOLERANCE[dtype]
        for out, wanted in zip(outs, stage(), strict=True):  # padding rows share a place, so theirs is open
            assert torch.equal(out[:n], wanted[:n])


def packed(pieces, keep=None):
    made, slots, positions, start = [], [], [], 0
    for slot, first, end in pieces:
        at = [p for p in range(first, end) if keep is None or p in (first, end - 1) or p % keep]
        made.append(Piece(slot, start, start + len(at), first, end))
        slots, positions, start = slots + [slot] * len(at), positions + at, start + len(at)
    return PrefillBatch.of(on_gpu(slots), on_gpu(positions), made)


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_with_holes(backend, page_size):
    """Tokens that left the loop are missing among the queries, and read from the pool as keys."""
    dtype = torch.bfloat16
    checked(backend, page_size, 64, dtype)
    torch.manual_seed(0)
    pool = PagePool(5, 1, 512, page_size, 2, 64, dtype)
    pieces = [(1, 0, 90), (3, 20, 21), (2, 100, 180)]
    pool.write([s for s, _, _ in pieces], [0] * 3, [end for _, _, end in pieces])
    batch, reference = packed(pieces, keep=3), pool.wide()
    assert batch.holed
    q, k, v = draw(len(batch.slots), 4, 2, 64, dtype)
    expected = SdpaBackend().prefill(reference, batch, 0)(0, q.float(), k.float(), v.float())
    assert error(backend.prefill(pool, batch, 0)(0, q, k, v), expected) < TOLERANCE[dtype]


def test_auto_prefills_on_flash_where_it_serves_the_model():
    cuda = torch.device("cuda")
    assert choose_backend("auto", (16,), 64, torch.float32, cuda).backend.name == "triton"
    half = choose_backend("auto", (16,), 64, torch.bfloat16, cuda)
    try:
        flash.find_library()
    except LoopedError:
        assert half.backend.name == "triton" and "not chosen" in half.describe()
    else:
        assert half.backend.name == "triton+flash"
