"""The flash backend without its libraries: what it refuses, and what it hands to each of them.

The libraries are replaced by plain attention over pages with their signatures, so that tables, lengths and cuts are
checked against `sdpa` on a CPU. The real ones are tested in tests/gpu.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from looped.errors import LoopedError
from looped.infer.backends import choose, flash
from looped.infer.backends.base import DecodeBatch, Piece, PrefillBatch
from looped.infer.backends.choose import choose_backend
from looped.infer.backends.flash import FlashAttention2, FlashAttention3, FlashAttention4, FlashBackend
from tests.infer.paged import padded

HEADS, KV_HEADS, DIM, PAGE, PLANES, SLOTS, BLOCKS = 4, 2, 8, 4, 3, 5, 6
CPU = torch.device("cpu")


def attention(queries, k_pages, v_pages, pages, length):
    """The last queries of a sequence over its first `length` keys: [Q, H, K]; 0 where a query has no key."""
    k, v = (x[pages.long()].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_pages, v_pages))
    hidden = torch.arange(length) > torch.arange(length - len(queries), length)[:, None]
    scores = torch.einsum("qhk,lhk->hql", queries, k) * DIM**-0.5
    return torch.einsum("hql,lhk->qhk", scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0), v)


def packed(q, k_pages, v_pages, starts, tables, lens):
    out = [attention(q[starts[i] : starts[i + 1]], k_pages, v_pages, tables[i], int(lens[i])) for i in range(len(lens))]
    return torch.cat(out)


def one_each(q, k_pages, v_pages, tables, lens):
    return torch.stack([attention(q[i], k_pages, v_pages, tables[i], int(lens[i])) for i in range(len(lens))])


def int32(*tensors):
    assert all(x.dtype == torch.int32 for x in tensors)


def fake_3(
    q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, page_table, kv_batch_idx, softmax_scale, is_causal, num_splits
):  # fmt: skip
    int32(seqused_k, kv_batch_idx, page_table)
    assert is_causal and page_table.stride(1) == 1 and softmax_scale == DIM**-0.5
    tables = page_table[kv_batch_idx.long()]
    if cu_seqlens_q is None:
        assert q.shape[1] == max_seqlen_q == 1
        return (one_each(q, k, v, tables, seqused_k),)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and num_splits == 1
    return (packed(q, k, v, cu_seqlens_q.tolist(), tables, seqused_k),)


def fake_4(q, k, v, *, cu_seqlens_q, max_seqlen_q, seqused_k, page_table, causal):
    int32(seqused_k, page_table)
    assert causal and page_table.is_contiguous()
    if cu_seqlens_q is None:
        return one_each(q, k, v, page_table, seqused_k), None
    return packed(q, k, v, cu_seqlens_q.tolist(), page_table, seqused_k), None


def fake_2_decode(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
    int32(cache_seqlens, block_table)
    return one_each(q, k_cache, v_cache, block_table, cache_seqlens)


def fake_2_varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, causal):
    int32(cu_seqlens_q, cu_seqlens_k, block_table)
    assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
    return packed(q, k, v, cu_seqlens_q.tolist(), block_table, cu_seqlens_k.diff())


def library(kind):
    fakes = {
        FlashAttention3: {"flash_attn_3_gpu": SimpleNamespace(fwd=fake_3)},
        FlashAttention4: {"flash_attn_varlen_func": fake_4},
        FlashAttention2: {"flash_attn_with_kvcache": fake_2_decode, "flash_attn_varlen_func": fake_2_varlen},
    }
    return kind(SimpleNamespace(**fakes[kind]), 9)


class TinyPool:
    """One layer of pages, every one of a sequence's own, in shuffled order; page 0 is padding."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        num_pages = (SLOTS - 1) * PLANES * BLOCKS
        pages = torch.randperm(num_pages, generator=generator).int() + 1
        self.page_size = PAGE
        self.table_SPB = torch.zeros(SLOTS, PLANES, BLOCKS, dtype=torch.int32)
        self.table_SPB[1:] = pages.view(SLOTS - 1, PLANES, BLOCKS)
        self.kv = torch.randn((num_pages + 1) * PAGE, 2, KV_HEADS, DIM, generator=generator, dtype=torch.float64)

    def layer(self, layer):
        return self.kv

    def rows(self, slots, planes, positions):
        return self.table_SPB[slots, planes, positions // PAGE].long() * PAGE + positions % PAGE


def inputs(n):
    generator = torch.Generator().manual_seed(n)
    return tuple(torch.randn(n, h, DIM, generator=generator, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS))


def expected(pool, slots, planes, positions, q):
    """Every row alone, over the pool as it is."""
    k_pages, v_pages = pool.kv.view(-1, PAGE, 2, KV_HEADS, DIM).unbind(2)
    rows = zip(slots, planes, positions, q, strict=True)
    return torch.cat([attention(x[None], k_pages, v_pages, pool.table_SPB[s, p], int(at) + 1) for s, p, at, x in rows])


@pytest.mark.parametrize("kind", flash.LIBRARIES)
def test_decode_reads_each_row_in_its_own_plane(kind):
    pool = TinyPool()
    slots, planes = torch.tensor([3, 1, 0, 4, 0, 2]), torch.tensor([2, 0, 0, 1, 0, 1])
    positions = torch.tensor([0, 13, 0, 4, 0, 7])
    q, k, v = inputs(6)
    attend = FlashBackend(library(kind)).decode(pool, DecodeBatch(slots, planes, positions, 15))
    out = attend(0, q, k, v)
    real = slots > 0  # padding rows share a place, so which of them it holds is open
    assert torch.equal(pool.kv[pool.rows(slots, planes, positions)][real], torch.stack((k, v), 1)[real])
    torch.testing.assert_close(out[real], expected(pool, slots, planes, positions, q)[real])
    assert out.isfinite().all()


@pytest.mark.parametrize("size", [0, 13, 20])
@pytest.mark.parametrize("kind", flash.LIBRARIES)
def test_pieces_of_prompts_attend_to_what_lies_before_them(kind, size):
    pool, backend = TinyPool(), FlashBackend(library(kind))
    pieces = (Piece(2, 0, 5, 0, 5), Piece(1, 5, 6, 9, 10), Piece(4, 6, 13, 8, 15))
    slots = torch.tensor([p.slot for p in pieces for _ in range(p.start, p.stop)])
    positions = torch.tensor([at for p in pieces for at in range(p.first, p.end)])
    batch = PrefillBatch.of(slots, positions, pieces)
    if size:
        batch = padded(batch, size, 6, PAGE * BLOCKS)
    for plane in range(PLANES):
        q, k, v = inputs(max(size, 13))
        out = backend.prefill(pool, batch, plane)(0, q, k, v)
        planes = torch.full_like(slots, plane)
        assert torch.equal(pool.kv[pool.rows(slots, planes, positions)], torch.stack((k, v), 1)[:13])
        torch.testing.assert_close(out[:13], expected(pool, slots, planes, positions, q[:13]))
        assert out.isfinite().all()


def test_pieces_with_holes_go_to_the_backend_that_knows_them(monkeypatch):
    asked = []
    kernels = SimpleNamespace(prefill=lambda pool, batch, plane: asked.append((batch, plane)))
    backend = FlashBackend(library(FlashAttention3))
    monkeypatch.setattr(backend, "_holed", kernels)
    batch = PrefillBatch.of(torch.tensor([1, 1]), torch.tensor([0, 3]), (Piece(1, 0, 2, 0, 4),))
    backend.prefill(TinyPool(), batch, 2)
    assert asked == [(batch, 2)]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (FlashAttention3, (16, 64, torch.bfloat16, "cpu"), "needs an NVIDIA GPU and the model is on 'cpu'"),
        (FlashAttention3, (16, 64, torch.float32, "cuda"), "the model is float32; load it in bfloat16"),
        (FlashAttention3, (16, 100, torch.bfloat16, "cuda"), "multiples of 8 up to 256, and the model's is 100"),
        (FlashAttention4, (1, 264, torch.float16, "cuda"), "FlashAttention-4 serves head dims"),
        (FlashAttention2, (16, 64, torch.float16, "cuda"), "pages of a multiple of 256 tokens, and page_size is 16"),
    ],
)
def test_what_a_library_does_not_serve_is_refused(kind, arguments, words):
    with pytest.raises(LoopedError, match=words):
        FlashBackend(library(kind)).check(*arguments)


