"""What no client library shows: status codes, the error shape, other endpoints, limits and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from looped import __version__
from tests.server.conftest import TEMPLATE, Running, running
from tests.server.fake import FakeEngine

ASK = {"model": "fake", "prompt": [1, 2], "max_tokens": 3}


@pytest.fixture(scope="module")
def fake() -> Iterator[Running]:
    with running(FakeEngine().load, max_body_bytes=20_000) as run:
        yield run


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which has the one shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str)
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": True}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, None),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": False}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"seed": 1 << 63}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"max_dept": 3}, "max_dept"),
        ({"exit_treshold": 0.4}, "exit_treshold"),
        ({"stop": "x"}, "stop"),  # there is no tokenizer
        ({"prompt": "text"}, "prompt"),  # nor here
        ({"prompt": [1] * 60}, "prompt"),  # inside the context, beyond the KV pool
    ],
)
def test_bad_fields_name_themselves(fake: Running, body: dict[str, Any], param: str | None) -> None:
    error = error_of(httpx.post(f"{fake.url}/v1/completions", json=ASK | body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None
    assert len(error["message"]) < 500


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'"x"', b"\xff", b"[" * 9999, b'{"prompt": "\\ud800"}'])
def test_bodies_that_are_no_request(fake: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(httpx.post(f"{fake.url}/v1/completions", content=content, headers=headers), 400)


def test_nan_is_refused(fake: Running) -> None:
    for field in ("temperature", "exit_threshold", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
        content = json.dumps(ASK | {field: float("nan")})
        headers = {"content-type": "application/json"}
        error_of(httpx.post(f"{fake.url}/v1/completions", content=content, headers=headers), 400)


def test_many_errors_are_a_short_answer(fake: Running) -> None:
    bad = {"stop_token_ids": ["x" * 50] * 60, "model": 1, "n": "a" * 5000}
    error = error_of(httpx.post(f"{fake.url}/v1/completions", json=ASK | bad), 400)
    assert "more" in error["message"]
    assert len(error["message"]) < 2000


def test_whole_numbers_as_json_means_them(fake: Running) -> None:
    answer = httpx.post(f"{fake.url}/v1/completions", json=ASK | {"max_tokens": 2.0, "prompt": [1.0, 2.0]})
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_wrong_path_method_and_type(fake: Running) -> None:
    assert error_of(httpx.get(f"{fake.url}/v1/nothing"), 404)["type"] == "not_found_error"
    response = httpx.get(f"{fake.url}/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    error_of(httpx.post(f"{fake.url}/v1/completions", content=b"x=1", headers={"content-type": "text/plain"}), 400)


def test_large_bodies(fake: Running) -> None:
    big = json.dumps(ASK | {"user": "u" * 30_000}).encode()
    headers = {"content-type": "application/json"}
    announced = httpx.post(f"{fake.url}/v1/completions", content=big, headers=headers)
    assert "20000 bytes" in error_of(announced, 413)["message"]
    pieces = (big[i : i + 4096] for i in range(0, len(big), 4096))
    error_of(httpx.post(f"{fake.url}/v1/completions", content=pieces, headers=headers), 413)


def test_no_chat_template(fake: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert error_of(httpx.post(f"{fake.url}/v1/chat/completions", json=body), 400)["code"] == "no_chat_template"


def test_events_on_the_wire(fake: Running) -> None:
    body = ASK | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    response = httpx.post(f"{fake.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert [choice["exit_depths"] for chunk in chunks for choice in chunk["choices"]] == [[2], [2], [2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["mean_depth"] == 2.0


def test_usage_of_a_single_token(fake: Running) -> None:
    """The only token came out of the prompt pass, so there is no decode depth to average."""
    usage = httpx.post(f"{fake.url}/v1/completions", json=ASK | {"max_tokens": 1}).json()["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3, "mean_depth": None}


def test_tokens_and_texts(live: Running) -> None:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = httpx.post(live.url + path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    tokens = post("/tokenize", {"prompt": "Hé<|im_end|>", "add_special_tokens": False})
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert tokens["max_model_len"] == 128
    assert post("/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Hé<|im_end|>"}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["tokens"] == post("/tokenize", {"prompt": text})["tokens"]
    error_of(httpx.post(f"{live.url}/tokenize", json={}), 400)
    error_of(httpx.post(f"{live.url}/detokenize", json={"tokens": [9999]}), 400)
    info = httpx.get(f"{live.url}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    assert info["chat_template"] == TEMPLATE


def test_version_and_health(live: Running) -> None:
    version = httpx.get(f"{live.url}/version").json()
    assert version["version"] == __version__
    assert (version["mode"], version["kv"], version["gate"], version["threshold"]) == ("refill", "ragged", "ouro", 0.6)
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}


def test_request_id_comes_back(fake: Running) -> None:
    assert httpx.get(f"{fake.url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    generated = httpx.get(f"{fake.url}/v1/nothing", headers={"x-request-id": "x" * 500}).headers["x-request-id"]
    assert 0 < len(generated) <= 64


def test_keys_and_names() -> None:
    with running(FakeEngine().load, keys=("k1", "k2"), names=("one", "two")) as run:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "k1"}, {"authorization": "Bearer"}):
            response = httpx.get(f"{run.url}/v1/models", headers=headers)
            assert error_of(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        error_of(httpx.get(f"{run.url}/v1/nothing"), 401)
        assert httpx.get(f"{run.url}/health").status_code == 200
        listed = run.client("k2").models.list().data
        assert [model.id for model in listed] == ["one", "two"]
        assert run.client("k1").completions.create(**ASK | {"model": "two"}).model == "two"  # type: ignore[call-overload]
        bearer = {"authorization": "Bearer k1"}
        error_of(httpx.post(f"{run.url}/v1/completions", json=ASK, headers=bearer), 404)


def test_openapi_describes_the_requests(fake: Running) -> None:
    schemas = httpx.get(f"{fake.url}/openapi.json").json()["components"]["schemas"]
    properties = schemas["CompletionRequest"]["properties"]
    assert {"exit_threshold", "min_depth", "max_depth", "prompt"} <= set(properties)
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
