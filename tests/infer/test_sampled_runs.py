"""Engine and reference draw the same tokens under every sampling parameter, in one batch that mixes them all."""

from __future__ import annotations

from typing import Any

import pytest

from looped import LLM, LoopedError, SamplingParams, generate
from looped.gates import DelayGate, OuroGate
from looped.infer import Completion
from looped.sampling_options import child_seed
from tests.models import micro_ouro

MODEL = micro_ouro(eos_ids=(0, 17))
PROMPTS = [[5, 9, 9, 31], [7] * 17, [1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
NEW = 24

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 2.0, "min_p": 0.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.0, "frequency_penalty": 2.0, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {3: 3.0, 17: 2.5, 8: -100.0}},
    {"temperature": 1.5, "logit_bias": {17: 8.0}, "min_tokens": 6, "stop_token_ids": (30, 31, 32)},
    {"temperature": 0.7, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 0},
]


def expected(params: SamplingParams, prompt: list[int], gate: Any, seed: int) -> Any:
    return generate(
        MODEL,
        prompt,
        gate=gate,
        threshold=None if gate is None else 0.6,
        max_new_tokens=NEW,
        ignore_eos=params.ignore_eos,
        seed=seed,
        sampling=params.sampling,
    )


def check(results: list[Completion], params: list[SamplingParams], gate: Any) -> None:
    for number, (result, each) in enumerate(zip(results, params, strict=True)):
        seed = 3 if each.seed is None else each.seed
        wanted = expected(each, result.prompt_token_ids, gate, seed)
        assert (result.token_ids, result.depths) == (wanted.token_ids, wanted.depths), number
        assert result.finish_reason == wanted.finish_reason
        assert (result.logprobs is None) == (wanted.logprobs is None) == (each.logprobs is None)
        if wanted.logprobs is not None:
            assert result.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
            assert result.top_logprobs is not None
            for found, right in zip(result.top_logprobs, wanted.top_logprobs, strict=True):
                assert len(found) == each.logprobs and [i for i, _ in found] == [i for i, _ in right]
                assert [value for _, value in found] == pytest.approx([value for _, value in right], abs=1e-9)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [SamplingParams(max_tokens=NEW, seed=number, **kind) for number, kind in enumerate(KINDS)]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
def test_every_parameter(exits: str) -> None:
    gate = DelayGate(OuroGate()) if exits == "lookahead" else "ouro"
    llm = LLM(MODEL, gate=gate, threshold=0.6, exits=exits, max_num_seqs=5, max_num_batched_tokens=16, seed=3)
    prompts, params = requests()
    check(llm.generate(prompts, params), params, gate)


@pytest.mark.parametrize("exits", ["sync", "device"])
@pytest.mark.parametrize(
    ("layout", "preemption"), [("ragged", "recompute"), ("last-exited", "recompute"), ("last-exited", "offload")]
)
def test_after_preemption(layout: str, preemption: str, exits: str) -> None:
    """Counts of a sequence that lost its slot are those of its own tokens."""
    pool = {"num_pages": 280, "page_size": 1} if layout == "ragged" else {"num_pages": 80, "page_size": 4}
    options = {"kv": layout, "gate": "ouro", "threshold": 0.6, "exits": exits, "preemption": preemption, "seed": 3}
    llm = LLM(MODEL, **options, **pool, max_num_seqs=4)
    prompts, params = requests()
    check(llm.generate(prompts, params), params, "ouro")
    assert llm.stats.preemptions > 0


def test_samples_of_a_prompt_differ_and_repeat() -> None:
    llm = LLM(MODEL, seed=3, max_num_seqs=4)
    params = SamplingParams(1.0, NEW, top_p=0.9, logprobs=1, n=5)
    results = llm.generate(PROMPTS[:2], params)
    children = [params.child(index, 3) for index in range(5)] * 2
    assert children[1].seed == child_seed(3, 1)
    check(results, children, None)
    assert len({tuple(result.token_ids) for result in results[:5]}) > 1


def test_a_biased_token_outside_the_vocabulary_is_refused() -> None:
    llm = LLM(MODEL)
    with pytest.raises(LoopedError, match="logit_bias"):
        llm.generate(PROMPTS, SamplingParams(logit_bias={61: 1.0}))
    assert not llm.engine.has_work
    with pytest.raises(LoopedError, match="logit_bias"):
        generate(MODEL, PROMPTS[0], sampling=SamplingParams(logit_bias={61: 1.0}).sampling)
    with pytest.raises(LoopedError, match="temperature in sampling"):
        generate(MODEL, PROMPTS[0], temperature=0.5, sampling=SamplingParams().sampling)
