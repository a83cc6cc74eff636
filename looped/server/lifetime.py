"""How the process of a server ends: by a signal after draining, or because its engine died."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import uvicorn

from looped.server.choices import say
from looped.server.engine_thread import EngineThread, State

# After the engine died the server answers 503 this long, so that clients and health checks learn of it.
DEATH_SECONDS = 2.0
# How long connections may take to close once their requests have ended.
CLOSE_SECONDS = 5
ENGINE_DIED = 1
# The name of threads that cut texts into tokens.
TEXTS = "looped-texts"


class Server(uvicorn.Server):
    """uvicorn that drains on the first SIGTERM or SIGINT and leaves at once on the second.

    uvicorn alone would wait for open streams without an end, and finish by raising the signal again.
    """

    def __init__(self, config: uvicorn.Config, thread: EngineThread, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine, self._drain_seconds = thread, drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._texts = ThreadPoolExecutor(thread_name_prefix=TEXTS)
        thread.on_end = self._engine_ended

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._texts)
        await super().serve(sockets)
        # Long texts may be on their way through the tokenizer, which nothing can stop: the loop must not wait for them.
        self._texts.shutdown(wait=False, cancel_futures=True)
        loop.set_default_executor(ThreadPoolExecutor(1))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signalled = False

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal signalled
            if signalled:
                os._exit(128 + number)
            signalled = True
            loop.call_soon_threadsafe(self.begin_drain)

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin_drain(self) -> None:
        """Refuse new requests, let running ones finish up to the deadline, then exit."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self._engine.drain()
        if self._engine.num_open:
            say(
                f"stopping: {self._engine.num_open} requests may go on for {self._drain_seconds:g} s; "
                "a second signal stops at once"
            )
        await self._until_idle(self._drain_seconds)
        self._engine.abort_all()
        await self._until_idle(CLOSE_SECONDS)
        self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._engine.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _engine_ended(self, error: BaseException) -> None:
        """On the event loop: a model that cannot be loaded ends the server at once, a dead engine a little later."""
        if self._engine.loaded:
            say("the engine died; stopping")
            asyncio.get_running_loop().call_later(DEATH_SECONDS, self._exit)
        else:
            self._exit()

    def _exit(self) -> None:
        self.should_exit = True


def exit_code(thread: EngineThread) -> int:
    """0 after a signal, 1 after the engine died. Raises what went wrong while loading."""
    if thread.state is State.DEAD and thread.error is not None:
        if not thread.loaded:
            raise thread.error
        return ENGINE_DIED
    if thread.alive or any(other.name.startswith(TEXTS) for other in threading.enumerate()):
        # Stuck in a load, a step or a long text: the interpreter must not tear torch down under it, nor wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
