"""Loading, disconnecting clients, faults of the engine, draining, signals."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from looped.errors import LoopedError
from looped.infer.request import Request
from looped.server.admission import Work
from looped.server.engine_thread import EngineThread, Loaded, State, Ticket
from looped.server.responses import CompletionShape
from looped.server.routes import _respond
from looped.server.serve import bind
from looped.server.sse import Answer
from tests.conftest import REPOSITORY, Ran
from tests.server.conftest import running, write_tokenizer
from tests.server.fake import FakeEngine
from tests.server.test_http import ASK, error_of

LONG = ASK | {"max_tokens": 40}


def events(text: str) -> list[Any]:
    """The events of a stream, which ends in [DONE]."""
    *chunks, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_unavailable_until_loaded() -> None:
    go, engine = threading.Event(), FakeEngine()

    def load() -> Loaded:
        go.wait(10)
        return engine.load()

    with running(load, wait=False) as run:
        response = httpx.get(f"{run.url}/health", timeout=10)
        assert "loading" in error_of(response, 503)["message"]
        assert response.headers["retry-after"] == "1"
        error_of(httpx.get(f"{run.url}/v1/models"), 503)
        error_of(httpx.post(f"{run.url}/v1/completions", json=ASK), 503)
        go.set()
        run.until(lambda: httpx.get(f"{run.url}/health").status_code == 200)
        assert httpx.post(f"{run.url}/v1/completions", json=ASK).json()["choices"][0]["text"] == "xxx"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    engine = FakeEngine()
    engine.pace.clear()
    with running(engine.load) as run:
        body = json.dumps(LONG | {"stream": stream, "n": 2}).encode()
        with socket.create_connection(("127.0.0.1", int(run.url.rsplit(":", 1)[1]))) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            run.until(lambda: len(engine.running) == 2)
        run.until(lambda: len(engine.aborted) == 2)
        run.until(lambda: run.thread.num_open == 0)
        assert not engine.running
        engine.pace.set()
        assert run.client().completions.create(**ASK).choices[0].text == "xxx"  # type: ignore[call-overload]


def test_a_client_that_leaves_before_the_first_event_aborts_its_request() -> None:
    thread = EngineThread(FakeEngine().load)
    ticket = Ticket(thread, ["a"])
    thread._tickets["a"] = ticket

    async def admitted() -> Answer:
        return Answer(ticket, Work((Request("a", (1,)),), 1), CompletionShape("a", 0, "fake"))

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.sleep(1)

    async def serve() -> None:
        response = await _respond(None, admitted(), True)  # type: ignore[arg-type]
        await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)  # type: ignore[arg-type]

    asyncio.run(serve())
    assert not ticket.open and thread.num_open == 0


def test_a_thread_that_was_stopped_while_loading_ends_when_it_has_loaded() -> None:
    go = threading.Event()

    def load() -> Loaded:
        go.wait(10)
        return FakeEngine().load()

    thread, loop = EngineThread(load), asyncio.new_event_loop()
    thread.start(loop)
    thread.stop(timeout=0.05)
    assert thread.alive
    go.set()
    thread._thread.join(5)
    assert not thread.alive
    loop.close()


def test_a_failing_stage_ends_its_requests_alone() -> None:
    engine = FakeEngine()

    def once() -> None:
        if engine.num_steps == 2:
            raise RuntimeError("secret detail")

    engine.fault = once
    with running(engine.load) as run:
        stream = httpx.post(f"{run.url}/v1/completions", json=LONG | {"stream": True})
        assert stream.status_code == 200
        *chunks, last = events(stream.text)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["x"]
        assert last["error"]["type"] == "server_error"
        assert "secret" not in stream.text
        assert httpx.get(f"{run.url}/health").status_code == 200
        engine.num_steps = 1
        assert "secret" not in error_of(httpx.post(f"{run.url}/v1/completions", json=LONG), 500)["message"]
        engine.num_steps = 0
        with pytest.raises(openai.APIError):
            list(run.client().completions.create(**LONG, stream=True))  # type: ignore[call-overload]
        assert httpx.post(f"{run.url}/v1/completions", json=ASK).status_code == 200


def test_a_dead_engine_fails_its_requests_and_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looped.server.lifetime.DEATH_SECONDS", 0.5)
    engine = FakeEngine()

    def die() -> None:
        if engine.num_steps > 2:
            raise SystemExit

    engine.fault = die
    with running(engine.load) as run:
        stream = httpx.post(f"{run.url}/v1/completions", json=LONG | {"stream": True})
        assert events(stream.text)[-1]["error"]["type"] == "server_error"
        assert "died" in error_of(httpx.get(f"{run.url}/health"), 503)["message"]
        error_of(httpx.post(f"{run.url}/v1/completions", json=ASK), 503)
        assert run.thread.state is State.DEAD
        run.serving.join(10)  # it ends by itself a little later
        assert not run.serving.is_alive()


def test_health_sees_a_stuck_engine() -> None:
    engine, stuck = FakeEngine(), threading.Event()

    def wait() -> None:
        stuck.wait(10)

    engine.fault = wait
    with running(engine.load, stall_seconds=0.2) as run:
        with httpx.stream("POST", f"{run.url}/v1/completions", json=LONG | {"stream": True}) as stream:
            run.until(lambda: httpx.get(f"{run.url}/health").status_code == 503)
            assert "no progress" in httpx.get(f"{run.url}/health").json()["error"]["message"]
            stuck.set()
            stream.read()
        assert httpx.get(f"{run.url}/health").status_code == 200


def test_draining_lets_running_requests_finish() -> None:
    engine = FakeEngine()
    engine.pace.clear()
    with (
        running(engine.load) as run,
        httpx.stream("POST", f"{run.url}/v1/completions", json=LONG | {"stream": True}) as s,
    ):
        run.until(lambda: engine.num_steps > 1)
        run.on_loop(run.server.begin_drain)
        run.until(lambda: run.thread.state is State.DRAINING)
        error_of(httpx.get(f"{run.url}/health"), 503)
        error_of(httpx.post(f"{run.url}/v1/completions", json=ASK), 503)
        engine.pace.set()
        s.read()
        chunks = events(s.text)
        assert len(chunks) == 40
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        run.serving.join(10)
        assert not run.serving.is_alive()


def test_the_drain_deadline_aborts() -> None:
    engine = FakeEngine()
    engine.pace.clear()
    with (
        running(engine.load, drain_seconds=0.1) as run,
        httpx.stream("POST", f"{run.url}/v1/completions", json=LONG | {"stream": True}) as s,
    ):
        run.until(lambda: engine.num_steps > 1)
        run.on_loop(run.server.begin_drain)
        s.read()
        chunks = events(s.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        assert 1 < len(chunks) < 40
        run.serving.join(10)
        assert not run.serving.is_alive()


def test_sigterm_finishes_the_stream_and_exits_0(checkpoint: Path, tmp_path: Path) -> None:
    """A real process: bound before it loads, says what it serves, drains on the signal."""
    folder = tmp_path / "micro"
    shutil.copytree(checkpoint, folder)
    write_tokenizer(folder, template=None)  # starts faster
    command = [sys.executable, "-m", "looped", "serve", "--model", folder, "--port", "0", "--device", "cpu"]
    environment = os.environ | {"LOOPED_API_KEY": "secret"}
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        bound, ready = process.stderr.readline(), process.stderr.readline()
        url = bound.split()[3].rstrip(",")
        assert bound.startswith("looped: listening on http://127.0.0.1:")
        for fact in ("model micro", "mode refill", "kv ragged", "gate ouro", "threshold 0.6", f"url {url}"):
            assert fact in ready
        body = {"prompt": "abc", "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        key = {"authorization": "Bearer secret"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=key) as stream:
            pieces = stream.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.wait(15) == 0


class Gone:
    """A standard error whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_terminal_that_went_away_keeps_no_server_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.pace.clear()
    body = {"prompt": [1], "stream": True, "max_tokens": 15}
    with (
        running(engine.load) as run,
        httpx.stream("POST", f"{run.url}/v1/completions", json=body, timeout=20) as stream,
    ):
        run.until(lambda: engine.num_steps > 1)
        monkeypatch.setattr("sys.stderr", Gone())
        run.on_loop(run.server.begin_drain)
        stream.read()
        run.serving.join(10)
        assert not run.serving.is_alive()
        monkeypatch.undo()
    assert events(stream.text)[-1]["choices"][0]["finish_reason"] == "length"


