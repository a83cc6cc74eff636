"""Cross-entropy per token without keeping logits: one chunk at a time, logits recomputed in the backward pass."""

# B rows, T tokens, N tokens flat, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 32768


def head_loss(z: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of the head on z [N, D], weight [V, D], targets [N] long: [N], at least float32."""
    return logits_loss(F.linear(z, weight), targets)


def logits_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats: logits [..., V] and targets [...] to [...], at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1) - wide.gather(-1, targets[..., None]).squeeze(-1)


def chunked_loss(
    z: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = CHUNK_TOKENS,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = head_loss,
) -> Tensor:
    """`head_loss` of z [B, T, D] and targets [B, T], holding the logits of `chunk` tokens at once: [B, T].

    Gradients reach z and the head; any weighting of the returned losses (such as pi) gets its own gradient outside.
    """
    flat, wanted = z.flatten(0, -2), targets.flatten()
    chunk = -(-len(flat) // -(-len(flat) // chunk))  # equal chunks, so that a compiled loss sees one shape
    grad = torch.is_grad_enabled()
    parts = [
        checkpoint(loss, part, weight, want, use_reentrant=False) if grad else loss(part, weight, want)
        for part, want in zip(flat.split(chunk), wanted.split(chunk), strict=True)  # type: ignore[no-untyped-call]
    ]
    return torch.cat(parts).view(targets.shape)
