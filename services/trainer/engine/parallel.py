# pyright: basic, reportArgumentType=false, reportPrivateImportUsage=false
# Reason: Megatron-Core types its groups as `group, None or -100`; torch does not export its stores.
"""Process groups: tensor parallelism (TP) inside a model copy, data parallelism (DP) across copies.

Ranks come from the environment variables of `launch_ranks` or torchrun. Without them one process stands for a world
of one, with no port opened, so that a laptop and a cluster run the same code.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as distributed
from megatron.core import parallel_state

from clawstream.errors import SettingsError
from services.trainer.engine import cpu_platform


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Where this process stands."""

    rank: int
    """Rank among all processes."""
    world_size: int
    """Number of processes."""
    tensor_rank: int
    """Rank among the shards of one model copy."""
    tensor_size: int
    """Number of shards of one model copy."""
    data_rank: int
    """Which model copy this process belongs to."""
    data_size: int
    """Number of model copies."""
    tensor_group: distributed.ProcessGroup
    """The shards of this model copy."""
    data_group: distributed.ProcessGroup
    """The same shard in all copies."""

    @classmethod
    def start(cls, *, tensor_parallel_size: int = 1, seed: int = 0, timeout_seconds: float = 600.0) -> Self:
        """Starts torch.distributed and Megatron's groups.

        Raises SettingsError when the number of processes is not a multiple of `tensor_parallel_size`.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if tensor_parallel_size < 1 or world_size % tensor_parallel_size:
            raise SettingsError(
                f"tensor_parallel_size={tensor_parallel_size} does not divide the {world_size} processes; "
                f"set `ranks` of the process to a multiple of {tensor_parallel_size}"
            )
        if not distributed.is_initialized():
            backend = "nccl" if cpu_platform.has_gpu() else "gloo"
            if cpu_platform.has_gpu():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            timeout = timedelta(seconds=timeout_seconds)
            if world_size == 1:
                distributed.init_process_group(
                    backend, store=distributed.HashStore(), rank=0, world_size=1, timeout=timeout
                )
            else:
                distributed.init_process_group(backend, timeout=timeout)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        if parallel_state.get_tensor_model_parallel_world_size() != tensor_parallel_size:
            raise SettingsError(
                f"tensor_parallel_size={tensor_parallel_size}, but this process already runs with "
                f"{parallel_state.get_tensor_model_parallel_world_size()}"
            )
        cpu_platform.seed(seed)
        return cls(
            rank=distributed.get_rank(),
            world_size=world_size,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_size=tensor_parallel_size,
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
            data_group=parallel_state.get_data_parallel_group(),
        )

    def sum_over_data_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Adds `values` of all model copies, in place, and returns them."""
        if self.data_size > 1:
            distributed.all_reduce(values, group=self.data_group)
        return values

    def max_over_data_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of `values` over all model copies, in place."""
        if self.data_size > 1:
            distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self.data_group)
        return values

    @staticmethod
    def stop() -> None:
        """Ends Megatron's groups and torch.distributed."""
        parallel_state.destroy_model_parallel()
        if distributed.is_initialized():
            distributed.destroy_process_group()
