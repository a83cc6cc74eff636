"""The engine on a GPU against the reference decoder: backends, CUDA graphs, exits modes, layouts and families.

float32 runs on `sdpa` and `triton`, half precision on `flash` and `triton`. See `judge` for what a difference is.
"""

import collections
import itertools
import re

import pytest
import torch

from looped import SamplingParams, generate
from looped.decode import PrefillSchedule
from looped.errors import LoopedError
from looped.infer import Engine, EngineOptions, Request
from looped.infer.backends.flash import find_library
from looped.infer.graphs import Graphs
from tests.gpu.judge import MARGINS, Verdict, judge
from tests.gpu.models import gate_case, gpu_model, prompts

pytestmark = pytest.mark.gpu

LAYOUTS = ("depth", "last-exited", "ragged", "shared", "first-shared", "modulo-3")
# One token, around pages of 16 and 64, and longer than a batch of prompts may be.
LENS = (1, 15, 16, 17, 33, 64, 100)
MAX_TOKENS = 12
GATES = {
    ("ouro", "sync"): "ouro",
    ("ouro", "lookahead"): "lookahead",
    ("ouro", "device"): "ouro",
    ("huginn", "sync"): "convergence",
    ("huginn", "lookahead"): "delay",
    ("huginn", "device"): "pre-loop",
}
# W, K, M and page size, by turns.
SETTINGS = (
    {"max_num_seqs": 4, "min_coda_batch": 1, "page_size": 16},
    {"max_num_seqs": 7, "min_coda_batch": 3, "page_size": 64, "max_num_batched_tokens": 128},
    {"max_num_seqs": 3, "min_coda_batch": 1, "page_size": 1, "max_num_batched_tokens": 100},
)
# Of what is judged, how much may need the margin: rounding rarely changes anything.
EXCUSED = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.15}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def grid():
    ways = [
        ("sdpa", False, torch.float32),
        ("triton", False, torch.float32),
        ("triton", True, torch.float32),
        ("triton", True, torch.float16),
        ("flash", False, torch.float16),
        ("flash", True, torch.float16),
        ("auto", True, torch.bfloat16),
    ]
    number = itertools.count()
    for family, layout, exits in itertools.product(("ouro", "huginn"), LAYOUTS, ("sync", "lookahead", "device")):
        for backend, graphs, dtype in ways:
            name = f"{family}-{layout}-{exits}-{backend}-{'graphs' if graphs else 'eager'}-{NAMES[dtype]}"
            yield pytest.param(family, layout, exits, backend, graphs, dtype, next(number), id=name)


def needs(backend):
    """Skip where the flash backend has no library."""
    if backend == "flash":
        try:
            find_library()
        except LoopedError as refusal:
            pytest.skip(str(refusal))


def run(model, params, work, **options):
    """Token ids and depths of all prompts, and the engine."""
    engine = Engine(model, EngineOptions(poison=True, **options))
    for number, prompt in enumerate(work):
        engine.add(Request(str(number), prompt, params, ordinal=number, stream=False))
    outputs = collections.defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.key].append(output)
    made = [outputs[str(number)] for number in range(len(work))]
    assert all(sequence[-1].finish_reason == "length" for sequence in made)
    return [([o.token for o in sequence], [o.depth for o in sequence]) for sequence in made], engine


def policy_of(family, dtype, layout, gate):
    case = gate_case(family, dtype, 64, gate)
    return {"gate": case.gate, "threshold": case.threshold}, {"layout": layout} | (
        {"gate": case.gate, "threshold": case.threshold} if case.gate else {}
    )


def check(model, work, made, dtype, **policy):
    verdict = Verdict()
    for prompt, (token_ids, depths) in zip(work, made, strict=True):
        verdict.add(judge(model, prompt, token_ids, depths, MARGINS[dtype], **policy))
    assert not verdict.wrong, verdict.wrong
    assert verdict.excused <= max(2, EXCUSED[dtype] * verdict.judged), verdict
    return verdict


