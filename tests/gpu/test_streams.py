"""Attention over two streams by FlexAttention on a GPU: the dense mask's values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped.kv import get_layout
from looped.train.pretrain.rollout import Setting, fixed, roll
from looped.train.pretrain.streams import Kernel, TwoStreams
from tests.models import micro_ouro

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("prompts", [False, True])
def test_flex_attention_is_the_dense_mask(length: int, prompts: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(3, length, heads, 64, device="cuda", generator=generator, requires_grad=True)

    inputs = [draw(4), *(draw(2) for _ in range(4))]
    lens = torch.tensor([0, 5, length], device="cuda") if prompts else None
    weights = torch.randn(3, length, 4, 64, device="cuda", generator=generator)

    def values(kernel: Kernel) -> list[Tensor]:
        out = TwoStreams(lens, kernel)(*inputs)
        return [out, *torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)]

    for one, other in zip(values("flex"), values("mask"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_rollout_under_autocast_runs_in_both() -> None:
    changes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "hidden_size": 64}
    model = micro_ouro(dtype=torch.float32, **changes).cuda().requires_grad_(True)
    ids = torch.randint(1, 61, (2, 80), device="cuda")
    depths = torch.randint(1, 5, ids.shape, device="cuda")

    def run(kernel: Kernel) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            setting = Setting(get_layout("shared"), prompt_lens=torch.tensor([0, 30], device="cuda"), kernel=kernel)
            h = roll(model, ids, 4, setting, lambda: fixed(depths)).at_exit()
        return h, torch.autograd.grad(h.float().square().mean(), model.embed.weight)[0]

    for one, other in zip(run("flex"), run("mask"), strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05
