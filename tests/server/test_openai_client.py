"""The official client against a live server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from looped import LLM, SamplingParams
from looped.gates import native_gate
from looped.model import load
from tests.server.conftest import CONTEXT, Running

MODEL = "micro"
ASK: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> LLM:
    """The same checkpoint, gate and dtype as the server's, without a server."""
    model = load(checkpoint, device="cpu", dtype="float64")
    return LLM(model, gate=native_gate(model))


def test_models(client: OpenAI) -> None:
    (listed,) = client.models.list().data
    assert listed.id == MODEL
    assert listed.owned_by == "looped"
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_equals_offline(client: OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=11)
    (expected,) = offline.generate("Q: 2 + 3", params)
    got = client.completions.create(model=MODEL, prompt="Q: 2 + 3", temperature=0.8, max_tokens=24, seed=11)
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.exit_depths == expected.depths  # type: ignore[attr-defined]
    assert len(set(expected.depths)) > 1
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (8, len(expected.token_ids))
    mean = sum(expected.depths[1:]) / len(expected.depths[1:])
    assert got.usage.mean_depth == pytest.approx(mean, abs=1e-4)  # type: ignore[attr-defined]


def test_default_max_tokens(client: OpenAI) -> None:
    got = client.completions.create(model=MODEL, prompt="abc", temperature=0, extra_body={"ignore_eos": True})
    assert got.usage is not None
    assert got.usage.completion_tokens == 16
    assert got.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, extra_body={"ignore_eos": True})
    assert chat.usage is not None
    assert chat.usage.total_tokens == CONTEXT


def test_max_tokens_is_clamped_to_the_context(client: OpenAI) -> None:
    body = {"ignore_eos": True}
    got = client.completions.create(model=MODEL, prompt="a" * 120, max_tokens=500, temperature=0, extra_body=body)
    assert got.usage is not None
    assert got.usage.completion_tokens == CONTEXT - 120


def test_stream_equals_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Tom has", "max_tokens": 40, "seed": 5}
    body = {"return_token_ids": True}
    whole = client.completions.create(**ask, extra_body=body)
    options = {"include_usage": True}
    chunks = list(client.completions.create(**ask, stream=True, stream_options=options, extra_body=body))  # type: ignore[call-overload]
    *pieces, last = chunks
    choices = [piece.choices[0] for piece in pieces]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [d for choice in choices for d in choice.exit_depths] == whole.choices[0].exit_depths  # type: ignore[attr-defined]
    assert [t for choice in choices for t in choice.token_ids] == whole.choices[0].token_ids  # type: ignore[attr-defined]
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(piece.usage is None for piece in pieces)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_chat_stream_equals_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_completion_tokens": 30, "seed": 9}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [d for chunk in chunks for d in chunk.choices[0].exit_depths] == whole.choices[0].exit_depths
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_uses_the_template(client: OpenAI, offline: LLM) -> None:
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n<|im_start|>assistant\n"
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    got = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    (expected,) = offline.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_prompt_forms(client: OpenAI) -> None:
    ids = [3 + i for i in range(9)]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    by_ids = client.completions.create(prompt=ids, **ask)
    by_lists = client.completions.create(prompt=[ids, ids[:4]], **ask)
    texts = client.completions.create(prompt=["one", "two", "three"], **ask)
    assert by_lists.choices[0].text == by_ids.choices[0].text
    assert [choice.index for choice in by_lists.choices] == [0, 1]
    assert by_lists.usage is not None
    assert by_lists.usage.prompt_tokens == 13
    assert [choice.index for choice in texts.choices] == [0, 1, 2]
    assert texts.choices[1].text == client.completions.create(prompt="two", **ask).choices[0].text


def test_samples_have_seeds_of_their_own(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["ab", "cd"], "max_tokens": 12, "n": 3, "seed": 4}
    first = client.completions.create(**ask)
    again = client.completions.create(**ask)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert texts == [choice.text for choice in again.choices]
    alone = client.completions.create(model=MODEL, prompt="cd", max_tokens=12, seed=4)
    assert alone.choices[0].text == texts[3]
    assert first.usage is not None
    assert first.usage.prompt_tokens == 4


