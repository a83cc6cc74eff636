"""What clients send by mistake or in bad faith: every answer is one sentence, soon, and the server goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from looped.server import middleware
from looped.server.chat import ChatTemplate
from looped.server.engine_thread import Loaded
from looped.server.errors import ApiError
from looped.server.protocol import MAX_EXTRA, MAX_MESSAGES
from tests.server.conftest import Running, running
from tests.server.fake import INFO, FakeEngine

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refused(run: Running, path: str, body: bytes | dict[str, Any], status: int = 400) -> str:
    """The sentence of a refusal."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(run.url + path, content=content, headers=JSON, timeout=30)
    assert response.status_code == status, response.text[:500]
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_it_says_why_a_body_cannot_be_read(live: Running, content: bytes, said: str) -> None:
    assert said in refused(live, COMPLETIONS, content)


@pytest.mark.parametrize("field", ["max_depth", "min_depth", "min_tokens"])
def test_a_huge_number_comes_back_short(live: Running, field: str) -> None:
    assert len(refused(live, COMPLETIONS, {"prompt": "a", "max_tokens": 2, field: 10**400})) < 150


def test_a_huge_name_comes_back_short(live: Running) -> None:
    assert len(refused(live, COMPLETIONS, {"prompt": "a", "model": "m" * 100_000}, 404)) < 250


def test_lists_have_an_end(live: Running) -> None:
    extra = {f"f{number}": 1 for number in range(MAX_EXTRA + 1)}
    assert "unknown fields" in refused(live, COMPLETIONS, {"prompt": "a"} | extra)
    assert "8192 items" in refused(live, CHAT, {"messages": [1] * (MAX_MESSAGES + 1)})
    parts = [{"type": "text", "text": "a"}] * 9000
    assert "at most 8192 text parts" in refused(live, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert "65536 characters together" in refused(live, COMPLETIONS, {"prompt": "a", "stop": ["x" * 40_000] * 2})


def test_millions_of_ids_do_not_hold_the_server_up(live: Running) -> None:
    started = time.perf_counter()
    assert "has 1000000 tokens" in refused(live, COMPLETIONS, {"prompt": [7] * 1_000_000})
    assert "between 0 and 258" in refused(live, "/detokenize", {"tokens": [7] * 999_999 + [259]})
    assert time.perf_counter() - started < 10
    for bad in (["a"], [True], [None], [-1], [1.5], [1 << 63], "a", None):
        refused(live, "/detokenize", {"tokens": bad})
    assert httpx.post(f"{live.url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_text_that_cannot_fit_is_not_cut_into_tokens(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    info = live.thread.info
    assert info.tokenizer is not None
    assert info.max_chars == len("<|endoftext|>") * info.context
    longest = "<|endoftext|>" * (info.context - 1)  # as many characters as ever fit
    body = {"prompt": longest, "max_tokens": 1, "add_special_tokens": False}
    assert httpx.post(live.url + COMPLETIONS, json=body, timeout=30).status_code == 200
    monkeypatch.setattr(info.tokenizer, "encode", lambda *_: pytest.fail("the text was encoded"))
    assert "has 1700 characters" in refused(live, COMPLETIONS, {"prompt": "a" * 1700})
    chat = {"messages": [{"role": "user", "content": "a" * 1700}]}
    assert "characters; the context of 128 tokens" in refused(live, CHAT, chat)


def test_a_template_that_fails_in_any_way_is_a_refusal() -> None:
    template = ChatTemplate(None, "m")
    for text in ("{{ 1 // 0 }}", "{{ [1][5].x.y }}", "{{ messages[0].content.nothing() }}", "{{ range(10 ** 9) }}"):
        template.text = text
        with pytest.raises(ApiError, match="refused the messages") as caught:
            template.render([{"role": "user", "content": "a"}])
        assert caught.value.status == 400


def half_a_request(run: Running) -> socket.socket:
    """A connection whose body does not come to its end."""
    address = urlsplit(run.url)
    sock = socket.create_connection((address.hostname, address.port or 0), timeout=10)
    head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 99")
    sock.sendall("\r\n".join((*head, "", "{")).encode())
    return sock


def test_a_server_that_stops_tells_whom_it_leaves() -> None:
    with running(FakeEngine().load) as run, half_a_request(run) as sock:
        time.sleep(0.1)
        run.server.should_exit = True
        assert sock.recv(4096).startswith(b"HTTP/1.1 503")


class Slow:
    """A tokenizer at work on a text of megabytes."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        self.end.wait(30)
        return [1]


def test_a_server_that_stops_waits_for_no_tokenizer() -> None:
    slow: Any = Slow()
    with running(lambda: Loaded(FakeEngine(), replace(INFO, tokenizer=slow))) as run:
        statuses: list[int] = []
        asked = threading.Thread(
            target=lambda: statuses.append(httpx.post(f"{run.url}/tokenize", json={"prompt": "a"}).status_code)
        )
        asked.start()
        assert slow.begun.wait(10)
        assert httpx.get(f"{run.url}/health").status_code == 200  # the loop goes on meanwhile
        run.server.should_exit = True
        run.serving.join(8)
        assert not run.serving.is_alive()
        asked.join(5)
        slow.end.set()
        assert statuses == [503]


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.1)
    with running(FakeEngine().load) as run:
        with half_a_request(run) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 408")
        # A stream goes on for longer: its body is there, and only its client's leaving is waited for.
        engine_time = {"prompt": [1], "max_tokens": 3}
        assert httpx.post(run.url + COMPLETIONS, json=engine_time).status_code == 200
