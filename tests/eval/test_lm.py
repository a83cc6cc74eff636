"""The library's three calls on a random model: stops, truncation, log-likelihoods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from looped.errors import LoopedError
from looped.infer import LLM
from looped.model import LoopedLM
from tests.models import micro_ouro

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from looped.eval.lm import HarnessLM


def generation(context: str, doc_id: int = 0, **kwargs: Any) -> Instance:
    options = {"do_sample": False, "until": ["Q:"], "max_gen_toks": 16, **kwargs}
    return Instance("generate_until", {}, (context, options), 0, ("task", doc_id, 1))


def pair(context: str, continuation: str) -> Instance:
    return Instance("loglikelihood", {}, (context, continuation), 0, ("task", 0, 1))


@pytest.fixture(scope="module")
def lm(model: LoopedLM) -> HarnessLM:
    return HarnessLM(LLM(model, kv="ragged", gate="ouro", threshold=0.6, max_num_seqs=4))


def fresh(lm: HarnessLM) -> HarnessLM:
    return HarnessLM(lm.llm, depth=lm.depth)


def test_answers_are_the_reference_decoders(lm: HarnessLM, model: LoopedLM) -> None:
    import looped

    lm, prompts = fresh(lm), ["Q: How many pears?\nA:", "Q: What is 2 + 2?\nA:", "Q: Who?\nA:"]
    texts = lm.generate_until([generation(prompt, doc_id) for doc_id, prompt in enumerate(prompts)])
    assert model.tokenizer is not None
    for doc_id, prompt in enumerate(prompts):
        ids = model.tokenizer.encode(prompt)
        want = looped.generate(model, ids, layout="ragged", gate="ouro", threshold=0.6, max_new_tokens=16)
        answer = lm.answers["task", doc_id, 0]
        assert texts[doc_id] == answer.text == model.tokenizer.decode(want.token_ids)
        assert list(answer.depths) == want.depths
        assert answer.prompt_tokens == len(ids)
    assert lm.num_tokens == sum(len(answer.depths) for answer in lm.answers.values())


def test_a_stop_string_ends_the_answer_before_it(lm: HarnessLM) -> None:
    lm, prompt = fresh(lm), "Q: How many pears?\nA:"
    (whole,) = lm.generate_until([generation(prompt, 1, max_gen_toks=24)])
    stop = whole[len(whole) // 2 :][:3]
    assert len(stop) == 3
    (cut,) = lm.generate_until([generation(prompt, 2, max_gen_toks=24, until=[stop, "never"])])
    assert cut == whole[: whole.index(stop)]
    assert lm.answers["task", 2, 0].finish_reason == "stop"
    assert len(lm.answers["task", 2, 0].depths) < len(lm.answers["task", 1, 0].depths)


def test_a_special_token_among_the_stops_ends_the_answer(lm: HarnessLM, model: LoopedLM) -> None:
    """Decoding drops special tokens, so the text never shows them; the engine must stop at the id."""
    assert model.tokenizer is not None
    known = model.tokenizer.token_to_id("<|pad|>")
    assert known is not None
    ready = lm._prepare("Q: Who?\nA:", {"until": ["<|pad|>", "Q: x"], "do_sample": False}, repeat=0)
    assert ready.params.stop_token_ids == (known,)
    assert ready.params.max_tokens == 256


def test_long_prompts_lose_their_beginning(lm: HarnessLM, model: LoopedLM) -> None:
    assert model.tokenizer is not None
    context = "pear " * 2000 + "A:"
    ready = lm._prepare(context, {"until": [], "do_sample": False, "max_gen_toks": 100}, repeat=0)
    assert ready.truncated
    assert ready.prompt_ids == model.tokenizer.encode(context)[-(model.config.max_positions - 100) :]
    with pytest.raises(LoopedError, match="must also hold a prompt"):
        lm._prepare("A:", {"until": [], "max_gen_toks": model.config.max_positions}, repeat=0)


def test_generation_options_reach_the_engine(lm: HarnessLM) -> None:
    given = {"until": [], "exit_threshold": 0.9, "max_depth": 3, "do_sample": True, "temperature": 0.7}
    first, second = (lm._prepare("A:", given, repeat=repeat).params for repeat in (0, 1))
    assert (first.exit_threshold, first.max_depth, first.temperature) == (0.9, 3, 0.7)
    assert first.seed is None
    assert second.seed == 1  # repeated samples differ
    greedy = lm._prepare("A:", {"until": [], "do_sample": False, "temperature": 0.7}, repeat=1).params
    assert (greedy.temperature, greedy.seed) == (0.0, None)
    with pytest.raises(LoopedError, match="unknown generation option 'num_beams'"):
        lm._prepare("A:", {"until": [], "num_beams": 4}, repeat=0)


def direct(model: LoopedLM, ids: list[int], start: int, depth: int | None = None) -> tuple[float, bool]:
    """Log-probability of ids[start:] after ids[:start], one token at a time; and whether it is the greedy choice."""
    total, greedy = 0.0, True
    for end in range(start, len(ids)):
        logits = model.logits(torch.tensor([ids[:end]]), depth)[0, -1].float()
        total += float(logits.log_softmax(-1)[ids[end]])
        greedy &= int(logits.argmax()) == ids[end]
    return total, greedy


@pytest.mark.parametrize("depth", [None, 2])
def test_loglikelihood_equals_a_direct_computation(model: LoopedLM, depth: int | None) -> None:
    assert model.tokenizer is not None
    lm = HarnessLM(LLM(model, kv="depth", depth=depth), depth=depth)
    context = "Q: Which is larger?\nA:"
    ids = model.tokenizer.encode(context)
    best = int(model.logits(torch.tensor([ids]), depth)[0, -1].argmax())
    requests = [pair(context, " the first one"), pair(context, " two"), pair("", "Yes, it is"), pair("Or ", "so")]
    got = lm.loglikelihood(requests)
    for request, (value, is_greedy) in zip(requests, got, strict=True):
        before, after = request.args
        whole = model.tokenizer.encode(before + after)
        start = len(model.tokenizer.encode(before.rstrip()))
        if not before:
            whole, start = [0, *whole], 1  # the model's BOS is token 0
        assert (value, is_greedy) == (pytest.approx(direct(model, whole, start, depth)[0], abs=1e-5), False)
    assert lm._loglikelihood_tokens([(None, ids, [best])])[0][1] is True


def test_batches_and_shared_inputs_do_not_change_a_score(
    model: LoopedLM, lm: HarnessLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [(None, list(range(5, 5 + n)), [7, last]) for n in (3, 9, 9, 30) for last in (8, 9)]
    together = lm._loglikelihood_tokens(requests)
    monkeypatch.setattr("looped.eval.lm.MAX_LOGITS", 1)  # one row a batch
    alone = lm._loglikelihood_tokens(requests)
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], abs=1e-5)
    assert [value for value, _ in alone] == pytest.approx(
        [direct(model, [*ids, *end], len(ids))[0] for _, ids, end in requests], abs=1e-5
    )


def test_rolling_windows_predict_each_token_once(model: LoopedLM) -> None:
    """A text of 2.5 contexts: the first window starts at BOS, later ones see as much before them as fits."""
    small = micro_ouro(vocab_size=model.config.vocab_size, max_positions=16)
    small._load_tokenizer = lambda: model.tokenizer
    lm = HarnessLM(LLM(small))
    assert model.tokenizer is not None
    text = (
        "There are 15 trees in the grove. Grove workers will plant trees today, 21 of them, and then some more pears."
    )
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert 2 * 16 < len(ids) < 3 * 16
    expected = direct(small, [0, *ids[:16]], 1)[0] + direct(small, ids[15:32], 1)[0]
    expected += direct(small, ids[-17:], 17 - (len(ids) - 32))[0]
    request = Instance("loglikelihood_rolling", {}, (text,), 0, ("task", 0, 1))
    assert lm.loglikelihood_rolling([request]) == [pytest.approx(expected, abs=1e-5)]


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(LoopedError, match="has no tokenizer"):
        HarnessLM(LLM(micro_ouro()))
