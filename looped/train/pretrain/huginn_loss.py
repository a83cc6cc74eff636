"""The training loss of a prelude-core-coda model (Huginn): a sampled number of loop steps, a KV layout to live with."""

# B rows, T tokens, D width

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from looped.kv import get_layout
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.pretrain import ranks
from looped.train.pretrain.figures import masked_mean, relative_change, work
from looped.train.pretrain.losses import logits_loss
from looped.train.pretrain.objective import Loss, Moment, weighted_mean
from looped.train.pretrain.recipe import Recurrence
from looped.train.pretrain.rollout import Setting, draw_prompts, fixed, initial_state, loops_trained, roll
from looped.train.pretrain.schedule import sample_loops
from looped.train.pretrain.windows import Batch


class HuginnLoss:
    """Cross-entropy after a sampled number of loop steps from random states (and, if wanted, at a smaller number too).

    A share of the steps is under a KV layout: earlier tokens left in the later half of the steps, each at a depth of
    its own, and every query goes on to the last step with what they left and its own K/V of the present step.
    """

    def __init__(self, options: Recurrence, num_loops: int, token_loss: Callable[..., Tensor] = logits_loss) -> None:
        self.options, self.num_loops = options, num_loops
        self.layout = get_layout(options.kv)
        self.token_loss = token_loss

    def __call__(self, model: LoopedLM, batch: Batch, moment: Moment) -> Loss:
        options = self.options
        least = min(options.least, self.num_loops)
        dice = torch.Generator().manual_seed(moment.seed)
        steps = max(sample_loops(options.sampling, options.mean, options.sigma, self.num_loops, dice), least)
        under_layout = moment.progress >= options.kv_from and float(torch.rand((), generator=dice)) < options.kv_share
        setting, depths = self._setting(batch, steps, under_layout, dice)
        state = initial_state(model, batch.inputs, moment.seed)
        free = max(0, steps - options.backprop) if options.backprop else 0
        rollout = roll(model, batch.inputs, steps, setting, lambda: fixed(depths), state, free)
        shallow = 0
        if options.shallow_weight and steps > least:
            shallow = int(torch.randint(least, steps, (), generator=dice))
        positions = torch.arange(batch.inputs.shape[-1], device=batch.inputs.device)
        losses = self._loss(model, rollout.states[-1], positions, batch)
        total = self._mean(losses, batch)
        log = work(total, loops_trained(setting, steps, free), 1 + (shallow > free))
        if shallow > free:
            early = self._mean(self._loss(model, rollout.states[shallow - 1], positions, batch), batch)
            total = (total + options.shallow_weight * early) / (1 + options.shallow_weight)
            log[f"ce_{shallow}"] = early.detach()
        deepest, kind = losses.detach(), "shared_" if under_layout else ""
        log |= {"loss": total.detach(), f"{kind}ce_{steps}": deepest.mean(), "steps": deepest.new_tensor(float(steps))}
        log[f"{kind}answer_ce_{steps}"] = masked_mean(deepest, batch.answer)
        log[f"{kind}direct_ce_{steps}"] = masked_mean(deepest, batch.direct)
        if steps > 1:
            after, before = rollout.states[-1].detach(), rollout.states[-2].detach()
            log[f"change_{steps}"] = relative_change(after, before).mean()
        return Loss(total, log)

    def _setting(self, batch: Batch, steps: int, under_layout: bool, dice: torch.Generator) -> tuple[Setting, Tensor]:
        """How tokens meet each other's K/V, and exits [B, T]; under the layout drawn in ceil(steps / 2)..steps."""
        options, inputs = self.options, batch.inputs
        if not under_layout:
            return Setting(get_layout("depth")), torch.full_like(inputs, steps)
        shape = (ranks.world() * inputs.shape[0], inputs.shape[1])
        drawn = torch.randint((steps + 1) // 2, steps + 1, shape, generator=dice)
        prompt_lens = draw_prompts(options.kv_prompt, inputs, dice)
        setting = Setting(self.layout, True, prompt_lens, options.kv_passes, options.kv_gradient)
        return setting, ranks.mine(drawn).to(inputs.device)

    def _mean(self, losses: Tensor, batch: Batch) -> Tensor:
        return weighted_mean(losses, batch, self.options)

    def _loss(self, model: LoopedLM, h: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        return self.token_loss(model.coda(h, positions, dense_causal), batch.targets)
