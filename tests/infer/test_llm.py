"""The offline API, with a tokenizer of one character a token."""

import numpy as np
import pytest
import torch

from looped import LLM, LoopedError, SamplingParams, generate
from looped.sampling_options import child_seed
from tests.infer.harness import prompts, reference
from tests.models import micro_ouro


class Letters:
    """Token i is the i-th letter of a small alphabet; 0 is the end of text and shows as nothing."""

    alphabet = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ01234567"

    def encode(self, text, add_special_tokens=True):
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(self.alphabet[i] for i in token_ids if i)


@pytest.fixture(scope="module")
def model():
    model = micro_ouro()
    model._tokenizer = Letters()
    return model


def test_texts_and_ids_give_the_same(model):
    llm = LLM(model, max_num_seqs=2)
    by_text = llm.generate(["hello", "looped"], SamplingParams(0, 5))
    by_ids = llm.generate([Letters().encode("hello"), Letters().encode("looped")], SamplingParams(0, 5))
    assert [r.token_ids for r in by_text] == [r.token_ids for r in by_ids]
    assert by_text[0].prompt == "hello" and by_ids[0].prompt is None
    assert by_text[0].prompt_token_ids == Letters().encode("hello")
    assert by_text[0].text == Letters().decode(by_text[0].token_ids)
    one = llm.generate("hello", SamplingParams(0, 5))
    assert len(one) == 1 and one[0].token_ids == by_text[0].token_ids
    assert llm.generate(Letters().encode("hello"), SamplingParams(0, 5))[0].token_ids == one[0].token_ids


def test_seeded_sampling_equals_generate(model):
    llm = LLM(model, gate="ouro", threshold=0.6, seed=11)
    for result, prompt in zip(llm.generate(prompts(), SamplingParams(1.0, 6, True)), prompts(), strict=True):
        expected = generate(
            model, prompt, gate="ouro", threshold=0.6, max_new_tokens=6, temperature=1.0, ignore_eos=True, seed=11
        )
        assert (result.token_ids, result.depths) == (expected.token_ids, expected.depths)


def test_parameters_may_differ_by_prompt(model):
    params = [SamplingParams(0, 2 + i, True) for i in range(len(prompts()))]
    results = LLM(model).generate(prompts(), params)
    assert [len(result.token_ids) for result in results] == [p.max_tokens for p in params]
    with pytest.raises(LoopedError, match="5 prompts but 1 sets"):
        LLM(model).generate(prompts(), params[:1])


@pytest.mark.parametrize("exits", ["sync", "lookahead", "device"])
@pytest.mark.parametrize("coda_batch", [1, 2])
def test_stop_strings_cut_the_text(model, exits, coda_batch):
    """Nobody but the host sees them: what the device made beyond one is dropped, and the slot serves the next."""
    wanted = [reference("ouro", "ragged", "none", prompt, 12)[0] for prompt in prompts()]
    texts = [Letters().decode(token_ids) for token_ids in wanted]
    stops = [text[4:6] for text in texts]
    params = [SamplingParams(0, 12, True, stop=stop) for stop in stops]
    llm = LLM(model, exits=exits, max_num_seqs=2, min_coda_batch=coda_batch, min_free_slots=1)
    for result, text, stop, token_ids in zip(llm.generate(prompts(), params), texts, stops, wanted, strict=True):
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == token_ids[: text.index(stop) + 2]


def test_a_refused_prompt_leaves_nothing_behind(model):
    llm = LLM(model)
    with pytest.raises(LoopedError):
        llm.generate([prompts()[0], [999]], SamplingParams(0, 4))
    assert not llm.engine.has_work
    assert llm.generate([prompts()[0]], SamplingParams(0, 4, True))[0].token_ids


def test_an_interrupt_leaves_nothing_behind(model, monkeypatch):
    llm = LLM(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner.stages, "coda", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), SamplingParams(0, 4))
    monkeypatch.undo()
    results = llm.generate(prompts(), SamplingParams(0, 4, True))
    assert results[0].token_ids == reference("ouro", "ragged", "none", prompts()[0], 4)[0]


def test_nothing_to_do(model):
    assert LLM(model).generate([]) == []


def test_progress_goes_to_stderr(model, capsys):
    LLM(model).generate(prompts(), SamplingParams(0, 2), show_progress=True)
    captured = capsys.readouterr()
    assert "generate 5/5" in captured.err and captured.out == ""


def test_text_needs_a_tokenizer():
    with pytest.raises(LoopedError, match="no tokenizer"):
        LLM(micro_ouro()).generate("hello")


def test_a_loaded_model_keeps_its_dtype(model):
    with pytest.raises(LoopedError, match=r"torch\.float64"):
        LLM(model, dtype="bfloat16")
    assert LLM(model, dtype=torch.float64).model is model


def test_n_samples_of_each_prompt(model):
    llm = LLM(model, seed=4, max_num_seqs=3)
    params = SamplingParams(1.0, 5, True, n=3)
    results = llm.generate(prompts()[:2], params)
    assert [result.index for result in results] == [0, 1, 2] * 2
    assert [result.prompt_token_ids for result in results] == [list(prompts()[i]) for i in (0, 0, 0, 1, 1, 1)]
    for number, result in enumerate(results):
        expected = generate(
            model, prompts()[number // 3], max_new_tokens=5, temperature=1.0, ignore_eos=True,
            seed=child_seed(4, number % 3),
        )  # fmt: skip
        assert result.token_ids == expected.token_ids
    assert len({tuple(result.token_ids) for result in results[:3]}) == 3
    alone = llm.generate(prompts()[0], SamplingParams(1.0, 5, True))
    assert alone[0].token_ids == results[0].token_ids
    greedy = llm.generate([prompts()[0]], SamplingParams(0, 4, True, n=2))
    assert greedy[0].token_ids == greedy[1].token_ids


def test_children_of_parameters():
    params = SamplingParams(0.5, 9, seed=3, n=4, top_k=7)
    assert params.child(0) == SamplingParams(0.5, 9, seed=3, top_k=7)
    assert params.child(2).seed == child_seed(3, 2) and params.child(2).n == 1
    unseeded = SamplingParams(n=2)
    assert unseeded.child(0, 8).seed is None and unseeded.child(1, 8).seed == child_seed(8, 1)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 129}, "n must be"),
        ({"n": None}, "n must not be None"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 17}, "min_tokens 17 is above max_tokens 16"),
        ({"stop_token_ids": range(65)}, "64"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"repetition_penalty": 10**400}, "repetition_penalty must be a finite number"),
        ({"logit_bias": {1: 10**400}}, "logit_bias of token 1 must be a finite number"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
    ],
)
def test_parameters_out_of_range(params, said):
    with pytest.raises(LoopedError, match=said):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": []}, "mode must be a name"),
        ({"backend": None}, "backend must be a name"),
        ({"preemption": 3}, "preemption must be a name"),
        ({"graphs": "off"}, "graphs must be True or False"),
        ({"mix_prefill": 1}, "mix_prefill must be True or False"),
        ({"num_pages": 1 << 63}, "num_pages must be at most"),
        ({"max_num_seqs": 10**400}, "max_num_seqs must be at most"),
    ],
)
def test_options_of_the_wrong_type_or_beyond_any_memory(model, options, said):
    with pytest.raises(LoopedError, match=said):
        LLM(model, **options)


def test_whole_numbers_of_numpy_are_options(model):
    llm = LLM(model, kv="ragged", depth=np.int64(2), max_num_seqs=np.int32(2))
    assert llm.generate("hello", SamplingParams(0, 3))[0].depths == [2, 2, 2]
