"""Attention over two streams of K/V: what earlier tokens left for others, and what a token has at the present step.

Query i sees what tokens j < i left and its own present K/V (private-diagonal attention; ragged KV, eq. 17). A query of
the prompt, which runs in parallel, sees the present K/V of all j <= i instead. One mask over 2 T columns: FlexAttention
on a GPU, a dense mask elsewhere.
"""

# B rows, T tokens, S = 2 T columns, H heads, G key/value heads, K head dimension

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["auto", "flex", "mask"]
_FLEX_HEAD_DIM = 16
"""Its kernels multiply blocks at least as wide."""


class TwoStreams:
    """Attention of one batch; the mask is made once and serves every layer and step.

    `prompt_lens` [B] are the tokens of each row that run as a prompt; None means none.
    """

    def __init__(self, prompt_lens: Tensor | None = None, kernel: Kernel = "auto") -> None:
        self.prompt_lens, self.kernel = prompt_lens, kernel
        self._mask: Any = None

    def __call__(self, q: Tensor, left_k: Tensor, left_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, H, K], all keys and values [B, T, G, K], to [B, T, H, K]."""
        grouped = q.shape[2] != k.shape[2]
        queries, keys, values = (x.transpose(1, 2) for x in (q, torch.cat((left_k, k), 1), torch.cat((left_v, v), 1)))
        served = q.is_cuda and q.dtype != torch.float64 and q.shape[-1] >= _FLEX_HEAD_DIM
        if self.kernel == "flex" or (self.kernel == "auto" and served):
            out = self._flex(queries, keys, values, grouped)
        else:
            if self._mask is None:
                self._mask = dense_mask(q.shape[1], self.prompt_lens, q.device)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length = q.shape[2]
        attention, make_mask = flex_attention, create_block_mask
        if q.is_cuda:
            attention, make_mask = _compiled(flex_attention), _compiled(create_block_mask)
        if self._mask is None:
            prompt_lens = self.prompt_lens

            def visible(b: Tensor, h: Tensor, i: Tensor, column: Tensor) -> Tensor:
                left, j = column < length, column % length
                earlier, own = j < i, j == i
                if prompt_lens is None:
                    return (left & earlier) | (~left & own)
                prompt = i < prompt_lens[b]
                return (left & earlier & ~prompt) | (~left & (own | (prompt & earlier)))

            rows = None if prompt_lens is None else len(prompt_lens)
            self._mask = make_mask(visible, rows, None, length, 2 * length, device=q.device)
        out: Tensor = attention(q, k, v, block_mask=self._mask, enable_gqa=grouped)
        return out


_COMPILED: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    """`function`, compiled once."""
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]


def dense_mask(length: int, prompt_lens: Tensor | None, device: torch.device) -> Tensor:
    """Which of 2 T columns each query sees: bool [T, 2 T], or [B, 1, T, 2 T] where rows have prompts."""
    earlier = torch.ones(length, length, device=device, dtype=torch.bool).tril(-1)
    own = torch.eye(length, device=device, dtype=torch.bool)
    if prompt_lens is None:
        return torch.cat((earlier, own), 1)
    prompt = (torch.arange(length, device=device) < prompt_lens[:, None])[..., None]
    return torch.cat((earlier & ~prompt, own | (earlier & prompt)), -1)[:, None]
