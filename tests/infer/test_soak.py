"""Twenty thousand short requests with random aborts on the embedded model: nothing is left behind."""

from __future__ import annotations

import gc
import random

import pytest

from looped import load
from looped.infer import Engine, EngineOptions, Request, SamplingParams
from looped.infer.scheduler import Stage
from tests.infer.harness import assert_empty

NUM_REQUESTS = 20_000
WARM_UP = 1_000
# What the allocator of the C library may keep beyond what it kept after the warm-up.
SLACK_MIB = 32


def resident_mib() -> float:
    """Host memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def drive(engine: Engine, draw: random.Random, count: int) -> dict[str, int]:
    """Keep up to 96 requests in the engine, abort every tenth somewhere on its way; how they ended."""
    ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    open_keys: list[str] = []
    added = 0
    while added < count or engine.has_work:
        while added < count and len(open_keys) < 96:
            prompt = tuple(draw.randrange(3, 400) for _ in range(draw.randrange(1, 9)))
            params = SamplingParams(temperature=draw.choice((0.0, 0.8)), max_tokens=draw.randrange(1, 5), seed=added)
            engine.add(Request(f"{count}-{added}", prompt, params, stream=False))
            open_keys.append(f"{count}-{added}")
            added += 1
        if draw.random() < 0.35 and open_keys:
            key = open_keys.pop(draw.randrange(len(open_keys)))
            assert engine.abort(key)
            ended["abort"] += 1
        for output in engine.step():
            if output.finished:
                open_keys.remove(output.key)
                ended[output.finish_reason or ""] += 1
    return ended


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exits", ["sync", "device"])
def test_soak(exits: str) -> None:
    model = load("tiny-ouro", device="cpu")
    # Room for about a third of the sequences: many are preempted.
    options = EngineOptions(
        gate="native", exits=exits, max_num_seqs=64, num_pages=1_000, max_num_batched_tokens=256, prefix_caching=True
    )
    engine, draw = Engine(model, options), random.Random(0)
    drive(engine, draw, WARM_UP)
    engine.kv.drop_cache()
    assert_empty(engine)
    gc.collect()
    before = resident_mib()
    ended = drive(engine, draw, NUM_REQUESTS)
    engine.kv.drop_cache()
    assert_empty(engine)
    engine.kv.check()
    gc.collect()
    after = resident_mib()
    stats = engine.stats
    print(f"{exits}: {ended}, {stats.preemptions} preemptions, {stats.stages[Stage.CORE].batches} core steps, ", end="")
    print(f"host memory {before:.0f} -> {after:.0f} MiB")
    assert sum(ended.values()) == NUM_REQUESTS and not ended["error"]
    assert stats.preemptions and ended["abort"] > NUM_REQUESTS / 100
    assert after - before < SLACK_MIB
