"""For tests of the drawing kernels: rows of parameters, and what may be drawn by the definition and by the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looped import SamplingParams, sampling
from looped.infer.sampler import Sampler
from looped.sampling import Drawn, Knobs, Lists, Seen
from looped.sampling_options import FULL


class Found(NamedTuple):
    """What the kernels drew; from the second level on also which tokens may be drawn [N, V] (of greedy rows none), by
    them and by the definition."""

    tokens: Tensor
    ok: Tensor
    kept: Tensor | None = None
    expected: Tensor | None = None


class Case(NamedTuple):
    """Rows of logits, one a slot from 1 on, and a sampler that knows their parameters."""

    logits: Tensor
    sampler: Sampler
    at: Tensor
    positions: Tensor
    index: Tensor
    level: int

    @property
    def seen(self) -> Seen | None:
        return self.sampler._seen if self.level == FULL else None

    @property
    def knobs(self) -> Knobs:
        floats, ints, *_ = self.sampler._rows
        return sampling.knobs_of(floats[self.at], ints[self.at])

    def expected(self) -> Drawn:
        """By the definition."""
        lists = Lists(*(rows[self.at] for rows in self.sampler._rows[2:]))
        seen = self.seen and Seen(*(rows[self.at] for rows in self.seen))
        return sampling.draw(self.logits, self.knobs, self.positions + 1, self.index, self.level, lists, seen)

    def found(self, chunk: int = 2048) -> Found:
        """By the kernels."""
        from looped.infer.backends.kernels import draw

        outcomes = []

        def narrow(*args: Any) -> Any:
            outcomes.append(draw_narrow(*args))
            return outcomes[0]

        draw_narrow, draw.narrow = draw.narrow, narrow
        try:
            drawn = draw.draw_rows(
                self.logits, self.sampler._rows, self.at, self.positions, self.index, self.level, self.seen, chunk
            )  # fmt: skip
        finally:
            draw.narrow = draw_narrow
        return Found(*drawn, *(self._kept(*outcomes[0]) if outcomes else ()))

    def _kept(self, scaled: Tensor, outcome: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        (tops, cut, last), knobs, vocab_size = outcome, self.knobs, scaled.shape[1]
        warm, ids = (knobs.temperature > 0)[:, None], torch.arange(vocab_size, device=scaled.device)
        cuts = ((knobs.top_k > 0) & (knobs.top_k < vocab_size)) | (knobs.top_p < 1)
        before = (scaled > cut[:, None]) | ((scaled == cut[:, None]) & (ids <= last[:, None]))
        kept = (before | ~cuts[:, None]) & ((scaled - tops[:, None]).exp() >= knobs.min_p[:, None])
        expected = sampling._narrowed(scaled.clone(), knobs) > -torch.inf
        return kept & (scaled > -torch.inf) & warm, expected & warm

    def agrees(self, chunk: int = 2048) -> Found:
        """Asserts that the kernels draw the definition's tokens, from the same ones."""
        found, expected = self.found(chunk), self.expected()
        ok = expected.ok
        assert torch.equal(found.ok, ok)
        assert torch.equal(found.tokens[ok], expected.tokens[ok])
        assert bool(((found.tokens >= 0) & (found.tokens < self.logits.shape[1])).all())
        if found.kept is not None and found.expected is not None:
            assert torch.equal(found.kept[ok], found.expected[ok])
        return found


def case(
    logits: Tensor, params: Sequence[SamplingParams], index: int = 2, level: int | None = None, position: int = 7
) -> Case:
    """`params` in turn for the rows of `logits`; two tokens of a prompt and three generated ones for each."""
    num_rows, vocab_size = logits.shape
    sampler = Sampler(num_rows + 1, vocab_size, (0,), logits.device)
    rows = [params[row % len(params)] for row in range(num_rows)]
    slots = list(range(1, num_rows + 1))
    prompts = [[slot % vocab_size, 5 % vocab_size] for slot in slots]
    generated = [[slot * 3 % vocab_size, slot * 3 % vocab_size, 1 % vocab_size] for slot in slots]
    sampler.admit(slots, rows, [slot * 7919 - 12345678901234 for slot in slots], prompts, generated)
    at = torch.tensor(slots, device=logits.device)
    if level is None:
        level = max(1, *(Sampler.level(each) for each in rows))
    return Case(logits, sampler, at, at * 5 + position, torch.full_like(at, index), level)
