# pyright: basic
# Reason: copies the Megatron engine's tensors, which are untyped.
"""Everything that training has changed: copied out of the model and the optimizer, and put back into them.

A copy is in Hugging Face's names and whole tensors, so it can be put back on another number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.trainer.engine import cpu_platform
from services.trainer.engine.adapter_weights import load_adapters, whole_adapters
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.optimizer import ParallelAdamW
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import ReadTensor, load_shards, whole_tensors


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A copy of everything that training has changed, in Hugging Face's names and shapes, on the CPU.

    It does not depend on the number of ranks, and later steps do not touch it: it can be written by another thread.
    """

    weights: dict[str, torch.Tensor]
    """fp32 main parameters; only the adapters, in PEFT's names, where only they are trained."""
    moments: dict[str, dict[str, torch.Tensor]]
    """Adam's moments by torch's name, then by Hugging Face's tensor name."""
    random_state: dict[str, torch.Tensor]
    """Generator states by device kind, uint8."""
    num_updates: int
    """Optimizer updates made."""
    model_dtype: torch.dtype
    """The type that the model computes in, and in which weights are published."""
    lora: LoraSettings | None = None
    """Of the adapters, if there are any."""


def take_snapshot(
    model: PolicyModel,
    optimizer: ParallelAdamW,
    layout: ParallelLayout,
    *,
    model_dtype: torch.dtype,
    lora: LoraSettings | None,
) -> PolicySnapshot | None:
    """A copy of the state, on rank 0; None on the others. A collective of all ranks."""

    def whole_copies(sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by Hugging Face's name on rank 0; the other ranks give their shards and keep nothing."""
        copies: dict[str, torch.Tensor] = {}
        whole = whole_tensors if lora is None else whole_adapters
        for name, tensor in whole(model, layout, sources):
            if layout.rank == 0:
                copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copies

    weights = whole_copies(optimizer.main_parameters)
    moments = {name: whole_copies(tensors) for name, tensors in optimizer.moments()}
    if layout.rank != 0:
        return None
    return PolicySnapshot(weights, moments, _random_state(), optimizer.num_updates, model_dtype, lora)


def restore_snapshot(
    model: PolicyModel,
    optimizer: ParallelAdamW,
    layout: ParallelLayout,
    read_weight: ReadTensor,
    read_moment: Mapping[str, ReadTensor],
    random_state: Mapping[str, torch.Tensor],
    num_updates: int,
    *,
    lora: LoraSettings | None,
) -> None:
    """Puts back what `PolicySnapshot` describes. All ranks read for themselves.

    Raises WeightsError when a tensor is missing or does not fit.
    """
    load = load_shards if lora is None else load_adapters
    load(model, layout, read_weight, optimizer.main_parameters.put)
    for name, tensors in optimizer.moments():
        load(model, layout, read_moment[name], tensors.put)
    optimizer.discard_gradients()
    optimizer.restored(num_updates)
    torch.set_rng_state(random_state["cpu"])
    if cpu_platform.has_gpu():
        torch.cuda.set_rng_state(random_state["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if cpu_platform.has_gpu():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