def test_what_cannot_start_is_one_sentence(cli: Callable[..., Ran], checkpoint: Path) -> None:
    assert "unknown mode 'refil'; did you mean 'refill'?" in cli("serve", "--mode", "refil").refusal
    assert "--api-key is empty" in cli("serve", "--api-key", "").refusal
    assert "--max-body-mib" in cli("serve", "--max-body-mib", "0").refusal
    assert "max_num_seqs must be at most 65536" in cli("serve", "--max-num-seqs", str((1 << 31) - 1)).refusal
    assert "need --prefill ragged" in cli("serve", "--prefill-cosine", "--prefill-threshold", "0.5").refusal
    assert (
        "need --prefill ragged and a --prefill-threshold"
        in cli("serve", "--prefill", "ragged", "--prefill-protected", "2").refusal
    )
    assert "--drain-seconds" in cli("serve", "--drain-seconds", "-1").refusal
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in cli("serve", "--model", checkpoint, "--port", port).refusal
    for flags, sentence in (
        (("--model", "tiny-oura"), "did you mean 'tiny-ouro'?"),
        (("--model", checkpoint, "--kv", "ragge"), "did you mean 'ragged'?"),
        (("--model", checkpoint, "--gate", "our"), "did you mean 'ouro'?"),
        (("--model", checkpoint, "--threshold", "2"), "outside the range"),
        (("--model", checkpoint, "--gate", "g" * 300), "unknown gate 'ggg"),
        (("--model", checkpoint, "--num-pages", str((1 << 31) - 1)), "does not fit into"),
        (
            ("--model", checkpoint, "--prefill", "ragged", "--prefill-threshold", "2", "--prefill-cosine"),
            "threshold 2.0 is outside",
        ),
        (("--model", checkpoint, "--device", "tpu"), "unknown device 'tpu'"),
    ):
        done = cli("serve", "--port", "0", *flags)
        assert done.code == 2
        listening, refusal = done.err.splitlines()
        assert listening.startswith("looped: listening on")
        assert sentence in refusal


def test_torch_is_imported_by_the_engine_thread_alone() -> None:
    """The server listens before seconds of imports."""
    code = "import sys, looped.server.app, looped.server.lifetime, looped.server.serve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_bind_refuses_what_is_no_address() -> None:
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 70000)):
        with pytest.raises(LoopedError, match="choose another"):
            bind(host, port)