@pytest.mark.parametrize(("family", "layout", "exits", "backend", "graphs", "dtype", "number"), list(grid()))
def test_engine_equals_reference(family, layout, exits, backend, graphs, dtype, number):
    needs(backend)
    model, work = gpu_model(family, dtype), prompts(LENS)
    chosen, policy = policy_of(family, dtype, layout, GATES[family, exits])
    settings = dict(SETTINGS[number % len(SETTINGS)])
    if layout == "ragged":
        settings["page_size"] = None
    made, engine = run(
        model, greedy(), work, kv=layout, exits=exits, backend=backend, graphs=graphs, **chosen, **settings
    )
    assert ("graphs off" in engine.describe()) != graphs
    check(model, work, made, dtype, **policy)
    depths = {depth for _, of_sequence in made for depth in of_sequence[1:]}
    assert len(depths) > 1


def greedy(max_tokens=MAX_TOKENS, **more):
    return SamplingParams(0, max_tokens, ignore_eos=True, **more)


@pytest.mark.parametrize("mode", ["cb", "no-refill"])
@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("exits", ["sync", "device"])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_other_schedulers(mode, family, exits, backend):
    needs(backend)
    dtype = torch.float16
    model, work = gpu_model(family, dtype), prompts(LENS)
    chosen, policy = policy_of(family, dtype, "last-exited", GATES[family, exits] if mode != "cb" else "none")
    made, _ = run(model, greedy(), work, mode=mode, kv="last-exited", exits=exits, backend=backend, **chosen)
    check(model, work, made, dtype, **policy)


@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_other_head_dims(head_dim, family, backend):
    needs(backend)
    dtype = torch.float16
    model, work = gpu_model(family, dtype, head_dim), prompts(LENS)
    options = {"kv": "ragged" if family == "ouro" else "shared", "exits": "device", "backend": backend}
    made, _ = run(model, greedy(), work, max_num_seqs=8, **options)
    check(model, work, made, dtype, layout=options["kv"])


@pytest.mark.parametrize("layout", ["last-exited", "ragged", "shared"])
@pytest.mark.parametrize("exits", ["sync", "lookahead"])
@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.float32), ("auto", torch.bfloat16)], ids=str)
def test_graphs_change_nothing_to_the_bit(layout, exits, backend, dtype):
    """The same launches in the same order: here a graph has no margin."""
    model, work = gpu_model("ouro", dtype), prompts(LENS)
    chosen, _ = policy_of("ouro", dtype, layout, GATES["ouro", exits])
    options = {"kv": layout, "exits": exits, "backend": backend, "max_num_seqs": 4, **chosen}
    with_graphs, engine = run(model, greedy(24), work, graphs=True, **options)
    assert re.search(r"CUDA graphs [1-9]\d* captured", engine.describe())
    without, engine = run(model, greedy(24), work, graphs=False, **options)
    assert "CUDA graphs off" in engine.describe()
    assert with_graphs == without


