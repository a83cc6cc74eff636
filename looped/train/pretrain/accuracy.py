"""A quick answer check during training: greedy batched decoding at fixed depths with a dense K/V cache.

The engine and `looped eval` are the real measurement; this one exists to know, on the training machine, how a run went.
"""

# B rows, T tokens, S cache slots, H heads, G key/value heads, K head dimension, V vocabulary

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.kv import KVLayout, get_layout
from looped.model import LoopedLM

ANSWER = re.compile(r"The answer is (-?[\d,.]*\d)")
_STOP = re.compile(r"\n\s*\n|\nQ:")


class Problem(NamedTuple):
    """Prompt token ids and the answer as text."""

    prompt: list[int]
    answer: str


class DenseCache:
    """`attend` over one cache tensor per plane and layer. Rows are padded on the left; padded slots are masked."""

    def __init__(self, model: LoopedLM, layout: KVLayout, num_rows: int, num_slots: int, pads: Tensor) -> None:
        config = model.config
        self.layout, self.core = layout, config.core_layers
        shape = (num_rows, num_slots, config.num_kv_heads, config.head_dim)
        self._shape = shape
        self._planes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        slots = torch.arange(num_slots, device=pads.device)
        self._real = slots >= pads[:, None]
        self.start, self.step = 0, 1

    def at(self, start: int, step: int) -> None:
        """The next calls write slots from `start`, at loop step `step` (from 1)."""
        self.start, self.step = start, step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plane = self.layout.write_plane(self.step) if layer in self.core else 0
        if (layer, plane) not in self._planes:
            empty = torch.zeros(self._shape, device=v.device, dtype=v.dtype)
            self._planes[layer, plane] = (empty, empty.clone())
        keys, values = self._planes[layer, plane]
        stop = self.start + q.shape[1]
        keys[:, self.start : stop], values[:, self.start : stop] = k.to(keys.dtype), v
        slots = torch.arange(stop, device=q.device)
        causal = slots[None, :] <= torch.arange(self.start, stop, device=q.device)[:, None]
        # a padded query sees itself, so that no row of the softmax is empty
        own = slots[None, :] == torch.arange(self.start, stop, device=q.device)[:, None]
        mask = (causal[None] & self._real[:, None, :stop] | own[None])[:, None]
        grouped = q.shape[2] != keys.shape[2]
        out = F.scaled_dot_product_attention(
            q.to(keys.dtype).transpose(1, 2),
            keys[:, :stop].transpose(1, 2),
            values[:, :stop].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=grouped,
        )
        return out.transpose(1, 2)


@torch.no_grad()
def greedy(
    model: LoopedLM,
    prompts: Sequence[list[int]],
    depth: int,
    max_new_tokens: int,
    layout: str = "depth",
    stop_ids: tuple[int, ...] = (),
) -> list[list[int]]:
    """New token ids of each prompt at `depth` loops for prompt and decode alike, up to the first end or stop token."""
    stop_ids = (*model.config.eos_ids, *stop_ids)
    longest = max(len(prompt) for prompt in prompts)
    device = model.device
    pad_id = model.config.pad_id or 0
    tokens = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts], device=device)
    pads = torch.tensor([longest - len(p) for p in prompts], device=device)
    cache = DenseCache(model, get_layout(layout), len(prompts), longest + max_new_tokens, pads)
    ends = torch.tensor(stop_ids or (-1,), device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    out: list[Tensor] = []
    positions = (torch.arange(longest, device=device) - pads[:, None]).clamp_min(0)
    start, current = 0, tokens
    for step in range(max_new_tokens):
        best = _forward(model, current, positions, depth, cache, start)[:, -1].argmax(-1)
        out.append(best)
        done |= torch.isin(best, ends)
        if step % 16 == 15 and bool(done.all()):
            break
        start += current.shape[1]
        current, positions = best[:, None], positions[:, -1:] + 1
    return [_cut(row, stop_ids) for row in torch.stack(out, 1).tolist()]


def _forward(model: LoopedLM, tokens: Tensor, positions: Tensor, depth: int, cache: DenseCache, start: int) -> Tensor:
    """Logits [B, T, V] of tokens [B, T] whose slots begin at `start`."""
    cache.at(start, 1)
    state = model.init_state(torch.zeros_like(tokens), positions)
    h, injection = model.prelude(tokens, positions, cache, state)
    for step in range(1, depth + 1):
        cache.at(start, step)
        h = model.core(h, injection, positions, step, cache)
    return model.coda(h[:, -1:], positions[:, -1:], cache) if not model.coda_blocks else model.coda(h, positions, cache)


def _cut(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    stops = [i for i, token in enumerate(ids) if token in ends]
    return ids[: stops[0]] if stops else ids


def answer_of(text: str) -> str | None:
    """The number a completion gives, None where it gives none; what follows the first blank line does not count."""
    found = ANSWER.search(_STOP.split(text)[0])
    return found[1].replace(",", "").rstrip(".") if found else None
