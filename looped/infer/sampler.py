"""Sampling in the engine: parameters as rows by slot on the device, tokens from `looped.sampling`. Slot 0 pads.

On a GPU with Triton kernels draw the same tokens, in fewer passes over the logits.
"""

# S slots, N rows of a launch, V vocabulary

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from looped.infer.request import SamplingParams
from looped.infer.transfer import upload
from looped.model import ops
from looped.sampling import Drawn, Lists, Rows, Seen, Table, draw, end_ids, knobs_of, logprobs_of
from looped.sampling_options import FILTERED, FULL, GREEDY, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Sampling


class Sampler:
    """Draws the tokens of a launch, every row by the parameters in its slot.

    `admit` writes the rows when a sequence gets its slot (again after a preemption), in stream order and without
    waiting for the device. What the penalties need, vocabulary-wide rows of counts, is made by the first `admit` of a
    request that asks for the highest level; a launch at that level comes after it. A captured launch stays right: the
    tensors that a level works on are never replaced.
    """

    LEVELS = FULL + 1

    def __init__(self, num_slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._eos_ids = tuple(eos_ids)
        self._max_ends = len(self._eos_ids) + MAX_STOP_TOKEN_IDS
        # Rows of slots that were never admitted: greedy, with no end.
        idle = Table.of([Sampling(temperature=0.0)], [0], [()], MAX_LOGIT_BIAS, self._max_ends)
        self._rows = Rows(*(torch.from_numpy(column).to(device).expand(num_slots, -1).contiguous() for column in idle))
        self._biased: set[int] = set()
        self._seen: Seen | None = None

    @staticmethod
    def level(params: SamplingParams) -> int:
        """How much work a request's draws take, 0 to 3; a launch runs at the highest level of its active requests."""
        return params.sampling.level

    def check(self, params: SamplingParams) -> None:
        """Raises `LoopedError` for a biased token that the model does not have."""
        params.sampling.check_vocab(self._vocab_size)

    def admit(
        self,
        slots: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        prompts: Sequence[Sequence[int]],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Write the rows of sequences that take `slots`; `generated` are the tokens they had before a preemption."""
        if not slots:
            return
        sampling = [each.sampling for each in params]
        stops = [end_ids(each.sampling, self._eos_ids, each.ignore_eos, self._vocab_size) for each in params]
        table = Table.of(sampling, seeds, stops, MAX_LOGIT_BIAS, self._max_ends)
        # Biases are wide and rare: only where there are some, or were.
        biased = [i for i, each in enumerate(sampling) if each.logit_bias or slots[i] in self._biased]
        floats, ints, bias_ids, bias, ends = self._rows
        self._write((floats, ints, ends), slots, (table.floats, table.ints, table.end_ids))
        if biased:
            self._write((bias_ids, bias), [slots[i] for i in biased], (table.bias_ids[biased], table.bias[biased]))
        self._biased -= set(slots)
        self._biased |= {slot for slot, each in zip(slots, sampling, strict=True) if each.logit_bias}
        for slot, each, prompt, tokens in zip(slots, sampling, prompts, generated, strict=True):
            if each.level == FULL:
                self._see(slot, each, prompt, tokens)

    def _write(self, targets: Sequence[Tensor], slots: Sequence[int], columns: Sequence[np.ndarray]) -> None:
        at = upload(slots, torch.long, self._device)
        for target, column in zip(targets, columns, strict=True):
            target.index_copy_(0, at, upload(column, target.dtype, self._device))

    def _see(self, slot: int, params: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        if self._seen is None:
            shape, device = (self._num_slots, self._vocab_size), self._device
            self._seen = Seen(
                torch.zeros(shape, dtype=torch.int32, device=device),
                torch.zeros(shape, dtype=torch.bool, device=device),
            )
        if not params.penalties:  # logprobs alone: its penalties are neutral, whatever the row counts
            return
        counts, in_prompt = self._seen.counts_NV[slot].zero_(), self._seen.prompt_NV[slot].zero_()
        in_prompt.index_fill_(0, upload(prompt, torch.long, self._device), True)
        if generated:
            ids = upload(generated, torch.long, self._device)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def __call__(self, logits_NV: Tensor, at_N: Tensor, positions_N: Tensor, index_N: Tensor, level: int) -> Drawn:
        """Tokens at `positions_N` + 1 for the slots `at_N`, which occur once each but for 0.

        `index_N` is the number of tokens generated before. Fixed shapes, no waiting; at the highest level the new
        tokens are counted.
        """
        if level == GREEDY:
            return Drawn(*ops.largest(logits_NV))
        assert level < FULL or self._seen is not None, "admit comes before the first launch at this level"
        kernels = _kernels() if logits_NV.is_cuda else None
        if kernels is None:
            drawn = self._plain(logits_NV, at_N, positions_N, index_N, level)
        else:
            seen = self._seen if level == FULL else None
            drawn = Drawn(*kernels.draw_rows(logits_NV, self._rows, at_N, positions_N, index_N, level, seen))
            if level == FULL:
                drawn = Drawn(drawn.tokens, drawn.ok, *logprobs_of(logits_NV.double(), drawn.tokens))
        if level == FULL and self._seen is not None:
            places = at_N * self._vocab_size + drawn.tokens
            self._seen.counts_NV.view(-1).scatter_add_(0, places, (at_N > 0).int())
        return drawn

    def _plain(self, logits_NV: Tensor, at_N: Tensor, positions_N: Tensor, index_N: Tensor, level: int) -> Drawn:
        floats, ints, *lists = self._rows
        knobs = knobs_of(floats[at_N], ints[at_N])
        there = Lists(*(rows[at_N] for rows in lists)) if level >= FILTERED else None
        seen = Seen(*(rows[at_N] for rows in self._seen)) if level == FULL and self._seen is not None else None
        return draw(logits_NV, knobs, positions_N + 1, index_N, level, there, seen)

    @property
    def end_ids(self) -> Tensor:
        """Tokens that end a slot's sequence [S, E], filled up with -1: end of text unless ignored, stop token ids."""
        return self._rows.end_ids

    @property
    def min_tokens(self) -> Tensor:
        """How many tokens a slot's sequence has before one of them can end it [S]."""
        return self._rows.ints[:, -1]


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from looped.infer.backends.kernels import draw as kernels
    except ImportError:
        return None
    return kernels