# Around sizes that batches are padded to, alone and together; one token.
PROMPT_LENS = (1, 16, 17, 63, 64, 65, 200, 128, 129, 2, 240, 31)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("triton", torch.float32), ("flash", torch.bfloat16), ("auto", torch.float16)]
)
def test_captured_prefills(monkeypatch, backend, dtype, family, layout):
    """Prompts of mixed lengths, in pieces behind a past, with prompts of the prefix cache among them: every body and
    every first token comes out of a graph."""
    needs(backend)
    by_rows = 64 * ((LAYOUTS.index(layout) + len(family)) % 2)
    for kind in ("triton.TritonBackend", "flash.FlashAttention3"):
        monkeypatch.setattr(f"looped.infer.backends.{kind}.by_rows", by_rows)
    model, base = gpu_model(family, dtype), prompts(PROMPT_LENS)
    work = (*base, *((*base[6][:length], 7) for length in (80, 160, 199)))
    chosen, policy = policy_of(family, dtype, layout, GATES[family, "device"])
    chunk = {"chunk_size": 48} if layout in ("shared", "first-shared", "modulo-3") else {}
    options = {"max_num_batched_tokens": 300, "max_num_seqs": 5, "min_free_slots": 1, "num_pages": 8192, **chunk}
    replayed, run_graph = collections.Counter(), Graphs.run

    def noting(self, key, stage):
        replayed[key[:2] if key[0] == "prompts" else key[0], key in self] += 1
        return run_graph(self, key, stage)

    monkeypatch.setattr(Graphs, "run", noting)
    made, engine = run(
        model, greedy(6), work, kv=layout, backend=backend, exits="device", prefix_caching=True, **options, **chosen
    )
    check(model, work, made, dtype, **policy, **chunk)
    assert engine.stats.kv.hit_tokens > 0
    bodies = {key for key, _ in replayed if key[0] == "prompts"}
    packs = engine.runner.backend.backend.pads_prefill
    assert ("prompts", "packed") in bodies or not packs
    assert (("prompts", "by rows") in bodies) == (by_rows > 0 or not packs)
    assert all(captured or (key == "loose prompts" and not packs) for key, captured in replayed), replayed


@pytest.mark.parametrize("preemption", ["offload", "recompute"])
@pytest.mark.parametrize("layout", ["last-exited", "ragged"])
@pytest.mark.parametrize("exits", ["sync", "device"])
def test_preemption(preemption, layout, exits):
    dtype = torch.float32
    model, work = gpu_model("ouro", dtype), prompts((30, 40, 20, 33, 17))
    chosen, policy = policy_of("ouro", dtype, layout, "ouro")
    pages = 4 * 100 if layout == "ragged" else 4 * 7
    options = {"page_size": None if layout == "ragged" else 16, "num_pages": pages, "max_num_seqs": 5}
    made, _ = run(
        model,
        greedy(40),
        work,
        kv=layout,
        exits=exits,
        backend="triton",
        preemption=preemption,
        **chosen,
        **options,
    )
    check(model, work, made, dtype, **policy)


@pytest.mark.parametrize("layout", ["last-exited", "ragged", "shared"])
def test_prompts_from_the_prefix_cache(layout):
    dtype = torch.float32
    model = gpu_model("ouro", dtype)
    base = prompts((70,))[0]
    work = tuple((*base[:length], 5 + length % 7) for length in (64, 69, 33, 48, 64, 20))
    chosen, policy = policy_of("ouro", dtype, layout, "ouro")
    chunk = {"chunk_size": 16} if layout == "shared" else {}
    made, _ = run(
        model, greedy(), work, kv=layout, backend="triton", prefix_caching=True, max_num_seqs=2, num_pages=4096,
        **chosen, **chunk,
    )  # fmt: skip
    check(model, work, made, dtype, **policy, **chunk)


@pytest.mark.parametrize("layout", ["last-exited", "ragged", "shared"])
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.9)])
def test_ragged_prefill_and_sampling(layout, backend, temperature, top_p):
    """Exits of prompt tokens are not in the output and draws have no margin, so sequences are compared whole: rounding
    may change one of them."""
    dtype = torch.float32
    model, work = gpu_model("ouro", dtype), prompts((5, 40, 100, 64, 17, 33))
    chosen, policy = policy_of("ouro", dtype, layout, "ouro")
    prefill = {"prefill": "ragged", "prefill_threshold": PrefillSchedule(0.7, cosine=True, protected=4)}
    params = SamplingParams(temperature, MAX_TOKENS, ignore_eos=True, seed=11, top_p=top_p)
    made, _ = run(model, params, work, kv=layout, backend=backend, exits="device", **chosen, **prefill)
    expected = [
        generate(
            model, prompt, max_new_tokens=MAX_TOKENS, sampling=params.sampling, ignore_eos=True, seed=11,
            **policy, **prefill,
        )
        for prompt in work
    ]  # fmt: skip
    same = [(e.token_ids, e.depths) == m for e, m in zip(expected, made, strict=True)]
    assert sum(same) >= len(same) - 1
