"""Forwards over whole sequences in which tokens exit, under any KV layout: what teacher-forced decoding computes.

Every token runs all steps; its states up to its exit are those of the reference decoder, and only the K/V it leaves
stop at its exit.
"""

# B rows, T tokens, D width

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from looped.kv import KVLayout
from looped.model import LoopedLM
from looped.model.attention import dense_causal
from looped.train.pretrain import ranks
from looped.train.pretrain.kept import BestAvailable, Dense, LoopAttend, Planes, PrivateDepths
from looped.train.pretrain.streams import Kernel, TwoStreams

Leave = Callable[[Tensor, int], Tensor]
"""leave(z [B, T, D], step) -> who exits after `step`, [B, T] bool; asked in order, at steps before the last."""


class Rollout(NamedTuple):
    """States h_1..h_n, each [B, T, D], and exit depths [B, T] long."""

    states: list[Tensor]
    depths: Tensor

    def at_exit(self) -> Tensor:
        """Each token's state after its last step: [B, T, D]."""
        out = self.states[0]
        for step, h in enumerate(self.states[1:], 2):
            out = torch.where((self.depths >= step)[..., None], h, out)
        return out


class Setting(NamedTuple):
    """How tokens meet each other's K/V.

    `private`: past its exit a token goes on with its own K/V, and what others left is detached where one forward finds
    it. `passes` and `gradient` are for layouts that overwrite planes: forwards that find what tokens leave (position i
    is exact after i of them), and whether the last one gets gradients.
    """

    layout: KVLayout
    private: bool = False
    prompt_lens: Tensor | None = None
    passes: int = 1
    gradient: bool = True
    kernel: Kernel = "auto"


def never(z: Tensor, step: int) -> Tensor:
    """Nobody exits before the last step."""
    return torch.zeros(z.shape[:2], dtype=torch.bool, device=z.device)


def fixed(depths: Tensor) -> Leave:
    """Exits at given depths [B, T]."""
    return lambda z, step: depths <= step


def roll(
    model: LoopedLM,
    inputs: Tensor,
    num_loops: int,
    setting: Setting,
    new_leave: Callable[[], Leave],
    state: Tensor | None = None,
    free: int = 0,
) -> Rollout:
    """Run tokens [B, T] for `num_loops` steps under a setting, those of the prompts at full depth.

    `new_leave()` makes the exit decisions of one forward; `state` is what Huginn starts from. The first `free` steps
    get no gradient.
    """
    core = model.config.core_layers
    layout, prompt_lens = setting.layout, setting.prompt_lens

    def forward(attend: LoopAttend) -> Rollout:
        return one_forward(model, inputs, num_loops, attend, new_leave(), state, prompt_lens, free)

    if layout.needs_dense:
        return forward(Dense())
    if not layout.cut_sensitive:
        # a prompt at full depth offers every step's K/V, which is what its own queries read: no mask needed
        return forward(PrivateDepths(TwoStreams(None, setting.kernel), core) if setting.private else BestAvailable())
    streams, left = TwoStreams(prompt_lens, setting.kernel), None
    for index in range(setting.passes):
        with torch.set_grad_enabled(torch.is_grad_enabled() and setting.gradient and index == setting.passes - 1):
            planes = Planes(layout, core, num_loops, streams, left)
            forward(planes)
            left = planes.found
        torch.clear_autocast_cache()  # it may hold weights cast without gradient
    return forward(Planes(layout, core, num_loops, streams, left))


def loops_trained(setting: Setting, num_loops: int, free: int = 0) -> float:
    """What `roll` costs, in loop steps with a backward pass; one without costs a third."""
    full = num_loops - 2 / 3 * free
    if not setting.layout.cut_sensitive:
        return full
    last = full if setting.gradient else num_loops / 3
    return full + last + (setting.passes - 1) * num_loops / 3


def one_forward(
    model: LoopedLM,
    inputs: Tensor,
    num_loops: int,
    attend: LoopAttend,
    leave: Leave,
    state: Tensor | None = None,
    prompt_lens: Tensor | None = None,
    free: int = 0,
) -> Rollout:
    """One parallel forward over `attend`; arguments as those of `roll`."""
    positions = torch.arange(inputs.shape[-1], device=inputs.device)
    h, injection = model.prelude(inputs, positions, dense_causal, state)
    active = torch.ones_like(inputs, dtype=torch.bool)
    stays = None if prompt_lens is None else positions < prompt_lens[:, None]
    depths, states = torch.full_like(inputs, num_loops), []
    for step in range(1, num_loops + 1):
        if step == free + 1 > 1:
            torch.clear_autocast_cache()  # it holds weights cast without gradient
        attend.begin(step, active)
        with torch.set_grad_enabled(torch.is_grad_enabled() and step > free):
            h = model.core(h, injection, positions, step, attend)
        states.append(h)
        leaving = active
        if step < num_loops:
            leaving = active & leave(model.readout(h), step)
            if stays is not None:
                leaving = leaving & ~stays
            depths = torch.where(leaving, step, depths)
        attend.leave(leaving, step)
        active = active & ~leaving
    return Rollout(states, depths)


def initial_state(model: LoopedLM, inputs: Tensor, seed: int) -> Tensor | None:
    """The noise that the loop starts from, a fresh one per row and run: [B, T, D], None for Ouro."""
    positions = torch.arange(inputs.shape[-1], device=inputs.device).expand_as(inputs)
    rows = ranks.mine(torch.arange(ranks.world() * inputs.shape[0], device=inputs.device))[:, None].expand_as(inputs)
    return model.init_state(rows + (seed << 20), positions)


def draw_prompts(share: float, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
    """Prompt lengths [B] of this process's rows [B, T], drawn uniformly from 0 to `share` of T; None for no share."""
    if not share:
        return None
    rows, length = inputs.shape
    drawn = torch.rand(ranks.world() * rows, generator=generator, device=generator.device)
    return ranks.mine((drawn * share * length).long()).to(inputs.device)
