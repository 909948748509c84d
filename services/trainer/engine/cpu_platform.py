# pyright: basic, reportAttributeAccessIssue=false
# Reason: replaces functions of torch and Megatron-Core, whose stubs are partial.
"""What Megatron-Core 0.16.1 needs in order to run on a machine without a GPU. Nothing happens where CUDA works.

Four differences, each measured against Hugging Face on the CPU:
1. Megatron asks `torch.cuda.current_device()` where to put tensors: it is answered with the CPU.
   This must happen before Megatron is imported, so `services.trainer.engine` does it on import.
2. Megatron seeds dropout through CUDA's generators: `seed` installs the tracker that forks nothing.
   Correct because every dropout here is 0.
3. Fused CUDA kernels are switched off in the model's configuration: `TRANSFORMER_OVERRIDES`.
4. Megatron wraps those kernels in `torch.compile` on import, which loads the whole compiler for functions that nobody
   calls, a third of a process's start: `_import_megatron_without_compiler` leaves them as they are.
"""

from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

TRANSFORMER_OVERRIDES: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}
"""Fields of Megatron's TransformerConfig on a CPU."""


def has_gpu() -> bool:
    """Whether the engine runs on CUDA and NCCL rather than on the CPU and gloo."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process's model."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else CPU


def install() -> None:
    """Makes Megatron place its tensors on the CPU. Does nothing with a GPU; may be called again."""
    if not has_gpu():
        torch.cuda.current_device = lambda: CPU  # Megatron only uses it as a device
        _import_megatron_without_compiler()


def _import_megatron_without_compiler() -> None:
    """Megatron has a switch for it, but one that can be reached only after the first modules are imported."""

    def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    compile_ = torch.compile
    torch.compile = as_it_is
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()


def seed(value: int) -> None:
    """Seeds torch and Megatron's own generators."""
    from megatron.core import tensor_parallel

    torch.manual_seed(value)
    if has_gpu():
        tensor_parallel.model_parallel_cuda_manual_seed(value)
    else:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def enable_fast_exact_matmul(largest_relative_error: float = 3e-6) -> bool:
    """Runs fp32 matrix products on oneDNN where that is exact, and says whether it does.

    On AMD processors MKL's fp32 product runs at less than half of oneDNN's speed, and torch takes oneDNN only
    when told that bf16 would do; oneDNN then computes in full fp32 (error 1e-6). On a processor with matrix
    units (AMX) it would really round to bf16, so the setting is kept only if a product measured here, relative
    to float64, stays below `largest_relative_error`.
    """
    if has_gpu():
        return False
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(192, 512, generator=generator)
    right = torch.randn(512, 192, generator=generator)
    exact = left.double() @ right.double()
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    error = float(((left @ right).double() - exact).abs().max() / exact.abs().max())
    if error > largest_relative_error:
        backend.fp32_precision = before
        return False
    return True
