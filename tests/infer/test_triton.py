"""The `triton` backend against dense attention. Without a GPU its kernels run through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():  # must stand before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from looped.errors import LoopedError
from looped.infer import Output, Request, SamplingParams
from looped.infer.backends.kernels.decode_groups import decode_groups
from looped.infer.backends.kernels.decode_heads import decode_heads
from looped.infer.backends.kernels.planes import copy_planes
from looped.infer.backends.kernels.prefill import Tiles
from looped.infer.backends.kernels.splits import make_scratch
from looped.infer.backends.sdpa import SdpaBackend
from looped.infer.backends.triton import TritonBackend
from tests.infer import paged
from tests.infer.harness import completion, make_engine, prompts, reference
from tests.infer.paged import Part, Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3}
BACKEND = TritonBackend()

# Every page size with both kernels, every head dim with one page size.
SMALL = [(Shape(2, 2, 8), 1), (Shape(1, 1, 8), 16), (Shape(1, 1, 8), 64)]
SMALL += [(Shape(4, 2, 8), 16), (Shape(3, 1, 8), 1), (Shape(2, 1, 8), 64)]
WIDE = [(Shape(3, 1, 64), 16), (Shape(1, 1, 96), 1), (Shape(2, 1, 96), 16), (Shape(1, 1, 128), 16)]


@pytest.mark.parametrize(("shape", "page_size"), SMALL + WIDE, ids=str)
def test_decode(shape: Shape, page_size: int) -> None:
    case = paged.decode_case(shape, page_size, paged.edge_lens(page_size), torch.float32, DEVICE)
    paged.assert_decode(BACKEND, case, shape, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 2, 24), Shape(3, 1, 40), Shape(20, 1, 8)], ids=str)
def test_decode_dtypes_and_odd_sizes(shape: Shape, dtype: torch.dtype) -> None:
    case = paged.decode_case(shape, 5, [1, 5, 6, 70], dtype, DEVICE)
    paged.assert_decode(BACKEND, case, shape, TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [Shape(1, 1, 16), Shape(2, 1, 16)], ids=str)
def test_decode_splits(shape: Shape) -> None:
    """Around the edges of the splits, which several programs share."""
    case = paged.decode_case(shape, 16, [1, 191, 192, 193, 257, 700], torch.float32, DEVICE)
    paged.assert_decode(BACKEND, case, shape, TOLERANCE[torch.float32], layers=(0, 1))


def test_every_key_is_in_one_split() -> None:
    """Whatever the lengths: the list has all splits of a row, in order, and they cover its earlier keys."""
    lens = torch.tensor([0, 1, 15, 47, 48, 50, 700, 4000] * 5)
    kv = torch.zeros(1, 2, 1, 8)
    scratch = make_scratch(lens, 1, kv, 4001, 1, split_keys=32, max_splits=7)
    count = int(scratch.num_items)
    assert 40 < count <= len(scratch.items)
    found = [divmod(item, 256) for item in scratch.items[:count].tolist()]
    assert found == sorted(set(found)) and [row for row, split in found if split == 0] == list(range(40))
    sizes = [sum(row == at for row, _ in found) for at in range(40)]
    assert max(sizes) == 7 and sizes[:8] == [1, 1, 1, 1, 2, 2, 7, 7]


@pytest.mark.parametrize("num_sms", [1, 100])
@pytest.mark.parametrize("shape", [Shape(2, 2, 8), Shape(2, 1, 8)], ids=str)
def test_rows_do_not_depend_on_the_batch(shape: Shape, num_sms: int) -> None:
    """The same bits alone, in a batch, for any `max_len`, however many programs share the splits; also where rows are
    so long that their splits grow."""
    decode = decode_heads if shape.heads == shape.kv_heads else decode_groups
    pool, batch, real = paged.decode_case(shape, 16, [33, 66, 130, 400], torch.float32, DEVICE, padding=0)
    q, k, v = paged.projections(real, shape, pool)
    outs = []
    for max_len in (400, 5000):
        scratch = make_scratch(
            batch.positions, shape.heads, pool.layer(0), max_len, num_sms, split_keys=64, max_splits=3
        )
        outs.append(decode(pool.layer(0), pool.table_SPB, 16, batch, scratch, q, k, v))
        assert not scratch.arrived.any()
    assert torch.equal(*outs)
    paged.assert_rows(pool, 0, outs[0], q, *batch[:3], TOLERANCE[torch.float32])
    for row in range(real):
        alone = type(batch)(*(x[row : row + 1] for x in batch[:3]), max_len=batch.max_len)
        scratch = make_scratch(alone.positions, shape.heads, pool.layer(0), 400, 50, split_keys=64, max_splits=3)
        one = slice(row, row + 1)
        out = decode(pool.layer(0), pool.table_SPB, 16, alone, scratch, q[one], k[one], v[one])
        assert torch.equal(out, outs[0][one])


@pytest.mark.parametrize(("shape", "page_size"), SMALL + WIDE, ids=str)
def test_prefill(shape: Shape, page_size: int) -> None:
    pool, batch = paged.prefill_case(shape, page_size, paged.parts(page_size), torch.float32, DEVICE)
    paged.assert_prefill(BACKEND, pool, batch, shape, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 2, 24), Shape(3, 1, 64)], ids=str)
def test_prefill_dtypes(shape: Shape, dtype: torch.dtype) -> None:
    work = [Part(0, list(range(70))), Part(40, list(range(40, 90, 3))), Part(7, [7, 8])]
    pool, batch = paged.prefill_case(shape, 16, work, dtype, DEVICE)
    paged.assert_prefill(BACKEND, pool, batch, shape, TOLERANCE[dtype])


PADDED = [(6, 7), (7, 7), (64, 9)]  # rows beyond the batch's, and places for pieces


@pytest.mark.parametrize(("extra", "places"), PADDED)
@pytest.mark.parametrize("shape", [Shape(2, 2, 24), Shape(4, 2, 8)], ids=str)
@pytest.mark.parametrize("kind", [TritonBackend, SdpaBackend])
def test_padded_prefill(kind: type, shape: Shape, extra: int, places: int) -> None:
    """Places without a piece, and padding rows that read one key of slot 0; bounds are loose."""
    pool, batch = paged.prefill_case(shape, 16, paged.parts(16), torch.float32, DEVICE)
    batch = paged.padded(batch, len(batch.slots) + extra, places, 64)
    paged.assert_prefill(kind(), pool, batch, shape, TOLERANCE[torch.float32], layers=(0, 1))


def test_full_places_without_padding_rows() -> None:
    shape = Shape(2, 2, 24)
    pool, batch = paged.prefill_case(shape, 16, paged.parts(16), torch.float32, DEVICE)
    batch = paged.padded(batch, len(batch.slots), len(batch.pieces) + 3, 64)
    paged.assert_prefill(BACKEND, pool, batch, shape, TOLERANCE[torch.float32])


def test_sdpa_passes_the_same_cases() -> None:
    """So what the cases ask of kernels is what the engine's reference backend does."""
    shape = Shape(4, 2, 24)
    for dtype in (torch.float32, torch.float64):
        case = paged.decode_case(shape, 5, [1, 5, 6, 70], dtype)
        paged.assert_decode(SdpaBackend(), case, shape, TOLERANCE[dtype])
        pool, batch = paged.prefill_case(shape, 16, paged.parts(16), dtype)
        paged.assert_prefill(SdpaBackend(), pool, batch, shape, TOLERANCE[dtype])


