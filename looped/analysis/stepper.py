"""Times of the engine's stages at fixed batch, context and depth: the engine's own launches, without its scheduler.

Each repeat is a whole token of every row: prelude, core steps, coda. On a GPU the launches queue up and events between
them are read afterwards, so what is timed is the device; on a CPU it is the wall.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from looped.analysis.device import Marks, wait
from looped.errors import LoopedError
from looped.infer.engine import Engine
from looped.infer.options import EngineOptions
from looped.infer.prompts import PromptPiece
from looped.infer.request import SamplingParams
from looped.infer.scheduler import Job, Plan, Stage
from looped.infer.state import Resume, SlotInit
from looped.model import LoopedLM

WARM_UP = 2
_PREFILL_REPEATS = 5
_NEVER = 1 << 40
_HEAD_START_CYCLES = 20_000_000


class Timing(NamedTuple):
    """Seconds of one launch: the median of the repeats, and their range divided by it."""

    seconds: float
    spread: float


class Pass(NamedTuple):
    """What one token took: each stage (the core: one loop step), and the whole of it."""

    prelude: Timing
    core: Timing
    coda: Timing
    decode: Timing


class Stepper:
    """An engine whose stages are launched by hand. `fused` is the engine of `exits="device"`, whose core step takes
    exits through coda and prelude in the same launch: then `core` is that launch and there is no other."""

    def __init__(self, model: LoopedLM, options: EngineOptions, repeats: int) -> None:
        if repeats < 1:
            raise LoopedError(f"--repeats must be at least 1, got {repeats}")
        self.model, self.repeats = model, repeats
        self.engine = Engine(model, options)
        self.fused = options.exits == "device"
        if self.fused and not self.engine.runner.fuse:
            raise LoopedError(
                "--exits device is measured where coda and prelude run in the core step: fully looped models with K = 1"
            )
        self.max_loops = self.engine.policy.max_depth
        self.passes = WARM_UP + repeats
        self._slots: list[int] = []
        self._fill()

    def _fill(self) -> None:
        """Random K/V: zeros would cost less energy, and so run at a higher clock, than what a model stores."""
        for pool in self.engine.kv.pools:
            for layer in pool.data:
                layer.normal_()

    def room(self, context: int) -> bool:
        """Whether a sequence may get as long as a measurement at this context makes it."""
        return context + self.passes + 3 <= self.engine.kv.max_len

    def settle(self, batch: int, context: int) -> bool:
        """Put `batch` sequences with `context` tokens into the slots; False where the pool is too small."""
        self.clear()
        kv, start = self.engine.kv, self._start(context)
        for slot in range(1, batch + 1):
            job = Job(str(slot), start, start + self.passes + 3, slot=slot)
            if not kv.can_admit(job, idle=True):
                self.clear()
                return False
            kv.admit(job)
            kv.cover_prompt(slot, 0, start)
            self._slots.append(slot)
        params = SamplingParams(temperature=0.0, max_tokens=self.passes + 2, ignore_eos=True)
        prompts: list[Sequence[int]] = [[1]] * batch
        nothing: list[Sequence[int]] = [[]] * batch
        self.engine.runner.sampler.admit(self._slots, [params] * batch, [0] * batch, prompts, nothing)
        return True

    def _start(self, context: int) -> int:
        """The first pass's position: a row's keys, its own included, are `context` in the mean of the passes."""
        return max(1, context - 1 - self.passes // 2)

    def clear(self) -> None:
        """Give back all slots."""
        wait(self.model.device)
        for slot in self._slots:
            self.engine.kv.release(slot)
        self._slots = []

    @torch.inference_mode()
    def measure(self, context: int, depth: int) -> Pass:
        """Times of the settled rows when every token runs `depth` loops. Settle again before the next call."""
        state, kv = self.engine.runner.state, self.engine.kv
        start, vocab = self._start(context), self.model.config.vocab_size
        state.admit([SlotInit(slot, 0, 1.0, 1, depth, _NEVER, 0) for slot in self._slots])
        carry = tuple(rows[0] for rows in state.carry)
        state.resume([Resume(slot, slot * 7919 % vocab, start, 1, carry) for slot in self._slots])
        slots = np.array(self._slots, dtype=np.int32)
        consumed = np.zeros(len(slots), dtype=np.int64)
        self._head_start()
        marks = Marks(self.model.device)
        for number in range(self.passes):
            self._grow(slots, consumed, start + number, depth)
            marks.mark()
            if not self.fused or number == 0:
                self._launch(Stage.PRELUDE)
            marks.mark()
            for _ in range(depth):
                self._launch(Stage.CORE)
            marks.mark()
            if not self.fused:
                self._launch(Stage.CODA)
            marks.mark()
            consumed += depth
            for slot in self._slots:
                kv.token_done(slot, depth)
        wait(self.model.device)
        return self._pass(marks.spans(), depth)

    def _head_start(self) -> None:
        """Keep the GPU busy for some milliseconds, so that it never waits for the first launches to be queued."""
        if self.model.device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]

    def _grow(self, slots: NDArray[np.int32], consumed: NDArray[np.int64], position: int, depth: int) -> None:
        """Pages for a token at `position`, and for the one behind it where the core step begins that too."""
        kv = self.engine.kv
        where = np.full(len(slots), position + int(self.fused), dtype=np.int32)
        if not (kv.grow(slots, where) and kv.supply(slots, consumed, depth)):
            raise RuntimeError("the KV pool is full though room was promised")

    def _launch(self, stage: Stage) -> None:
        slots = tuple(self._slots)
        plan = Plan(stage, slots, rows=len(slots), fused=self.fused and stage is Stage.CORE)
        self.engine.runner.decode(plan, {}, self.engine.kv.max_len, 0)

    def _pass(self, spans: Sequence[float], depth: int) -> Pass:
        """Four marks a token; the first tokens warm up."""
        tokens = [spans[at : at + 3] for at in range(4 * WARM_UP, len(spans), 4)]
        preludes, cores, codas = zip(*tokens, strict=True)
        return Pass(
            _timing(preludes),
            _timing([core / depth for core in cores]),
            _timing(codas),
            _timing([sum(token) for token in tokens]),
        )

    @torch.inference_mode()
    def prefill(self, tokens: int) -> Timing | None:
        """Seconds of a prompt of `tokens` tokens in one batch; None where it does not fit."""
        self.clear()
        kv, runner = self.engine.kv, self.engine.runner
        job = Job("prompt", tokens, tokens + 2, slot=1)
        if tokens + 2 > kv.max_len or not kv.can_admit(job, idle=True):
            return None
        kv.admit(job)
        self._slots = [1]
        runner.state.admit([SlotInit(1, 0, 1.0, 1, self.max_loops, _NEVER, 0)])
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        runner.sampler.admit([1], [params], [0], [[1] * tokens], [[]])
        rng = np.random.default_rng(0)
        piece = PromptPiece(1, 0, rng.integers(0, self.model.config.vocab_size, tokens).tolist(), tokens, None, True)
        self._head_start()
        marks = Marks(self.model.device)
        for _ in range(1 + _PREFILL_REPEATS):
            marks.mark()
            runner.prompts.run([piece], 0)
        marks.mark()
        self.clear()
        return _timing(marks.spans()[1:])


def _timing(seconds: Sequence[float]) -> Timing:
    median = statistics.median(seconds)
    return Timing(median, (max(seconds) - min(seconds)) / median if median else 0.0)
