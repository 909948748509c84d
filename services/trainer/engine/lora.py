# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# Reason: adds parameters to modules of Megatron-Core, which are untyped: torch takes them for tensors or modules.
"""LoRA (Hu et al., arXiv 2106.09685): y = W x + (alpha / rank) * B A x, with W frozen and A, B trained.

A linear layer that tensor parallelism splits by rows (`linear_qkv`, `linear_fc1`) has A whole on every rank and its own
rows of B; one that is split by columns (`linear_proj`, `linear_fc2`) has its own columns of A and B whole. Between the
two stands what is smallest, [tokens, rank], and only that is sent. Fused projections share one A.

A starts uniform in +-1/sqrt(in) (Kaiming with a = sqrt(5), as in PEFT) and B as 0: the policy starts as its base. The
numbers of A come from a generator of their own, so they do not depend on the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch.nn.functional import linear

from services.trainer.engine.parallel import ParallelLayout

HUGGING_FACE_MODULES = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}
"""What can be adapted, by Megatron's name, and which projections of Hugging Face it holds, in order."""
_SPLIT_BY_COLUMNS = frozenset({"linear_proj", "linear_fc2"})


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Which adapters."""

    rank: int = 16
    """Columns of B and rows of A."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    modules: tuple[str, ...] = tuple(HUGGING_FACE_MODULES)
    """Keys of `HUGGING_FACE_MODULES`."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


def add_adapters(
    network: torch.nn.Module,
    settings: LoraSettings,
    layout: ParallelLayout,
    seed: int,
    *,
    are_on: Callable[[], bool] = lambda: True,
) -> dict[str, torch.nn.Parameter]:
    """Freezes `network`, gives the chosen modules adapters, and returns those by name. Where `are_on` says no, a
    forward pass is that of the frozen network.

    Names are `<module>.lora_a` ([rank, in], or this rank's columns) and `<module>.lora_b` ([out, rank], or this rank's
    rows).
    """
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    adapters: dict[str, torch.nn.Parameter] = {}
    for index, (name, module) in enumerate(list(network.named_modules())):
        kind = name.rpartition(".")[2]
        if kind not in settings.modules:
            continue
        by_columns = kind in _SPLIT_BY_COLUMNS
        out_size, in_size = module.weight.size(0), module.weight.size(1)  # of this rank
        whole_in_size = in_size * layout.tensor_size if by_columns else in_size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        bound = 1 / math.sqrt(whole_in_size)
        whole = torch.empty(settings.rank, whole_in_size).uniform_(-bound, bound, generator=generator)
        start = layout.tensor_rank * in_size if by_columns else 0
        module.lora_a = torch.nn.Parameter(whole[:, start : start + in_size].to(module.weight).contiguous())
        module.lora_b = torch.nn.Parameter(module.weight.new_zeros(out_size, settings.rank))
        # Megatron's marks: who holds a part, and along which dimension.
        module.lora_a.tensor_model_parallel, module.lora_a.partition_dim = by_columns, 1
        module.lora_b.tensor_model_parallel, module.lora_b.partition_dim = not by_columns, 0
        add = _by_columns if by_columns else _by_rows
        module.register_forward_hook(add(settings.scale, are_on))
        adapters |= {f"{name}.lora_a": module.lora_a, f"{name}.lora_b": module.lora_b}
    return adapters


def _by_rows(scale: float, are_on: Callable[[], bool]):
    def add(module, inputs, output):
        if not are_on():
            return output
        inner = linear(inputs[0], module.lora_a)  # [tokens, 1, rank]
        inner = copy_to_tensor_model_parallel_region(inner)  # every rank's rows of B add to its gradient
        return output[0] + scale * linear(inner, module.lora_b), output[1]

    return add


def _by_columns(scale: float, are_on: Callable[[], bool]):
    def add(module, inputs, output):
        if not are_on():
            return output
        inner = linear(inputs[0], module.lora_a)  # [tokens, 1, rank], this rank's part of the sum
        inner = reduce_from_tensor_model_parallel_region(inner)
        return output[0] + scale * linear(inner, module.lora_b), output[1]

    return add