def test_without_a_seed_every_request_differs(client: OpenAI) -> None:
    texts = {client.completions.create(model=MODEL, prompt="ab", max_tokens=12).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_depth_options(client: OpenAI) -> None:
    def depths(**body: Any) -> list[int]:
        got = client.completions.create(
            model=MODEL, prompt="abc", max_tokens=10, temperature=0, extra_body={"ignore_eos": True, **body}
        )
        return list(got.choices[0].exit_depths)  # type: ignore[attr-defined]

    assert depths(exit_threshold=1.0) == [4] * 10
    assert depths(exit_threshold=0.0) == [4] + [1] * 9
    assert depths(exit_threshold=0.0, min_depth=2) == [4] + [2] * 9
    assert depths(exit_threshold=1.0, max_depth=3) == [4] + [3] * 9


def test_stop_strings_across_tokens(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "xyz", "max_tokens": 30, "seed": 2}
    text = client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[12:15]
    expected = text[: text.index(stop)]
    got = client.completions.create(**ask, stop=stop, extra_body={"ignore_eos": True}).choices[0]
    assert (got.text, got.finish_reason) == (expected, "stop")
    many = ["no such text", *(f"nor {i}" for i in range(6)), stop]
    pieces = list(client.completions.create(**ask, stop=many, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_stop_token_ids(client: OpenAI) -> None:
    body = {"ignore_eos": True, "return_token_ids": True}
    ask: dict[str, Any] = {"model": MODEL, "prompt": "xyz", "max_tokens": 20, "temperature": 0}
    ids = client.completions.create(**ask, extra_body=body).choices[0].token_ids  # type: ignore[attr-defined]
    got = client.completions.create(**ask, extra_body={**body, "stop_token_ids": [ids[5]]}).choices[0]
    assert got.finish_reason == "stop"
    assert got.token_ids == ids[: ids.index(ids[5]) + 1]  # type: ignore[attr-defined]


def test_characters_come_whole(client: OpenAI, live: Running) -> None:
    """A character of several tokens comes in one piece; joined, the pieces are the text of all ids."""
    tokenizer = live.thread.info.tokenizer
    assert tokenizer is not None
    body = {"ignore_eos": True, "return_token_ids": True}
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": "ab",
        "max_tokens": 60,
        "seed": 0,
        "temperature": 2,
        "stream": True,
    }
    pieces = [chunk.choices[0] for chunk in client.completions.create(**ask, extra_body=body)]
    ids = [token for piece in pieces for token in piece.token_ids]
    assert len(ids) == 60
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    whole = [piece for piece in pieces if any(ord(c) > 127 and c != "\ufffd" for c in piece.text)]
    assert len(whole) == 4
    assert all(len(piece.token_ids) == len(piece.exit_depths) for piece in pieces)
    assert all(len(piece.token_ids) > 1 for piece in whole)


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": "a" * CONTEXT}, openai.BadRequestError, "prompt"),
        ({"prompt": [1, 9999]}, openai.BadRequestError, "prompt"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"n": 129}, openai.BadRequestError, "n"),
        ({"n": 2, "best_of": 3}, openai.BadRequestError, "best_of"),
        ({"top_p": 0}, openai.BadRequestError, "top_p"),
        ({"top_p": 1.1}, openai.BadRequestError, "top_p"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"logprobs": True}, openai.BadRequestError, "logprobs"),
        ({"presence_penalty": 2.5}, openai.BadRequestError, "presence_penalty"),
        ({"frequency_penalty": -2.5}, openai.BadRequestError, "frequency_penalty"),
        ({"echo": True}, openai.BadRequestError, "echo"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"logit_bias": {"999": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, openai.BadRequestError, "logit_bias"),
        ({"stop": ["a", ""]}, openai.BadRequestError, "stop"),
        ({"extra_body": {"exit_threshold": 1.5}}, openai.BadRequestError, "exit_threshold"),
        ({"extra_body": {"max_depth": 5}}, openai.BadRequestError, "max_depth"),
        ({"extra_body": {"min_depth": 3, "max_depth": 2}}, openai.BadRequestError, "min_depth"),
        ({"extra_body": {"kv": "shared"}}, openai.BadRequestError, "kv"),
        ({"extra_body": {"top_k": -2}}, openai.BadRequestError, "top_k"),
        ({"extra_body": {"min_p": 1.5}}, openai.BadRequestError, "min_p"),
        ({"extra_body": {"repetition_penalty": 0}}, openai.BadRequestError, "repetition_penalty"),
        ({"extra_body": {"min_tokens": 17}}, openai.BadRequestError, "min_tokens"),
        ({"extra_body": {"stop_token_ids": list(range(65))}}, openai.BadRequestError, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [999]}}, openai.BadRequestError, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    client: OpenAI, changes: dict[str, Any], error: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(error) as refused:
        client.completions.create(**({"model": MODEL, "prompt": "abc", "stream": stream} | changes))
    assert refused.value.param == param
    assert param in refused.value.message
    if changes.get("prompt") == "a" * CONTEXT:
        assert refused.value.code == "context_length_exceeded"


