"""An engine without a model: a token a step for every request, as many steps a second as the test allows."""

from __future__ import annotations

import threading
from collections.abc import Callable

from looped.infer.request import Output, Request
from looped.server.chat import ChatTemplate
from looped.server.engine_thread import EngineInfo, Loaded

INFO = EngineInfo(
    model="fake",
    mode="refill",
    kv="ragged",
    gate="ouro",
    threshold=0.5,
    threshold_range=(0.0, 1.0),
    max_depth=4,
    context=100,
    max_len=50,
    vocab_size=10,
    eos_ids=(0,),
    tokenizer=None,
    template=ChatTemplate(None, "fake"),
    dtype="float64",
    device="cpu",
)


class FakeEngine:
    """Token 1 at depth 2 up to max_tokens. While `pace` is clear a step takes 20 ms; `fault` may raise or wait."""

    def __init__(self) -> None:
        self.pace = threading.Event()
        self.pace.set()
        self.fault: Callable[[], None] = lambda: None
        self.running: dict[str, int] = {}
        self.aborted: list[str] = []
        self.failed: list[str] = []
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.failed)

    def add(self, request: Request) -> None:
        self.running[request.key] = request.params.max_tokens

    def abort(self, key: str) -> bool:
        if self.running.pop(key, None) is None:
            return False
        self.aborted.append(key)
        return True

    def step(self) -> list[Output]:
        if self.failed:
            failed, self.failed = self.failed, []
            return [Output(key, None, 0, "", "error") for key in failed]
        self.pace.wait(0.02)
        self.num_steps += 1
        try:
            self.fault()
        except BaseException:
            self.failed, self.running = list(self.running), {}
            raise
        return [self._token(key) for key in tuple(self.running)]

    def _token(self, key: str) -> Output:
        self.running[key] -= 1
        done = self.running[key] == 0
        if done:
            del self.running[key]
        return Output(key, 1, 2, "x", "length" if done else None)

    def load(self) -> Loaded:
        return Loaded(self, INFO)
