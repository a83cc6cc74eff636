"""Credit for what an exit does to later tokens: the score-function term over sampled exits (ragged KV, appendix C)."""

# K trajectories, B rows, T tokens

from __future__ import annotations

import torch
from torch import Tensor


def suffix_sums(values: Tensor) -> Tensor:
    """At every token, the sum of values [..., T] from it to the end of its row."""
    return values.flip(-1).cumsum(-1).flip(-1)


def score_term(losses: Tensor, log_probs: Tensor, weights: Tensor, real: Tensor, dense: Tensor) -> Tensor:
    """Sum over tokens of log pi(e_i) times the advantage of the exit, mean over trajectories (eqs. 20, 21).

    losses and log_probs [K, B, T] at the sampled exits; weights [B, T] of the losses in the objective (0 where there
    is no target), so no division is left to do; real [B, T] bool, tokens that are not padding: their exits count, with
    or without a target. The return of an exit is the weighted loss from its token on. Baseline: with K = 1 the same
    sum of `dense` [B, T], the losses at full depth; else the mean return of the other trajectories. Gradients reach
    log_probs only. A positive advantage is a loss above the baseline.
    """
    count = len(losses)
    returns = suffix_sums((losses * weights).detach())
    if count == 1:
        baseline = suffix_sums((dense * weights).detach())[None]
    else:
        baseline = (returns.sum(0, keepdim=True) - returns) / (count - 1)
    return torch.where(real, log_probs * (returns - baseline), 0.0).sum() / count