@pytest.mark.parametrize("kind", flash.LIBRARIES)
def test_what_a_library_serves_passes(kind):
    backend = FlashBackend(library(kind))
    for head_dim in (64, 96, 128, 256):
        backend.check(256, head_dim, torch.bfloat16, "cuda")
    assert backend.describe().startswith(f"flash ({kind.title}, {kind.package}")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    return monkeypatch


def module(name, **functions):
    made = ModuleType(name)
    vars(made).update(functions)
    return made


def test_the_best_library_that_imports_is_taken(hopper):
    with pytest.raises(LoopedError, match=r"install looped\[fa3\] .* or looped\[gpu\]"):
        FlashBackend()
    hopper.setitem(sys.modules, "flash_attn", module("flash_attn", flash_attn_with_kvcache=fake_2_decode))
    assert isinstance(FlashBackend().library, FlashAttention2)
    hopper.setitem(sys.modules, "flash_attn.cute", module("flash_attn.cute", flash_attn_varlen_func=fake_4))
    assert isinstance(FlashBackend().library, FlashAttention4)
    hopper.setitem(sys.modules, "flash_attn_interface", module("flash_attn_interface", flash_attn_3_gpu=fake_3))
    assert isinstance(FlashBackend().library, FlashAttention3)
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    blackwell = FlashBackend().library
    assert isinstance(blackwell, FlashAttention4) and blackwell.max_head_dim == 128


