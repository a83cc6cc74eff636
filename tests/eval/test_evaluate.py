"""Scores: the library's filters and metric on known answers, and the depths beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from looped.errors import LoopedError
from looped.eval import EvalResult, Setting, evaluate
from looped.eval.evaluate import make_llm, score
from looped.infer import Completion, SamplingParams
from looped.model import LoopedLM

pytest.importorskip("lm_eval")
from looped.eval.harness_task import load_task


class Scripted:
    """An engine that gives prepared answers: `texts` and `depths` by request."""

    def __init__(self, model: LoopedLM, texts: Sequence[str], depths: Sequence[list[int]]) -> None:
        self.model, self.texts, self.depths = model, texts, depths
        self.engine = make_llm(model, Setting(), "refill", 1, 0).engine
        self.calls: list[int] = []

    def generate(self, prompts: Any, params: Sequence[SamplingParams], show: bool = False) -> list[Completion]:
        self.calls.append(len(prompts))
        rows = zip(self.texts, self.depths, prompts, strict=True)
        return [Completion(text, [5] * len(depths), depths, "stop", ids) for text, depths, ids in rows]


def scored(model: LoopedLM, data: Path, texts: Sequence[str], depths: Sequence[list[int]] | None = None) -> EvalResult:
    llm: Any = Scripted(model, texts, depths or [[4, 2]] * len(texts))
    result = score(llm, load_task("gsm8k", data), Setting(kv="ragged"))
    assert result is not None
    assert llm.calls == [len(texts)]  # all requests of the task in one call
    return result


def test_filters_and_metric(model: LoopedLM, jsonl: Callable[..., Path]) -> None:
    texts = [
        " 3 + 4 = 7. The answer is 7.",  # both
        " Two cost $3,000.",  # flexible reads the last number, but "3,000." needs its dot removed: both sides drop it
        " The answer is 60. Q: What is 5 + 5?\nA: The answer is 10.",  # run-on, cut at the stop string
    ]
    result = scored(model, jsonl(), texts)
    assert [sample.strict for sample in result.samples] == [True, False, True]
    assert [sample.flexible for sample in result.samples] == [True, True, True]
    assert result.strict.value == pytest.approx(2 / 3)
    assert result.strict.stderr == pytest.approx(math.sqrt(2 / 9 * 3 / 2 / 3))  # sample deviation over sqrt(n)
    assert (result.flexible.value, result.flexible.stderr) == (1.0, 0.0)
    assert result.samples[2].answer.text == " The answer is 60. "
    assert result.samples[1].target == "3,000"


def test_strict_match_needs_the_sentence_to_end(model: LoopedLM, jsonl: Callable[..., Path]) -> None:
    """The library's pattern takes one character behind the number; without one it takes the last digit."""
    result = scored(model, jsonl(), [" The answer is 7", " The answer is 3000", " The answer is 60"])
    assert [sample.strict for sample in result.samples] == [False, False, False]
    assert [sample.flexible for sample in result.samples] == [True, True, True]


@pytest.mark.parametrize("name", ["wordmath", "wordmath-heldout", "wordmath-drills"])
def test_the_gold_chains_of_an_embedded_set_score_all(model: LoopedLM, name: str) -> None:
    loaded = load_task(name)
    texts = []
    for doc in loaded.task.eval_docs:
        chain, _, answer = doc["answer"].rpartition("####")
        texts.append(f" {chain.strip()} The answer is {answer.strip()}.".replace("  ", " "))
    llm: Any = Scripted(model, texts, [[4]] * len(texts))
    result = score(llm, loaded, Setting())
    assert result is not None
    assert (result.n, result.strict.value, result.flexible.value) == (500, 1.0, 1.0)
    assert math.isnan(result.mean_depth)  # the prefill's tokens alone


def test_depths_are_those_of_decode_tokens(model: LoopedLM, jsonl: Callable[..., Path]) -> None:
    result = scored(model, jsonl(), ["7", "8", "9"], [[4, 1, 1, 3], [4], [4, 2]])
    assert result.depth_histogram == (2, 1, 1, 0)
    assert result.mean_depth == pytest.approx((1 + 1 + 3 + 2) / 4)
    assert result.num_tokens == 7


def test_evaluate_runs_the_engine(model: LoopedLM) -> None:
    setting = Setting(kv="ragged", gate="ouro", threshold=0.6)
    result = evaluate(model, "wordmath", setting, limit=3, max_gen_toks=6, max_num_seqs=2)
    assert (result.n, result.task, result.label) == (3, "wordmath", "ragged gate=ouro q=0.6")
    assert sum(result.depth_histogram) == 3 * 5
    assert 1 <= result.mean_depth < 4
    assert result.tok_s > 0
    assert result.num_unfinished == 3
    again = evaluate(model, load_task("wordmath", max_gen_toks=6), setting, limit=3, max_num_seqs=1)
    assert again.samples == result.samples


def test_cb_and_dense_run_all_loops(model: LoopedLM) -> None:
    loaded = load_task("wordmath", max_gen_toks=4)
    whole = evaluate(model, loaded, Setting("ragged", gate="ouro", threshold=0.6), limit=2, mode="cb")
    assert whole.mean_depth == 4.0
    dense = evaluate(model, loaded, Setting("depth", gate="ouro", threshold=0.6), limit=2)
    assert dense.dense_compute
    assert dense.mean_depth < 4.0


def test_what_cannot_run_is_refused(model: LoopedLM) -> None:
    with pytest.raises(LoopedError, match="did you mean 'ragged'"):
        evaluate(model, "wordmath", Setting("raged"), limit=1)
    with pytest.raises(LoopedError, match="limit must be at least 1"):
        evaluate(model, "wordmath", limit=0)
    with pytest.raises(LoopedError, match="must also hold a prompt"):
        evaluate(model, "wordmath", limit=1, max_gen_toks=1200)
