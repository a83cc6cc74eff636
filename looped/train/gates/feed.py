"""Batches of a stream of documents, made ahead of the teacher, that go on exactly where an earlier run stopped."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from looped.train.gates.batches import Shape, in_batches, take
from looped.train.gates.documents import Documents
from looped.train.gates.sequences import Batch

T = TypeVar("T")
Place = dict[str, Any]
"""Where a feed stands, as plain JSON: the documents before the present pool, its number, and batches it has given."""

_AHEAD = 3
_REMEMBERED = 64


class _Made(NamedTuple):
    batch: Batch
    number: int
    behind: Place


class Feed:
    """Batches with their index from 0 on, the same whether in one run or in several.

    Documents are taken in pools, which are cut into batches, so to go on in the middle of a pool is to make that pool
    again; nothing before it is read. With `ahead` a thread makes batches while earlier ones are used.
    """

    def __init__(
        self, documents: Documents, shape: Shape, seed: int, place: Place | None = None, ahead: bool = False
    ) -> None:
        self.documents, self.shape, self.seed, self.ahead = documents, shape, seed, ahead
        self.start: Place = place or {"documents": None, "pool": 0, "batch": 0, "index": 0}
        self._places: OrderedDict[int, Place] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        made = in_background(self._make, _AHEAD) if self.ahead else self._make()
        for batch, index, behind in made:
            self._places[index] = behind
            if len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
            yield batch, index

    def place(self, index: int) -> Place:
        """The place behind the batch `index`, one of the last few given."""
        return self._places[index]

    def _make(self) -> Iterator[_Made]:
        begun, pool, skip, index = (self.start[key] for key in ("documents", "pool", "batch", "index"))
        stream = self.documents.stream(begun)
        while True:
            taken = take(stream, self.shape.pool_tokens)
            for number, batch in enumerate(in_batches(taken, self.shape, f"{self.seed}/{pool}")):
                if number >= skip:
                    behind = {"documents": begun, "pool": pool, "batch": number + 1, "index": index + 1}
                    yield _Made(batch, index, behind)
                    index += 1
            begun, pool, skip = stream.state(), pool + 1, 0


def in_background(make: Callable[[], Iterator[T]], ahead: int) -> Iterator[T]:
    """What an iterator gives, made by a thread that is up to `ahead` items further; its errors are raised here.

    The thread ends when the items are no longer asked for.
    """
    done: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(ahead)
    stop = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> bool:
        while not stop.is_set():
            try:
                done.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in make():
                if not put(item):
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    threading.Thread(target=run, daemon=True, name="batches").start()
    try:
        while True:
            item, error = done.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stop.set()
