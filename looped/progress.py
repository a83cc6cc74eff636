"""Progress of long jobs: a bar on a terminal, one line every N steps elsewhere; and the line of JSON that ends a job.

Bars and lines go to stderr, so stdout stays clean for results.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TextIO, TypeVar, overload

T = TypeVar("T")
REDRAW_SECONDS = 0.1
NUM_LINES = 10  # lines a job of known length prints where there is no terminal
UNKNOWN_EVERY = 100  # steps between lines where the length is not known


@overload
def progress(work: int, desc: str, *, every: int | None = None) -> Progress[None]: ...
@overload
def progress(work: Iterable[T], desc: str, *, every: int | None = None) -> Progress[T]: ...
def progress(work: Iterable[Any] | int, desc: str, *, every: int | None = None) -> Progress[Any]:
    """Show the progress of an iterable, or of `work` steps told by `advance`.

    for batch in progress(batches, "train"): ...
    with progress(num_steps, "train") as bar: bar.advance(note="loss 2.31")
    """
    if isinstance(work, int):
        return Progress((), work, desc, every=every)
    return Progress(work, len(work) if isinstance(work, Sized) else None, desc, every=every)


class Progress(Generic[T]):
    """One job's counter. `every`: steps between two lines where stderr is no terminal (default: a tenth of the job)."""

    def __init__(
        self,
        items: Iterable[T],
        total: int | None,
        desc: str,
        *,
        every: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.items, self.total, self.desc = items, total, desc
        self.stream = stream if stream is not None else sys.stderr
        self.bar = self.stream.isatty()
        self.every = every or (max(1, math.ceil(total / NUM_LINES)) if total else UNKNOWN_EVERY)
        self.done, self.note = 0, ""
        self.begun = self.drawn = time.monotonic()
        self.printed = 0  # `done` at the last line that stays on the screen

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self.items:
                yield item
                self.advance()

    def __enter__(self) -> Progress[T]:
        self.begun = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        """Count `steps` more; `note` is a short text such as the loss, shown behind the counter."""
        before, self.done = self.done, self.done + steps
        self.note = self.note if note is None else note
        if self.bar:
            if time.monotonic() - self.drawn >= REDRAW_SECONDS:
                self._draw()
        elif self.done // self.every > before // self.every:
            self._line()

    def close(self) -> None:
        """Leave the final state on the screen."""
        if self.bar:
            self._draw()
            self.stream.write("\n")
            self.stream.flush()
        elif self.printed != self.done:
            self._line()

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        width = shutil.get_terminal_size().columns - 1
        self.stream.write("\r" + self.text(bar_width=20)[:width] + "\x1b[K")
        self.stream.flush()

    def _line(self) -> None:
        self.printed = self.done
        self.stream.write(self.text() + "\n")
        self.stream.flush()

    def text(self, bar_width: int = 0) -> str:
        """`train 30/120 25% 12.0/s, 0:07 left, loss 2.31`, with a bar of `bar_width` characters if that is not 0."""
        seconds = time.monotonic() - self.begun
        rate = self.done / seconds if seconds > 0 else 0.0
        parts = [self.desc]
        if self.total:
            part = min(1.0, self.done / self.total)
            if bar_width:
                parts.append("█" * int(part * bar_width) + "░" * (bar_width - int(part * bar_width)))
            parts.append(f"{self.done}/{self.total} {part:.0%}")
        else:
            parts.append(f"{self.done}")
        tail = [f"{rate:.1f}/s" if rate >= 1 or rate == 0 else f"{1 / rate:.1f} s each"]
        if self.total and 0 < self.done < self.total and rate:
            tail.append(f"{clock((self.total - self.done) / rate)} left")
        else:
            tail.append(clock(seconds))
        return " ".join(parts) + " " + ", ".join(tail + ([self.note] if self.note else []))


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:30 or 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def last_json(result: Any) -> None:
    """Print `result` as one line of JSON on stdout, the last thing a job prints; NaN and infinity become null."""
    print(json.dumps(plain(result), allow_nan=False), flush=True)


def plain(value: Any) -> Any:
    """The value in JSON's types: dataclasses and named tuples become objects, array scalars numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays, without importing what makes them
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
