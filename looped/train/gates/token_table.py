"""What a teacher says of each token id on average: a gate that looks at nothing but the token, as a baseline."""

# N tokens, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from looped.gates.dial import Curve

_PRIOR = 5.0
"""Tokens that the mean over all ids counts as, for an id that was hardly seen."""
_SMALLEST = 1e-9


class TokenTable:
    """Sums of a teacher's curve by token id; of measures of change, sums of their logarithms."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.counts = torch.zeros(0)
        self.like: Curve | None = None

    def add(self, tokens: Tensor, curve: Curve) -> None:
        """Add the curve of `tokens` [N]."""
        values = curve.cumulative.clamp_min(_SMALLEST).log() if curve.below else curve.cumulative
        values, ids = values.float().cpu(), tokens.cpu()
        size = int(ids.max()) + 1
        if self.sums is None:
            self.sums = torch.zeros(0, values.shape[1])
        if size > len(self.sums):
            self.sums = torch.cat((self.sums, torch.zeros(size - len(self.sums), values.shape[1])))
            self.counts = torch.cat((self.counts, torch.zeros(size - len(self.counts))))
        self.sums.index_add_(0, ids, values)
        self.counts.index_add_(0, ids, torch.ones(len(ids)))
        self.like = curve._replace(cumulative=curve.cumulative[:0])

    def curve(self, tokens: Tensor, min_depth: int) -> Curve | None:
        """The curve that the table expects of `tokens` [N], from `min_depth` on; None where it is empty."""
        if self.sums is None or self.like is None:
            return None
        mean = self.sums.sum(0) / self.counts.sum()
        known = tokens.cpu().clamp_max(len(self.sums) - 1)
        fresh = tokens.cpu() >= len(self.sums)
        sums, counts = self.sums[known].double(), self.counts[known].double()
        sums[fresh], counts[fresh] = 0.0, 0.0
        values = (sums + _PRIOR * mean) / (counts + _PRIOR)[:, None]
        values = (values.exp() if self.like.below else values).to(tokens.device)
        return Curve(values, self.like.min_depth, self.like.below).from_depth(min_depth)