def test_neutral_values_are_accepted(client: OpenAI) -> None:
    extra = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "best_of": 1, "some_new_field": 7}
    extra |= dict.fromkeys(("logprobs", "prompt_logprobs", "allowed_token_ids"))
    got = client.completions.create(
        model=MODEL,
        prompt="abc",
        max_tokens=2,
        top_p=1.0,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        echo=False,
        user="someone",
        extra_body=extra,
    )
    assert got.choices[0].logprobs is None
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=2, logprobs=False, response_format={"type": "text"}
    )
    assert chat.choices[0].message.role == "assistant"


SAMPLED: dict[str, Any] = {
    "temperature": 1.3,
    "top_p": 0.4,
    "top_k": 9,
    "min_p": 0.2,
    "repetition_penalty": 1.9,
    "presence_penalty": 2.0,
    "frequency_penalty": 1.5,
    "min_tokens": 5,
    "seed": 21,
}
EXTRA = ("top_k", "min_p", "repetition_penalty", "min_tokens")


def test_sampling_parameters_equal_offline(client: OpenAI, offline: LLM) -> None:
    """Each parameter alone and all together reach the draw."""
    bias = {65: 5.0, 70: -100.0}
    cases: list[dict[str, Any]] = [{"temperature": 1.3, "seed": 21, name: SAMPLED[name]} for name in SAMPLED]
    texts = set()
    for case in [*cases, {"temperature": 1.3, "seed": 21, "logit_bias": bias}, SAMPLED | {"logit_bias": bias}]:
        (expected,) = offline.generate("Q: 2 + 3", SamplingParams(max_tokens=20, **case))
        body = {name: value for name, value in case.items() if name in EXTRA}
        plain = {name: value for name, value in case.items() if name not in (*EXTRA, "logit_bias")}
        if "logit_bias" in case:
            plain["logit_bias"] = {str(token): value for token, value in bias.items()}
        ask: dict[str, Any] = {"model": MODEL, "prompt": "Q: 2 + 3", "max_tokens": 20, **plain, "extra_body": body}
        assert client.completions.create(**ask).choices[0].text == expected.text
        texts.add(expected.text)
    assert len(texts) > 5


def test_completion_logprobs(client: OpenAI, offline: LLM, live: Running) -> None:
    (expected,) = offline.generate("Q: 2 + 3", SamplingParams(0.9, 12, seed=8, logprobs=3))
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Q: 2 + 3", "temperature": 0.9, "max_tokens": 12, "seed": 8}
    got = client.completions.create(**ask, logprobs=3).choices[0].logprobs
    tokenizer = live.thread.info.tokenizer
    assert got is not None and tokenizer is not None and expected.logprobs is not None
    assert expected.top_logprobs is not None
    assert got.token_logprobs == pytest.approx(expected.logprobs)
    assert got.tokens is not None and got.top_logprobs is not None and got.text_offset is not None
    assert len(got.tokens) == len(got.top_logprobs) == len(got.text_offset) == len(expected.token_ids)
    for i, token in enumerate(expected.token_ids):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert got.tokens[i] == (f"token_id:{token}" if text == "\ufffd" else text)
        assert got.text_offset[i] == i  # every token of this vocabulary has one character, or shows as one
        assert got.top_logprobs[i][got.tokens[i]] == got.token_logprobs[i]
        assert max(got.top_logprobs[i].values()) == pytest.approx(expected.top_logprobs[i][0][1])
        assert 1 <= len(got.top_logprobs[i]) <= 4
    none = client.completions.create(**ask, logprobs=0).choices[0].logprobs
    assert none is not None and none.top_logprobs is not None and none.token_logprobs == got.token_logprobs
    assert [list(top.values()) for top in none.top_logprobs] == [[value] for value in none.token_logprobs or []]
    greedy = client.completions.create(**(ask | {"temperature": 0}), logprobs=1).choices[0].logprobs
    assert greedy is not None and greedy.top_logprobs is not None and greedy.token_logprobs is not None
    assert [max(top.values()) for top in greedy.top_logprobs] == greedy.token_logprobs


