"""A request in the engine: what it has produced, how its tokens become outputs, and where it may end."""

# N tokens

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from looped.infer.detokenize import Detokenizer
from looped.infer.request import Output, Request
from looped.infer.scheduler import Chunk, Job

if TYPE_CHECKING:
    from torch import Tensor

    from looped.infer.offload import SavedKV

log = logging.getLogger(__name__)


class NewToken(NamedTuple):
    """One row of a batch's results, on the host."""

    token: int
    depth: int
    ok: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Saved(NamedTuple):
    """A sequence moved to host memory: its K/V and its rows of the device state."""

    kv: SavedKV
    rows: tuple[Tensor, ...]


@dataclass(eq=False)
class EngineSequence:
    """A request with its tokens so far. `depths[i]` is the number of loops of the pass that produced token i."""

    request: Request
    prompt_ids: list[int]
    job: Job
    stop_ids: frozenset[int]
    detokenizer: Detokenizer | None
    level: int
    """Of its sampling, see `Sampler.level`."""
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    prompt_depths: list[int] = field(default_factory=list)
    """Of a ragged prefill; empty where every prompt token ran R loops."""
    spent: int = 0
    """Loop steps of its complete decode passes since it was admitted."""
    ended: bool = False
    saved: Saved | None = None
    carry: tuple[Tensor, ...] = ()
    """What the gate remembers of the token before, while the K/V are to be computed again."""

    @property
    def position(self) -> int:
        """Position of the newest token known to the host, the one to run next."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    @property
    def full(self) -> bool:
        return self.position + 1 >= self.job.max_len

    def ends_with_next(self) -> bool:
        """Whether the next token is certainly the last one."""
        return self.position + 2 >= self.job.max_len

    # Prefill.

    def rerun(self) -> None:
        """Plan to compute the K/V of all tokens again, whose depths are known, instead of the prompt's alone."""
        self.job.prompt_len = len(self.prompt_ids) + max(0, len(self.token_ids) - 1)
        self.spent = 0

    def tokens_of(self, chunk: Chunk) -> Sequence[int]:
        """Token ids of a piece of its prefill."""
        return (self.prompt_ids + self.token_ids)[chunk.start : chunk.start + chunk.length]

    def depths_of(self, chunk: Chunk, max_loops: int) -> Sequence[int] | None:
        """Depths at which the tokens of a piece ran before; None for a first run."""
        if not self.token_ids:
            return None
        prompt = self.prompt_depths or [max_loops] * len(self.prompt_ids)
        return (prompt + self.depths[1:])[chunk.start : chunk.start + chunk.length]

    # Results.

    def take(self, new: NewToken) -> Output:
        """Append a token; the output says what may be shown and whether the sequence ends with it.

        A row whose logits were not finite ends the request, and so does an error in its own text handling.
        """
        if not new.ok:
            return failed(self.request.key)
        try:
            return self._append(new)
        except Exception:
            log.exception("request %s ended with an error", self.request.key)
            return failed(self.request.key)

    def _append(self, new: NewToken) -> Output:
        self.token_ids.append(new.token)
        self.depths.append(new.depth)
        text, reader = "", self.detokenizer
        if reader is not None:
            text = reader.push(new.token)
        stopped = new.token in self.stop_ids or (reader is not None and reader.stopped)
        full = self.full
        if (stopped or full) and reader is not None:
            text += reader.finish()
            stopped = stopped or reader.stopped
        reason = "stop" if stopped else "length" if full else None
        wanted = self.request.params.logprobs
        if wanted is None:
            return Output(self.request.key, new.token, new.depth, text, reason)
        top = new.top_logprobs[:wanted]
        return Output(self.request.key, new.token, new.depth, text, reason, new.logprob, top)


def failed(key: str) -> Output:
    """The end of a request that could not go on."""
    return Output(key, None, 0, "", "error")
