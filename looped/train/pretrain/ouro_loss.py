"""The training loss of a fully looped model with an exit gate (Ouro): exits, a prior, a KV layout to live with."""

# B rows, T tokens, R loop steps, D width, K trajectories

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from looped.kv import get_layout
from looped.model import LoopedLM
from looped.train.pretrain import exits, ranks, schedule
from looped.train.pretrain.figures import THRESHOLD, correlation, depth_figures, exit_figures, work
from looped.train.pretrain.guards import depth_is_idle
from looped.train.pretrain.kept import Dense
from looped.train.pretrain.losses import chunked_loss, head_loss
from looped.train.pretrain.objective import Loss, Moment, token_weights, weighted_mean
from looped.train.pretrain.recipe import Objective
from looped.train.pretrain.reinforce import score_term
from looped.train.pretrain.rollout import Leave, Setting, draw_prompts, loops_trained, never, one_forward, roll
from looped.train.pretrain.windows import Batch


class OuroLoss:
    """Sum over depths of pi_d CE_d plus beta KL to the exit prior; later, steps under a KV layout among them.

    Dense step (ragged KV, eqs. 9 and 10): weights (1 - a) pi + a / R keep every depth trained. Steps under the layout
    (appendix C), a share of all from `ragged_from` on:

    - alternate: exits are drawn from the hazards and detached, later tokens see what the exits left, and the loss is
      taken at the exit, without a KL;
    - counterfactual: exits by threshold are committed, and the dense objective is taken of states that see what others
      left and go on privately (eqs. 17 and 18);
    - reinforce, every step: the dense objective, the loss at K sets of sampled exits, and the score term (eq. 22).
    """

    def __init__(self, options: Objective, num_loops: int, token_loss: Callable[..., Tensor] = head_loss) -> None:
        self.options, self.num_loops = options, num_loops
        self.layout = get_layout(options.kv)
        self.token_loss = token_loss

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        options = self.options
        late = moment.progress >= options.ragged_from and options.ragged_from < 1 and not self.layout.needs_dense
        if late and options.aware == "reinforce":
            return self.reinforce(model, batch, moment)
        if not (late and schedule.under_layout(options.kv_share, moment.step)):
            return self.dense(model, batch, moment)
        return (self.ragged if options.aware == "alternate" else self.counterfactual)(model, batch, moment)

    def dense(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        """The objective over depths, all tokens at all steps."""
        return self._dense(model, batch, moment)[0]

    def _dense(self, model: LoopedLM, batch: Batch, moment: Moment) -> tuple[Loss, Tensor]:
        """The same, and the losses at full depth [B, T]."""
        options, num_loops = self.options, self.num_loops
        if options.sampling != "fixed":
            dice = torch.Generator().manual_seed(moment.seed)
            num_loops = schedule.sample_loops(options.sampling, options.mean, options.sigma, num_loops, dice)
        free = max(0, num_loops - options.backprop) if options.backprop else 0
        rollout = one_forward(model, batch.inputs, num_loops, Dense(), never, free=free)
        readouts = [model.readout(h) for h in rollout.states]
        value, losses, pi, log = self._over_depths(model, batch, moment, readouts)
        losses = losses.detach()
        figures = depth_figures(losses, pi.detach(), batch, [z.detach() for z in readouts])
        cost = work(losses, loops_trained(Setting(get_layout("depth")), num_loops, free), num_loops)
        return Loss(value, {"loss": value.detach(), **log, **figures, **cost}), losses[..., -1]

    def ragged(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        """The loss at sampled exits under the layout."""
        generator = torch.Generator(batch.inputs.device).manual_seed(moment.seed)
        sampled = self._sampled(model, batch, generator)
        setting = self._setting(batch, generator)
        rollout = roll(model, batch.inputs, self.num_loops, setting, partial(_same, sampled))
        losses = self._loss(model, model.readout(rollout.at_exit()), batch.targets)
        value = weighted_mean(losses, batch, self.options)
        cost = work(value, loops_trained(setting, self.num_loops), 1)
        return Loss(value, exit_figures(losses, rollout.depths, batch, value) | cost)

    def counterfactual(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        """The objective over depths of every token, against the K/V that committed exits leave."""
        generator = torch.Generator(batch.inputs.device).manual_seed(moment.seed)
        setting = self._setting(batch, generator)._replace(private=True)

        def commit() -> Leave:
            return exits.by_threshold(model, self.options.commit_threshold)

        rollout = roll(model, batch.inputs, self.num_loops, setting, commit)
        readouts = [model.readout(h) for h in rollout.states]
        value, losses, pi, log = self._over_depths(model, batch, moment, readouts)
        at_exit = losses.gather(-1, rollout.depths[..., None] - 1).squeeze(-1)
        told = weighted_mean(at_exit.detach(), batch, self.options)
        log = {"loss": value.detach(), **log}
        log |= depth_figures(losses.detach(), pi.detach(), batch, [z.detach() for z in readouts])
        if self.options.kv_share < 1:  # beside dense steps, whose figures have the plain names
            log = {f"private_{name}": figure for name, figure in log.items()}
        log |= work(value, loops_trained(setting, self.num_loops), self.num_loops)
        return Loss(value, log | exit_figures(at_exit, rollout.depths, batch, told))

    def reinforce(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        """The dense objective, the loss at K sets of sampled exits, and the score term."""
        options = self.options
        dense, full_depth = self._dense(model, batch, moment)
        generator = torch.Generator(batch.inputs.device).manual_seed(moment.seed)
        setting = self._setting(batch, generator)
        losses, log_probs, depths = [], [], []
        for _ in range(options.trajectories):
            sampled = self._sampled(model, batch, generator)
            rollout = roll(model, batch.inputs, self.num_loops, setting, partial(_same, sampled))
            losses.append(self._loss(model, model.readout(rollout.at_exit()), batch.targets))
            hazards = torch.cat([exits.gate_hazard(model, model.readout(h)) for h in rollout.states], -1)
            log_probs.append(exits.log_probability(hazards, rollout.depths))
            depths.append(rollout.depths)
        weights = token_weights(batch, options)
        at_exits = torch.stack(losses)
        mean = (at_exits * weights).sum() / len(losses)
        # windows have no padding: every exit counts but those of prompts, which were not drawn
        real = torch.ones_like(batch.answer)
        if setting.prompt_lens is not None:
            real = torch.arange(real.shape[1], device=real.device) >= setting.prompt_lens[:, None]
        score = score_term(at_exits, torch.stack(log_probs), weights, real, full_depth)
        value = dense.value + options.ragged_weight * (mean + options.score_weight * score)
        log = dense.log | {"score": score.detach()}
        log["loops_run"] = log["loops_run"] + options.trajectories * loops_trained(setting, self.num_loops)
        log["heads_run"] = log["heads_run"] + options.trajectories
        return Loss(value, log | exit_figures(at_exits.mean(0), torch.cat(depths), batch, mean))

    def _over_depths(
        self, model: LoopedLM, batch: Batch, moment: Moment, readouts: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Expected loss over depths, prior and costs of readouts z_1..z_n: value, losses and pi [B, T, n], a log."""
        options, num_loops = self.options, len(readouts)
        pi = exits.exit_distribution(torch.cat([exits.gate_hazard(model, z) for z in readouts], -1))
        losses = torch.stack([self._loss(model, z, batch.targets) for z in readouts], -1)
        weights = (1 - options.floor) * pi + options.floor / num_loops
        value = weighted_mean((weights * losses).sum(-1), batch, options)
        kl = self._kl(pi, batch.answer)
        log = {"kl": kl.detach()}
        beta: Tensor | float = moment.beta
        if options.beta_pause:
            idle = self._idle(losses.detach(), pi.detach(), batch, readouts, moment.progress)
            beta = torch.where(idle, 0.0, beta)
            log["beta_paused"] = idle.float()
        value = value + beta * kl
        mean_depth = (pi.mean((0, 1)) * torch.arange(1, num_loops + 1, device=pi.device)).sum()
        if options.depth_cost:
            value = value + options.depth_cost * mean_depth
        if options.depth_budget is not None:
            value = value + options.budget_cost * (ranks.mean(mean_depth) - options.depth_budget).clamp_min(0)
        return value, losses, pi, log

    def _kl(self, pi: Tensor, answer: Tensor) -> Tensor:
        """KL to the prior in nats, of pi [B, T, R]: over all tokens, or the mean over answers and over the rest.

        Two groups keep the rest from taking all shallow exits, which would leave generation, all answer, at full depth.
        """
        options = self.options
        prior = exits.exit_prior(options.prior, pi.shape[-1], options.prior_rate).to(pi.device)
        if options.kl == "local":
            return exits.local_kl(pi, prior)
        if options.kl_tokens == "all":
            return exits.global_kl(pi, prior)
        return 0.5 * (exits.global_kl(pi, prior, answer) + exits.global_kl(pi, prior, ~answer))

    @torch.no_grad()
    def _idle(self, losses: Tensor, pi: Tensor, batch: Batch, readouts: list[Tensor], progress: float) -> Tensor:
        """Whether the batch of all processes says that depth is not being used."""
        gains = losses[..., 0] - losses[..., -1]
        direct = batch.direct
        sums = ranks.total(torch.stack([(gains * direct).sum(), direct.sum().float(), gains.mean() / ranks.world()]))
        gain = torch.where(sums[1] > 0, sums[0] / sums[1].clamp_min(1), sums[2])
        drift = None
        if len(readouts) > 1:
            wide = torch.promote_types(readouts[1].dtype, torch.float32)
            parts = (readouts[1] - readouts[0], readouts[1])
            changed, whole = ranks.total(torch.stack([torch.linalg.vector_norm(x, dtype=wide) ** 2 for x in parts]))
            drift = (changed / whole).sqrt()
        depth = exits.hard_exits(pi, THRESHOLD).float()
        return depth_is_idle(progress, gain, correlation(depth, gains), drift)

    def _setting(self, batch: Batch, generator: torch.Generator) -> Setting:
        options = self.options
        prompt_lens = draw_prompts(options.kv_prompt, batch.inputs, generator)
        return Setting(self.layout, False, prompt_lens, options.kv_passes, options.kv_gradient)

    def _sampled(self, model: LoopedLM, batch: Batch, generator: torch.Generator) -> Leave:
        """Exits drawn with the gate's probabilities; the same numbers in every forward, on any number of processes."""
        rows, length = batch.inputs.shape
        shape = (ranks.world() * rows, length, self.num_loops)
        draws = ranks.mine(torch.rand(shape, device=batch.inputs.device, generator=generator))
        return exits.by_chance(model, draws)

    def _loss(self, model: LoopedLM, z: Tensor, targets: Tensor) -> Tensor:
        return chunked_loss(z, model.head.weight, targets, loss=self.token_loss)


def _same(leave: Leave) -> Leave:
    return leave