def test_tiles_cover_every_row_once() -> None:
    """Also where a group has more heads than a tile usually has queries; the longest reach comes first. How many there
    are follows from the numbers of rows and places."""
    _, batch = paged.prefill_case(Shape(1, 1, 8), 16, paged.parts(16), torch.float32)
    rows = len(batch.slots)
    for extra, places in ((0, 6), (0, 10), *PADDED):
        packed = paged.padded(batch, rows + extra, places, 64)
        for group in (1, 3, 48):
            tiles = Tiles(packed, group, 8, torch.float32)
            found = [row for first, count in tiles.rows_T2.tolist() for row in range(first, first + count)]
            assert sorted(found) == list(range(rows + extra))
            assert tiles.launch.queries >= group
            assert tiles.rows_T2[:, 1].max() * group <= tiles.launch.queries
            assert len(tiles.rows_T2) == (rows + extra) // (tiles.launch.queries // group) + places
            assert packed.positions[tiles.rows_T2[0, 0]] == packed.positions.max()


@pytest.mark.parametrize("page_size", [1, 16])
def test_copy_planes(page_size: int) -> None:
    """Rows that leave fill the planes they never wrote; others change nothing."""
    torch.manual_seed(0)
    pool = paged.make_pool(Shape(2, 2, 24), page_size, 4, 4, 40, torch.float16, DEVICE)
    pool.data.normal_()
    slots, positions, depths = (
        torch.tensor(x, device=DEVICE) for x in ([1, 2, 3, 4, 0], [0, 17, 39, 16, 0], [1, 2, 3, 4, 7])
    )
    for flags in ([True, True, False, True, False], [False, False, True, True, False], [False] * 5):
        leaving = torch.tensor(flags, device=DEVICE)
        wanted = paged.copied_planes(pool, slots, positions, depths, leaving)
        copy_planes(pool, slots, positions, depths, leaving, 4)  # type: ignore[arg-type]
        assert torch.equal(pool.data, wanted)


