"""Blocks are compiled once: not for each layer, loop step or training step."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from looped.train.pretrain.build import compile_blocks, new_model
from looped.train.pretrain.objective import Moment
from looped.train.pretrain.ouro_loss import OuroLoss
from looped.train.pretrain.recipe import Init, Objective, Shape, model_config
from looped.train.pretrain.windows import Batch


@pytest.mark.parametrize(("loop_norm", "graphs"), [(True, 2), (False, 3)])
def test_one_graph_serves_every_layer_and_loop(loop_norm: bool, graphs: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    shape = Shape("ouro", 16, 24, 2, (0, 4, 0), 4, loop_norm=loop_norm)
    model = new_model(model_config(shape, 32, 16, 0, 1), Init(), seed=0)
    compile_blocks(model, backend=counter)
    loss = OuroLoss(Objective(ragged_from=0.5), 4)
    ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, 16, dtype=torch.uint8))

    def step(number: int, progress: float) -> int:
        before = counter.frame_count
        with torch.autocast("cpu", torch.bfloat16):
            loss(model, batch, Moment(number, progress, 0.1, number)).value.backward()
        return counter.frame_count - before

    # one for all layers, one for the norm before the first; the last layer has its own where no norm follows it
    assert step(0, 0.0) == graphs
    assert step(1, 0.6) > 0  # ragged: attention keeps K/V, outside of graphs
    assert [step(number, 0.6) for number in range(2, 8)] == [0] * 6
    assert model.core_blocks[3].attention.qkv.weight.grad is not None


def test_compiled_blocks_compute_what_blocks_compute() -> None:
    torch._dynamo.reset()
    shape = Shape("ouro", 16, 24, 2, (0, 2, 0), 3)
    plain = new_model(model_config(shape, 32, 16, 0, 1), Init(branch_gain=0.5), seed=0)
    compiled = new_model(model_config(shape, 32, 16, 0, 1), Init(branch_gain=0.5), seed=0)
    compile_blocks(compiled, backend="aot_eager")
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
    for one, other in zip(plain.states(ids), compiled.states(ids), strict=True):
        torch.testing.assert_close(one, other)
