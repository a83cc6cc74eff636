"""The losses of pretraining: Ouro's exit-weighted one with its ragged steps, Huginn's with sampled loop counts."""

# B rows, T tokens, R loop steps, D width

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from looped.model import LoopedLM
from looped.model.attention import Attend, dense_causal
from looped.train import exits, ranks
from looped.train.kept import BestAvailable, LastPlane
from looped.train.losses import chunked_loss, head_loss, logits_loss
from looped.train.recipe import Objective, Recurrence
from looped.train.windows import Batch


class Moment(NamedTuple):
    """What a loss may depend on besides model and data."""

    step: int
    progress: float
    beta: float
    seed: int


class Loss(NamedTuple):
    """The value to minimise, and detached scalars to log."""

    value: Tensor
    log: dict[str, Tensor]


class TrainingLoss(Protocol):
    """A loss of one micro-batch."""

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss: ...


def gate_hazard(model: LoopedLM, z: Tensor) -> Tensor:
    """lambda [..., 1] in float32 of readouts z [..., D], outside autocast: a threshold acts on its sums."""
    gate = model.exit_gate
    assert isinstance(gate, nn.Linear)
    with torch.autocast(z.device.type, enabled=False):
        return torch.sigmoid(nn.functional.linear(z.float(), gate.weight.float(), gate.bias.float()))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [B, T] where mask [B, T] holds; 0 where it holds nowhere."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def weighted_mean(values: Tensor, mask: Tensor, other: float) -> Tensor:
    """Mean of values [B, T] with weight 1 where mask holds and `other` elsewhere.

    Over several processes, the mean of what each returns is the mean over all their tokens.
    """
    if other == 1.0:
        return values.mean()
    weights = torch.where(mask, 1.0, other)
    return (values * weights).sum() / ranks.mean(weights.sum())