@pytest.mark.parametrize("layout", ["last-exited", "ragged"])
def test_an_engine_gives_the_reference_tokens(layout: str) -> None:
    """The whole engine in float64 on these kernels, pages poisoned: the reference decoder's tokens and depths."""
    if DEVICE == "cuda":
        pytest.skip("the micro model of the harness is on the CPU")
    engine = make_engine("ouro", layout=layout, gate="ouro", backend="triton")
    work = prompts()[:2]
    for number, prompt in enumerate(work):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    outputs: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
    for number, prompt in enumerate(work):
        done = completion(outputs[str(number)], prompt)
        assert (done.token_ids, done.depths) == reference("ouro", layout, "ouro", prompt, 3)


def test_checks() -> None:
    BACKEND.check(16, 96, torch.float32, DEVICE)
    with pytest.raises(LoopedError, match="needs an NVIDIA GPU"):
        BACKEND.check(16, 96, torch.float32, "mps")
    with pytest.raises(LoopedError, match="head_dim up to 256, got 320"):
        BACKEND.check(16, 320, torch.float32, DEVICE)
    with pytest.raises(LoopedError, match="got int8"):
        BACKEND.check(16, 96, torch.int8, DEVICE)
    assert "\n" not in BACKEND.describe() and BACKEND.describe().startswith("triton (")


def run_python(code: str) -> str:
    """What `code` prints in an interpreter of its own, where Triton compiles."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(DEVICE == "cuda", reason="is about machines without a GPU")
def test_import_needs_no_gpu_and_cpus_are_refused() -> None:
    out = run_python(
        "import torch\n"
        "from looped.errors import LoopedError\n"
        "from looped.infer.backends.triton import TritonBackend\n"
        "try: TritonBackend().check(16, 64, torch.float32, 'cpu')\n"
        "except LoopedError as error: print(error)\n"
    )
    assert "use backend 'sdpa'" in out


def test_missing_triton_says_what_to_install() -> None:
    out = run_python(
        "import sys; sys.modules['triton'] = None\n"
        "from looped.errors import LoopedError\n"
        "try: import looped.infer.backends.triton\n"
        "except LoopedError as error: print(error)\n"
    )
    assert "pip install triton" in out