def test_streamed_logprobs_add_up(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": ["Tom", "Ann"], "max_tokens": 30, "seed": 5, "n": 2}
    whole = client.completions.create(**ask, logprobs=2)
    chunks = list(client.completions.create(**ask, logprobs=2, stream=True))
    for choice in whole.choices:
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for piece in pieces if piece.logprobs for value in getattr(piece.logprobs, name)]
            assert joined == getattr(choice.logprobs, name), name


def test_chat_logprobs(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 14, "seed": 9, "logprobs": True, "n": 2}
    whole = client.chat.completions.create(**ask, top_logprobs=4)
    chunks = list(client.chat.completions.create(**ask, top_logprobs=4, stream=True))
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(choice.exit_depths)  # type: ignore[attr-defined]
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 4
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True) and entry.logprob <= values[0] < 0
            assert entry.bytes == (None if entry.token.startswith("token_id:") else list(entry.token.encode()))
        streamed = [
            entry
            for chunk in chunks
            if chunk.choices[0].index == choice.index and chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or []
        ]
        assert streamed == choice.logprobs.content
    alone = client.chat.completions.create(**(ask | {"n": 1}))
    assert alone.choices[0].logprobs is not None and alone.choices[0].logprobs.content is not None
    assert [entry.top_logprobs for entry in alone.choices[0].logprobs.content] == [[]] * len(
        alone.choices[0].logprobs.content
    )


def test_greedy_samples_are_equal(client: OpenAI) -> None:
    got = client.completions.create(model=MODEL, prompt="ab", max_tokens=6, temperature=0, n=2, best_of=2)
    assert [choice.index for choice in got.choices] == [0, 1]
    assert got.choices[0].text == got.choices[1].text


def test_min_tokens(client: OpenAI) -> None:
    """End tokens and stop strings wait; the first stop string after them ends the text."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "xyz", "max_tokens": 30, "seed": 2}
    text = client.completions.create(**ask, extra_body={"ignore_eos": True}).choices[0].text
    body = {"ignore_eos": True, "return_token_ids": True, "min_tokens": 20}
    got = client.completions.create(**ask, stop=text[1], extra_body=body).choices[0]
    assert len(got.token_ids) >= 20  # type: ignore[attr-defined]
    assert got.text.startswith(text[:2])
    bias = {"logit_bias": {"0": 100}, "extra_body": {"min_tokens": 7, "return_token_ids": True}}
    ids = client.completions.create(**ask, **bias).choices[0].token_ids  # type: ignore[arg-type, attr-defined]
    assert 0 not in ids[:7] and ids[7:] == [0]


def test_chat_refusals(client: OpenAI) -> None:
    image: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for changes, param in (
        ({"messages": image}, "messages.0.content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**({"model": MODEL, "messages": ASK} | changes))
        assert refused.value.param == param


def test_sixteen_at_once_equal_offline(live: Running, offline: LLM) -> None:
    """Twice as many requests as slots, streaming and not, in one go: nobody's tokens depend on the others."""
    prompts = [f"Question {i}: " + "x" * (5 * i % 23) for i in range(16)]
    params = [SamplingParams(temperature=0.9, max_tokens=8 + i, seed=100 + i) for i in range(16)]
    expected = offline.generate(prompts, params)

    async def ask(client: AsyncOpenAI, i: int) -> tuple[str, list[int]]:
        body: dict[str, Any] = {"prompt": prompts[i], "max_tokens": 8 + i, "temperature": 0.9, "seed": 100 + i}
        if i % 2:
            got = await client.completions.create(model=MODEL, **body)
            return got.choices[0].text, list(got.choices[0].exit_depths)  # type: ignore[attr-defined]
        text, depths = "", []
        async for chunk in await client.completions.create(model=MODEL, stream=True, **body):
            text += chunk.choices[0].text
            depths += chunk.choices[0].exit_depths  # type: ignore[attr-defined]
        return text, depths

    async def all_at_once() -> list[tuple[str, list[int]]]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    assert asyncio.run(all_at_once()) == [(one.text, one.depths) for one in expected]
