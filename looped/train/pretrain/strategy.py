"""How Lightning runs several devices: whole copies of the model, or its weights and optimiser in parts (FSDP2).

Both leave the model as it is: its stages are called one by one, not through one `forward` that a wrapper could hook.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from looped.model import LoopedLM


class Replicated(DDPStrategy):
    """A copy of the model on every device. The training step averages the gradients itself (`ranks`)."""

    def configure_ddp(self) -> None:
        """Start from the same weights everywhere."""
        assert self.model is not None
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)


class Sharded(DDPStrategy):
    """Parameters, gradients and optimiser state in parts, one a device (FSDP2), as one group of parameters.

    A looped block is used R times a pass: gathering it for each use would move it 2 R times. So everything is gathered
    once before the first micro-batch of an optimiser step, kept, and its gradient reduced once after the last.
    """

    def configure_ddp(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        assert self.lightning_module is not None
        model = self.lightning_module.model
        mesh = init_device_mesh(self.root_device.type, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        register_fsdp_forward_method(model, "prelude")


def hold_back(model: LoopedLM, until_last: bool) -> None:
    """Whether the next backward pass of a sharded model keeps its gradient, and the gathered weights, to itself."""
    if is_sharded(model):
        shards: Any = model
        shards.set_requires_gradient_sync(not until_last)
        shards.set_reshard_after_backward(not until_last)


def is_sharded(model: LoopedLM) -> bool:
    """Whether `Sharded` has taken the model apart."""
    return hasattr(model, "set_requires_gradient_sync")


def gathered(value: Tensor) -> Tensor:
    """The whole of a tensor that may lie in parts on all devices; all processes must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor if `like` lies in parts, else the tensor, where `like` is."""
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)


def unsharded_copy(model: LoopedLM) -> LoopedLM:
    """The model itself, or a whole copy of a sharded one on the CPU; all processes must ask for it."""
    if not is_sharded(model):
        return model
    with torch.device("meta"):
        copy = LoopedLM(model.config)
    copy = copy.to_empty(device="cpu")
    if model.config.tie_embeddings:
        copy.head.weight = copy.embed.weight
    values = {name: gathered(parameter.detach()) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            parameter.copy_(values[name])
    return copy
