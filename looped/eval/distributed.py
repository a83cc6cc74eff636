"""Evaluation over several processes: each rank answers its share of the documents, rank 0 has the scores.

Works inside `accelerate launch` and `torchrun`, and starts processes itself for `--num-processes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from looped.errors import LoopedError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # the fastest rank may wait that long for the slowest


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    accelerator: Accelerator | None = None

    @property
    def device(self) -> str | None:
        """The device that is this process's own, None where there is nothing to share."""
        return None if self.accelerator is None else str(self.accelerator.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, concatenated."""
        if self.accelerator is None:
            return tensor
        gathered: Tensor = self.accelerator.gather(tensor)
        return gathered

    def gather_object(self, obj: T, dst: int = 0) -> list[T] | None:
        """The objects of all ranks on rank `dst`, None on the others."""
        if self.accelerator is None:
            return [obj]
        import torch.distributed

        found: list[Any] | None = [None] * self.size if self.rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


ALONE = World()


def is_member() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: str | None) -> World:
    """Meet the other processes that a launcher started; a world of one where there is none."""
    if not is_member():
        return ALONE
    from accelerate import Accelerator, InitProcessGroupKwargs

    if device == "cpu":
        _share_cores()
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    return World(accelerator.process_index, accelerator.num_processes, accelerator)


def _share_cores() -> None:
    """Threads for this process alone, unless the user has said how many."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        threads = max(1, (os.cpu_count() or 1) // local)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # accelerate asks for it
        torch.set_num_threads(threads)


def launch(work: Callable[[Any], T], argument: Any, num_processes: int) -> T:
    """`work(argument)` in every one of `num_processes` new processes; returns what it returned on rank 0.

    Raises `LoopedError` with the sentence of the first process that raised one.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id="looped-eval",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    try:
        results = elastic_launch(config, _guarded)(work, argument)
    except ChildFailedError as error:
        raise LoopedError(f"a process of the evaluation ended early: {_reason(error)}") from error
    for refusal, _ in results.values():
        if refusal is not None:
            raise LoopedError(refusal)
    value: T = results[0][1]
    return value


def _guarded(work: Callable[[Any], T], argument: Any) -> tuple[str | None, T | None]:
    """A refusal comes back as a value: it is the user's mistake, not a crash that the launcher should report."""
    try:
        return None, work(argument)
    except LoopedError as error:
        return str(error), None


def _reason(error: Any) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank} with exit code {failure.exitcode}"