class OuroLoss:
    """Sum over depths of pi_d CE_d plus beta KL to the exit prior; later every second step is ragged.

    Dense step (ragged KV, eqs. 9 and 10): weights (1 - a) pi + a / R keep every depth trained. Ragged step
    (appendix C): exits are drawn from the hazards and detached, later tokens see K/V of depth min(r, e), and the loss
    is taken at the exit.
    """

    def __init__(self, options: Objective, num_loops: int, token_loss: Callable[..., Tensor] = head_loss) -> None:
        self.options, self.num_loops = options, num_loops
        self.prior = exits.exit_prior(options.prior, num_loops)
        self.attend = BestAvailable()
        self.token_loss = token_loss

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        ragged = moment.progress >= self.options.ragged_from and moment.step % 2 == 1
        return self.ragged(model, batch, moment) if ragged else self.dense(model, batch, moment)

    def dense(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        readouts = model.states(batch.inputs, self.num_loops)
        hazards = torch.cat([gate_hazard(model, z) for z in readouts], -1)
        pi = exits.exit_distribution(hazards)
        losses = torch.stack([self._loss(model, z, batch.targets) for z in readouts], -1)
        floor = self.options.floor
        weights = (1 - floor) * pi + floor / self.num_loops
        value = weighted_mean((weights * losses).sum(-1), batch.answer, self.options.question_weight)
        kl = self._kl(pi, batch.answer)
        total = value + moment.beta * kl
        if self.options.depth_cost:
            total = total + self.options.depth_cost * (pi.mean((0, 1)) * self._depths(pi)).sum()
        return Loss(total, self._log(total, losses.detach(), pi.detach(), kl.detach(), batch, readouts))

    def ragged(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        generator = torch.Generator(batch.inputs.device).manual_seed(moment.seed)
        rows, length = batch.inputs.shape
        shape = (ranks.world() * rows, length, self.num_loops)
        draws = ranks.mine(torch.rand(shape, device=batch.inputs.device, generator=generator))

        def leave(z: Tensor, step: int) -> Tensor:
            return draws[..., step - 1] < gate_hazard(model, z.detach()).squeeze(-1)

        z, depth = ragged_readout(model, batch.inputs, self.num_loops, self.attend, leave)
        losses = self._loss(model, z, batch.targets)
        value = weighted_mean(losses, batch.answer, self.options.question_weight)
        log = {"ragged_loss": value.detach(), "ragged_depth": depth.float().mean()}
        log["ragged_answer"] = masked_mean(losses.detach(), batch.answer)
        return Loss(value, log)

    def _kl(self, pi: Tensor, answer: Tensor) -> Tensor:
        """KL to the prior in nats, of pi [B, T, R]: over all tokens, or the mean over answers and over the rest.

        Two groups keep the rest from taking all shallow exits, which would leave generation, all answer, at full depth.
        """
        prior = self.prior.to(pi.device)
        if self.options.kl == "local":
            return exits.local_kl(pi, prior)
        if self.options.kl_tokens == "all":
            return exits.global_kl(pi, prior)
        return 0.5 * (exits.global_kl(pi, prior, answer) + exits.global_kl(pi, prior, ~answer))

    def _loss(self, model: LoopedLM, z: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(z, model.head.weight, targets, loss=self.token_loss)

    def _depths(self, like: Tensor) -> Tensor:
        return torch.arange(1, self.num_loops + 1, device=like.device, dtype=torch.float32)

    @torch.no_grad()
    def _log(
        self, total: Tensor, losses: Tensor, pi: Tensor, kl: Tensor, batch: Batch, readouts: list[Tensor]
    ) -> dict[str, Tensor]:
        """Guards: CE by depth, mean pi, adaptive gain and the correlation of exit depth with CE gain."""
        log = {"loss": total.detach(), "kl": kl, "entropy": exits.entropy(pi).mean()}
        answer = batch.answer
        for d in range(self.num_loops):
            log[f"ce_{d + 1}"] = losses[..., d].mean()
            log[f"answer_ce_{d + 1}"] = masked_mean(losses[..., d], answer)
            log[f"direct_ce_{d + 1}"] = masked_mean(losses[..., d], batch.direct)
            log[f"pi_{d + 1}"] = pi[..., d].mean()
        depth = exits.hard_exits(pi, 0.5)
        at_exit = losses.gather(-1, depth[..., None] - 1).squeeze(-1)
        log["exit_depth"] = depth.float().mean()
        log["adaptive_gain"] = interpolated(losses.mean((0, 1)), log["exit_depth"]) - at_exit.mean()
        mean_depth = masked_mean(depth.float(), answer)
        fixed = torch.stack([log[f"answer_ce_{d + 1}"] for d in range(self.num_loops)])
        log["answer_gain"] = interpolated(fixed, mean_depth) - masked_mean(at_exit, answer)
        log["answer_depth"] = mean_depth
        log["gain_correlation"] = correlation(depth.float(), losses[..., 0] - losses[..., -1])
        for d in range(1, self.num_loops):
            before, after = readouts[d - 1][:1].detach().float(), readouts[d][:1].detach().float()
            log[f"drift_{d + 1}"] = (after - before).norm() / after.norm()
        return log


def ragged_readout(
    model: LoopedLM,
    inputs: Tensor,
    num_loops: int,
    attend: BestAvailable,
    leave: Callable[[Tensor, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """One parallel forward in which tokens exit: readout at the exit [B, T, D] and its depth [B, T].

    `leave(z, step)` [B, T] bool is the exit decision after `step`, asked at steps before R only.
    """
    positions = torch.arange(inputs.shape[-1], device=inputs.device)
    attend.reset()
    h, injection = model.prelude(inputs, positions, attend, None)
    active = torch.ones_like(inputs, dtype=torch.bool)
    depth = torch.zeros_like(inputs)
    for step in range(1, num_loops + 1):
        attend.active = active
        new = model.core(h, injection, positions, step, attend)
        h = new if step == 1 else torch.where(active[..., None], new, h)
        depth = depth + active
        if step < num_loops:
            active = active & ~leave(model.readout(h), step)
    attend.reset()
    return model.readout(h), depth


def interpolated(by_depth: Tensor, depth: Tensor) -> Tensor:
    """Value at a fractional depth (from 1) of a curve over depths 1..R, linear between neighbours."""
    at = (depth - 1).clamp(0, len(by_depth) - 1)
    low = at.floor().long()
    high = (low + 1).clamp_max(len(by_depth) - 1)
    return torch.lerp(by_depth[low], by_depth[high], at - low)


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson correlation of two tensors of one shape; 0 where either is constant."""
    x, y = x.flatten() - x.mean(), y.flatten() - y.mean()
    scale: Tensor = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return (x * y).sum() / scale.clamp_min(1e-12)


class HuginnLoss:
    """Cross-entropy after a sampled number of loop steps from random states (and, if wanted, at a smaller number too).

    A share of the steps trains for a single K/V plane: a first forward without gradient gives every position's K/V at
    a random exit depth, the second lets each query read those of earlier positions and its own of the present step.
    """

    def __init__(self, options: Recurrence, num_loops: int, token_loss: Callable[..., Tensor] = logits_loss) -> None:
        self.options, self.num_loops = options, num_loops
        self.token_loss = token_loss
        self.last_plane = LastPlane()

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        cpu = torch.Generator().manual_seed(moment.seed)
        steps = self.sample_steps(cpu)
        positions = torch.arange(batch.inputs.shape[-1], device=batch.inputs.device)
        state = initial_state(model, batch.inputs, moment.seed)
        shared = (
            moment.progress >= self.options.kv_shared_from
            and float(torch.rand((), generator=cpu)) < self.options.kv_shared_fraction
        )
        attend: Attend = dense_causal
        if shared:
            attend = self.last_plane
            self._fill_last_plane(model, batch.inputs, state, steps, cpu)
        shallow = 0
        if self.options.shallow_weight and steps > 1:
            shallow = int(torch.randint(1, steps, (), generator=cpu))
        h, injection = model.prelude(batch.inputs, positions, dense_causal, state)
        free = max(0, steps - self.options.backprop) if self.options.backprop else 0
        total, log = torch.zeros((), device=batch.inputs.device), dict[str, Tensor]()
        change = torch.zeros((), device=batch.inputs.device)
        for step in range(1, steps + 1):
            before = h
            if step == free + 1 > 1:
                torch.clear_autocast_cache()  # it holds weights cast without gradient
            with torch.set_grad_enabled(torch.is_grad_enabled() and step > free):
                h = model.core(h, injection, positions, step, attend)
            if step == shallow and step > free:
                early = self._mean(self._loss(model, h, positions, batch), batch)
                total = total + self.options.shallow_weight * early
                log[f"ce_{step}"] = early.detach()
            if step == steps:
                change = relative_change(h.detach(), before.detach()).mean()
        losses = self._loss(model, h, positions, batch)
        total = (total + self._mean(losses, batch)) / (1 + (self.options.shallow_weight if shallow else 0.0))
        self.last_plane.reset()
        deepest, kind = losses.detach(), "shared_" if shared else ""
        log |= {"loss": total.detach(), f"{kind}ce_{steps}": deepest.mean(), "steps": change.new_tensor(float(steps))}
        log[f"{kind}answer_ce_{steps}"] = masked_mean(deepest, batch.answer)
        log[f"{kind}direct_ce_{steps}"] = masked_mean(deepest, batch.direct)
        log[f"change_{steps}"] = change
        return Loss(total, log)

    def _mean(self, losses: Tensor, batch: Batch) -> Tensor:
        return weighted_mean(losses, batch.answer, self.options.question_weight)

    def sample_steps(self, generator: torch.Generator) -> int:
        """Loop steps of one micro-batch, 1..R."""
        options = self.options
        if options.sampling == "fixed":
            return self.num_loops
        if options.sampling == "uniform":
            return int(torch.randint(1, self.num_loops + 1, (), generator=generator))
        normal = float(torch.randn((), generator=generator))
        rate = math.exp(math.log(options.mean) - 0.5 * options.sigma**2 + options.sigma * normal)
        steps = int(torch.poisson(torch.tensor(rate), generator=generator))
        return min(max(steps, 1), self.num_loops)

    def _loss(self, model: LoopedLM, h: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        return self.token_loss(model.coda(h, positions, dense_causal), batch.targets)

    @torch.no_grad()
    def _fill_last_plane(
        self, model: LoopedLM, inputs: Tensor, state: Tensor | None, steps: int, generator: torch.Generator
    ) -> None:
        """K/V of every position at a random exit depth in ceil(R/2)..R of a dense forward."""
        low = (steps + 1) // 2
        shape = (ranks.world() * inputs.shape[0], inputs.shape[1])
        depth = ranks.mine(torch.randint(low, steps + 1, shape, generator=generator)).to(inputs.device)
        self.last_plane.begin(model.config.core_layers)
        record_last_plane(model, inputs, state, depth, self.last_plane)
        torch.clear_autocast_cache()  # it holds weights cast without gradient


def record_last_plane(model: LoopedLM, inputs: Tensor, state: Tensor | None, depth: Tensor, plane: LastPlane) -> None:
    """Run the core densely and keep each position's K/V of step depth [B, T] in `plane`, ready to be read."""
    positions = torch.arange(inputs.shape[-1], device=inputs.device)
    h, injection = model.prelude(inputs, positions, dense_causal, state)
    for step in range(1, int(depth.max()) + 1):
        plane.active = depth >= step
        h = model.core(h, injection, positions, step, plane)
    plane.replay()


def initial_state(model: LoopedLM, inputs: Tensor, seed: int) -> Tensor | None:
    """The noise that the loop starts from, a fresh one per row and run: [B, T, D], None for Ouro."""
    positions = torch.arange(inputs.shape[-1], device=inputs.device).expand_as(inputs)
    rows = ranks.mine(torch.arange(ranks.world() * inputs.shape[0], device=inputs.device))[:, None].expand_as(inputs)
    return model.init_state(rows + (seed << 20), positions)


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    """||after - before|| / ||after|| of states [B, T, D]: [B, T], the convergence gate's quantity."""
    after, before = after.float(), before.float()
    change: Tensor = torch.linalg.vector_norm(after - before, dim=-1) / torch.linalg.vector_norm(after, dim=-1)
    return change
