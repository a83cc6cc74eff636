"""The one thread that owns the engine. Requests go in and outputs come out through queues.

The asyncio side never touches the engine: it posts commands (add, abort, stop) to an inbox, and the thread posts what
each step produced back to the event loop, one call a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from looped.errors import LoopedError
from looped.infer.request import Output, Request
from looped.server.chat import ChatTemplate
from looped.server.errors import ApiError, unavailable

if TYPE_CHECKING:
    from looped.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# A stage that raises ends the requests of its batch; when no stage succeeds in between, the engine is broken.
MAX_FAULTS = 10
STALL_SECONDS = 120.0


class Steppable(Protocol):
    """What the thread drives: `looped.infer.Engine`, or a stand-in in tests."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, key: str) -> bool: ...
    def step(self) -> list[Output]: ...


@dataclass(frozen=True)
class EngineInfo:
    """What the asyncio side knows of the engine; it never changes."""

    model: str
    mode: str
    kv: str
    gate: str | None
    threshold: float | None
    threshold_range: tuple[float, float] | None
    max_depth: int
    context: int
    """Positions of the model."""
    max_len: int
    """Tokens that a prompt and its continuation may have together: the context, or less if the KV pool is smaller."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    template: ChatTemplate
    dtype: str
    device: str
    max_chars: int | None = None
    """Characters that fit into the context at most, where the tokenizer sets a bound."""
    engine: str = ""
    """What the engine says of itself: exits, backend, pages, graphs."""


class Loaded(NamedTuple):
    engine: Steppable
    info: EngineInfo


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    STOPPED = "stopped"


class Ticket:
    """The outputs of some requests that were handed in together; lives on the event loop.

    Iterating ends when all of them are finished. `close` aborts those that are not.
    """

    def __init__(self, thread: EngineThread, keys: Iterable[str]) -> None:
        self._thread = thread
        self.open = set(keys)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self.open:
            output = await self._outputs.get()
            if output.finished:
                self.open.discard(output.key)
            yield output

    def close(self) -> None:
        self._thread.forget(self.open)
        self.open = set()


@dataclass(frozen=True)
class _Add:
    requests: Sequence[Request]
    admitted: asyncio.Future[None]


@dataclass(frozen=True)
class _Abort:
    keys: tuple[str, ...]
    report: bool
    """Whether the requests still want to hear of their end."""


class _Stop:
    pass


class EngineThread:
    """Loads the engine, steps it while there is work, and tells the event loop of tokens, failures and its own end.

    `on_end(error)` is called on the event loop when the thread dies by itself: an error while loading, or a broken
    engine.
    """

    def __init__(self, load: Callable[[], Loaded], stall_seconds: float = STALL_SECONDS) -> None:
        self._load, self._stall_seconds = load, stall_seconds
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="looped-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tickets: dict[str, Ticket] = {}
        self._progress = time.monotonic()
        self.state = State.LOADING
        self.error: BaseException | None = None
        self.on_ready: Callable[[EngineInfo], None] = lambda info: None
        self.on_end: Callable[[BaseException], None] = lambda error: None
        self._info: EngineInfo | None = None

    # The asyncio side.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def loaded(self) -> bool:
        """Whether the engine was up at some time."""
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        """Raises a 503 until the engine is loaded and after it died."""
        if self._info is None or self.state in (State.DEAD, State.STOPPED):
            raise self.refusal()
        return self._info

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._tickets)

    def check(self) -> None:
        """Raise a 503 unless the engine is up and makes progress."""
        if self.state is not State.READY:
            raise self.refusal()
        idle = time.monotonic() - self._progress
        if self._tickets and idle > self._stall_seconds:
            raise unavailable(f"the engine has made no progress for {idle:.0f} s with requests pending")

    def refusal(self) -> ApiError:
        reasons = {
            State.LOADING: "the model is loading",
            State.DRAINING: "the server is shutting down",
            State.STOPPED: "the server is shutting down",
        }
        return unavailable(reasons.get(self.state, "the engine died; the server's log has the details"))

    async def submit(self, requests: Sequence[Request]) -> Ticket:
        """Hand in requests, all or none. Raises `LoopedError` for one that can never run, 503 if the engine is down."""
        if self.state is not State.READY:
            raise self.refusal()
        assert self._loop is not None
        ticket = Ticket(self, [request.key for request in requests])
        self._tickets |= dict.fromkeys(ticket.open, ticket)
        admitted: asyncio.Future[None] = self._loop.create_future()
        if self.num_open == len(requests):
            self._progress = time.monotonic()
        self._inbox.put(_Add(requests, admitted))
        try:
            await admitted
        except BaseException:
            ticket.close()
            raise
        return ticket

    def forget(self, keys: Iterable[str]) -> None:
        """Abort requests nobody waits for any more."""
        keys = tuple(key for key in keys if self._tickets.pop(key, None) is not None)
        if keys:
            self._inbox.put(_Abort(keys, report=False))

    def drain(self) -> None:
        """Admit nothing from now on; what runs goes on."""
        if self.state in (State.READY, State.LOADING):
            self.state = State.DRAINING

    def abort_all(self) -> None:
        """End everything that runs with the finish reason "abort"."""
        self._inbox.put(_Abort(tuple(self._tickets), report=True))

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread after its current step and wait for it."""
        if self.state is not State.DEAD:
            self.state = State.STOPPED
        self._inbox.put(_Stop())
        if self.alive:
            self._thread.join(timeout)
        self._refuse_pending()
        if self.alive:
            self._inbox.put(_Stop())  # stuck in a load or a step; the first one was read above

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            ticket = self._tickets.get(output.key)
            if output.finished:
                self._tickets.pop(output.key, None)
            if ticket is not None:
                ticket.put(output)

    def _became_ready(self, info: EngineInfo) -> None:
        self._info = info
        if self.state is State.LOADING:
            self.state = State.READY
        self.on_ready(info)

    def _died(self, error: BaseException) -> None:
        self.state, self.error = State.DEAD, error
        self._refuse_pending()
        self._deliver([_end(key, "error") for key in tuple(self._tickets)])
        self.on_end(error)

    def _refuse_pending(self) -> None:
        """Answer requests that the thread will not take any more."""
        for command in self._commands(wait=False):
            if isinstance(command, _Add):
                _settle(command.admitted, self.refusal())

    # The engine's side.

    def _run(self) -> None:
        try:
            engine, info = self._load()
        except BaseException as error:
            self._post(self._died, error)
            return
        self._post(self._became_ready, info)
        try:
            self._serve(engine)
        except BaseException as error:
            log.exception("the engine died")
            self._post(self._died, error)

    def _serve(self, engine: Steppable) -> None:
        faults = 0
        while True:
            for command in self._commands(wait=not engine.has_work):
                if isinstance(command, _Stop):
                    return
                self._obey(engine, command)
            if not engine.has_work:
                continue
            try:
                outputs = engine.step()
            except Exception:
                faults += 1
                if faults == MAX_FAULTS:
                    raise
                log.exception("a stage failed; the requests of its batch end")
                continue
            self._progress = time.monotonic()
            if all(output.finish_reason != "error" for output in outputs):
                faults = 0
            if outputs:
                self._post(self._deliver, outputs)

    def _commands(self, wait: bool) -> list[_Add | _Abort | _Stop]:
        """All that is in the inbox; with `wait`, not before there is something."""
        commands = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:  # not `while not empty()`: when the server stops two threads may read
                commands.append(self._inbox.get_nowait())
        return commands

    def _obey(self, engine: Steppable, command: _Add | _Abort) -> None:
        if isinstance(command, _Abort):
            gone = [key for key in command.keys if engine.abort(key)]
            if command.report:
                self._post(self._deliver, [_end(key, "abort") for key in gone])
            return
        error: Exception | None = None
        added: list[str] = []
        try:
            for request in command.requests:
                engine.add(request)
                added.append(request.key)
        except LoopedError as refused:
            error = refused
        except Exception as fault:
            log.exception("a request could not be admitted")
            error = fault
        if error is not None:
            for key in added:
                engine.abort(key)
        self._post(_settle, command.admitted, error)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the event loop is closed: nobody listens
            log.debug("dropped a message to a closed event loop")


def _settle(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _end(key: str, reason: str) -> Output:
    return Output(key, None, 0, "", reason)
