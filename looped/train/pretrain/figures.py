"""Figures of a training step to log: loss by depth, exits, and whether they go where depth helps."""

# B rows, T tokens, R loop steps, D width

from __future__ import annotations

import math

import torch
from torch import Tensor

from looped.train.pretrain import exits, ranks
from looped.train.pretrain.windows import Batch

THRESHOLD = 0.5
"""Of the hard exits that are logged."""


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [B, T] where mask [B, T] holds; 0 where it holds nowhere."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def interpolated(by_depth: Tensor, depth: Tensor) -> Tensor:
    """Value at a fractional depth (from 1) of a curve over depths 1..R, linear between neighbours."""
    at = (depth - 1).clamp(0, len(by_depth) - 1)
    low = at.floor().long()
    high = (low + 1).clamp_max(len(by_depth) - 1)
    return torch.lerp(by_depth[low], by_depth[high], at - low)


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson correlation of two tensors of one shape over all processes; 0 where either is constant."""
    x, y = x.flatten().double(), y.flatten().double()
    count = ranks.world() * len(x)
    x, y = x - ranks.total(x.sum()) / count, y - ranks.total(y.sum()) / count
    xy, xx, yy = ranks.total(torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()]))
    found: Tensor = xy / (xx * yy).sqrt().clamp_min(1e-12)
    return found.float()


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    """||after - before|| / ||after|| of states [B, T, D]: [B, T], the convergence gate's quantity."""
    after, before = after.float(), before.float()
    change: Tensor = torch.linalg.vector_norm(after - before, dim=-1) / torch.linalg.vector_norm(after, dim=-1)
    return change


def jumps(depths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """J0, J1 and J>=2: shares of neighbours in depths [B, T] whose exits differ by 0, by 1, by more."""
    apart = (depths[:, 1:] - depths[:, :-1]).abs()
    shares = [(apart == 0), (apart == 1), (apart >= 2)]
    none, one, more = (share.float().mean() if share.numel() else apart.sum().float() for share in shares)
    return none, one, more


@torch.no_grad()
def depth_figures(losses: Tensor, pi: Tensor, batch: Batch, readouts: list[Tensor]) -> dict[str, Tensor]:
    """Of losses and pi [B, T, R] and readouts of a forward. Means over a group of tokens have its name in theirs.

    `adaptive_gain` is the loss of fixed depths at the exits' mean depth minus the loss at the exits; `drift_d` is what
    loop d changes, of the first row.
    """
    num_loops, answer = losses.shape[-1], batch.answer
    depth = exits.hard_exits(pi, THRESHOLD)
    at_exit = losses.gather(-1, depth[..., None] - 1).squeeze(-1)
    log = {"entropy": exits.entropy(pi).mean(), "exit_depth": depth.float().mean()}
    log["mean_entropy"] = exits.entropy(ranks.mean(pi.mean((0, 1))))
    for d in range(num_loops):
        log[f"ce_{d + 1}"] = losses[..., d].mean()
        log[f"answer_ce_{d + 1}"] = masked_mean(losses[..., d], answer)
        log[f"direct_ce_{d + 1}"] = masked_mean(losses[..., d], batch.direct)
        log[f"pi_{d + 1}"] = pi[..., d].mean()
        log[f"hard_exit_{d + 1}"] = (depth == d + 1).float().mean()
    log["jump_0"], log["jump_1"], log["jump_2"] = jumps(depth)
    everyone = torch.ones_like(answer)
    log["adaptive_gain"] = _adaptive_gain(losses, depth, at_exit, everyone)
    log["answer_gain"] = _adaptive_gain(losses, depth, at_exit, answer)
    log["answer_depth"] = masked_mean(depth.float(), answer)
    log["gain_correlation"] = correlation(depth.float(), losses[..., 0] - losses[..., -1])
    for d in range(1, num_loops):
        before, after = readouts[d - 1][:1].float(), readouts[d][:1].float()
        log[f"drift_{d + 1}"] = (after - before).norm() / after.norm()
    return log


def _adaptive_gain(losses: Tensor, depth: Tensor, at_exit: Tensor, mask: Tensor) -> Tensor:
    """Over the tokens of mask [B, T] of all processes."""
    sums = [(losses[..., d] * mask).sum() for d in range(losses.shape[-1])]
    sums += [(depth * mask).sum().float(), (at_exit * mask).sum(), mask.sum().float()]
    *curve, mean_depth, loss, count = ranks.total(torch.stack(sums))
    count = count.clamp_min(1)
    gain: Tensor = interpolated(torch.stack(curve) / count, mean_depth / count) - loss / count
    return gain


def exit_figures(losses: Tensor, depths: Tensor, batch: Batch, value: Tensor) -> dict[str, Tensor]:
    """Of a forward whose tokens exit: losses and depths [B, T] at the exits, and the value that is minimised."""
    losses = losses.detach()
    log = {"ragged_loss": value.detach(), "ragged_depth": depths.float().mean()}
    log["ragged_answer"] = masked_mean(losses, batch.answer)
    return log


def work(like: Tensor, loops: float, heads: float) -> dict[str, Tensor]:
    """What a micro-batch cost: loop steps with a backward pass, and how often each token read the head."""
    return {"loops_run": like.new_full((), loops), "heads_run": like.new_full((), heads)}


def perplexities(means: dict[str, float], loops: int) -> dict[str, float]:
    """Perplexities of mean losses that were logged: at full depth, and at exits under the layout trained for."""
    pairs = {"full_perplexity": f"ce_{loops}", "ragged_perplexity": "ragged_loss"}
    return {name: math.exp(min(means[loss], 50.0)) for name, loss in pairs.items() if loss in means}