def test_an_empty_package_is_no_library(hopper):
    hopper.setitem(sys.modules, "flash_attn", module("flash_attn"))
    with pytest.raises(LoopedError, match="needs a FlashAttention library"):
        FlashBackend()


def test_without_a_gpu_no_library_is_looked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoopedError, match="needs an NVIDIA GPU"):
        FlashBackend()


def test_auto_on_a_cpu_is_sdpa():
    choice = choose_backend("auto", (16,), 8, torch.float32, CPU)
    assert choice.backend.name == "sdpa" and choice.describe().startswith("sdpa")


def test_a_backend_asked_for_by_name_never_falls_back(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoopedError, match="backend 'flash' needs an NVIDIA GPU"):
        choose_backend("flash", (16,), 64, torch.bfloat16, CPU)
    with pytest.raises(LoopedError, match="unknown backend 'falsh'; did you mean 'flash'"):
        choose_backend("falsh", (16,), 64, torch.bfloat16, CPU)


@pytest.fixture
def triton(monkeypatch):
    """A Triton backend that serves everything, whether the package is installed or not."""
    backend = SimpleNamespace(
        name="triton", check=lambda *_: None, decode="decode", prefill="prefill", describe=lambda: "triton"
    )
    monkeypatch.setitem(choose._MAKERS, "triton", lambda: backend)


CUDA = torch.device("cuda")


def test_auto_decodes_on_triton_and_prefills_on_flash(hopper, triton):
    hopper.setitem(sys.modules, "flash_attn_interface", module("flash_attn_interface", flash_attn_3_gpu=fake_3))
    choice = choose_backend("auto", (16,), 64, torch.bfloat16, CUDA)
    assert choice.backend.decode == "decode" and choice.backend.prefill != "prefill"
    assert choice.describe().startswith("decode triton, prefill flash (FlashAttention-3")
    assert "not chosen" not in choice.describe()
    assert choose_backend("flash", (16,), 64, torch.bfloat16, CUDA).backend.name == "flash"


def test_auto_says_what_kept_it_from_faster_ones(hopper, triton):
    hopper.setitem(sys.modules, "flash_attn", module("flash_attn", flash_attn_with_kvcache=fake_2_decode))
    choice = choose_backend("auto", (16, 16), 64, torch.bfloat16, CUDA)
    assert choice.backend.name == "triton"
    assert "not chosen: FlashAttention 2 needs pages of a multiple of 256" in choice.describe()
    assert choose_backend("auto", (256, 256), 64, torch.bfloat16, CUDA).backend.name == "triton+flash"

    def missing():
        raise LoopedError("backend 'triton' needs the package triton")

    hopper.setitem(choose._MAKERS, "triton", missing)
    choice = choose_backend("auto", (16, 16), 64, torch.bfloat16, CUDA)
    assert choice.backend.name == "sdpa" and choice.describe().count("needs the package triton") == 1
