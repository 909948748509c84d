# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# Reason: Megatron marks parameters with attributes of its own; after a backward pass gradients are never None.
"""AdamW over this rank's shards, with gradient sums and clipping that know about tensor and data parallelism.

Update (Loshchilov and Hutter, arXiv 1711.05101): theta <- theta - lr * (m / (sqrt(v) + eps) + decay * theta), with
bias-corrected moments m and v. Vectors (norms and biases) are not decayed, as in Megatron.

Megatron's own optimizer is not used: in 0.16.1 all its variants allocate on `device='cuda'` in their constructors
or in clipping, so they cannot run on a CPU, and one code path is worth more here than its sharded moments.
Parameters of less than 32 bits get fp32 main parameters and fp32 gradient sums, so small steps are not lost.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from services.trainer.engine.parallel import ParallelLayout

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state per parameter, under torch's names."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Defaults are OpenClaw-RL's."""

    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.98
    """Decay of the mean of squared gradients."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm."""


class ParallelAdamW:
    """Owns main parameters, gradients and moments. Gradients accumulate until `step` or `discard_gradients`."""

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], layout: ParallelLayout, settings: OptimizerSettings
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._parameters = parameters
        self.main_parameters: dict[str, torch.Tensor] = {}
        """fp32 parameters by Megatron's name; the model's own where those are fp32."""
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float32:
                self.main_parameters[name] = parameter
            else:
                self.main_parameters[name] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(self._accumulate_in_float32(name))
        decayed = [tensor for tensor in self.main_parameters.values() if tensor.ndim > 1]
        vectors = [tensor for tensor in self.main_parameters.values() if tensor.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,  # one pass over memory instead of ten, on CPUs too
        )
        self.reset()

    def _accumulate_in_float32(self, name: str):
        def accumulate(parameter: torch.nn.Parameter) -> None:
            main = self.main_parameters[name]
            if main.grad is None:
                main.grad = torch.zeros_like(main)
            main.grad += parameter.grad
            parameter.grad = None

        return accumulate

    def reset(self) -> None:
        """Forgets moments and gradients and takes the main parameters from the model."""
        self.discard_gradients()
        self.num_updates = 0
        self._adam.state.clear()
        for name, main in self.main_parameters.items():
            if main is not self._parameters[name]:
                main.copy_(self._parameters[name].detach())
            self._adam.state[main] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""
        for main in self.main_parameters.values():
            main.grad = None

    def reduce_gradients(self) -> float:
        """Sums the gradients over ranks and returns their global L2 norm (infinite or NaN if they are).

        A collective of all ranks: each must call it, also one that had no micro-batch.
        """
        layout = self._layout
        for name, main in self.main_parameters.items():
            if main.grad is None:
                main.grad = torch.zeros_like(main)
            # Heads of one layer share these norms but live on several ranks, each with its part of the gradient.
            if layout.tensor_size > 1 and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                distributed.all_reduce(main.grad, group=layout.tensor_group)
            layout.sum_over_data_ranks(main.grad)
        sharded = torch.zeros((), dtype=torch.float64, device=main.device)
        replicated = torch.zeros((), dtype=torch.float64, device=main.device)
        for name, main in self.main_parameters.items():
            square = torch.linalg.vector_norm(main.grad, dtype=torch.float64) ** 2
            if self._parameters[name].tensor_model_parallel:
                sharded += square
            else:
                replicated += square
        if layout.tensor_size > 1:
            distributed.all_reduce(sharded, group=layout.tensor_group)
        return math.sqrt(value) if math.isfinite(value := float(sharded + replicated)) else value

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """One update with reduced gradients of `gradient_norm`, clipped; gradients are forgotten."""
        if gradient_norm > self._settings.max_gradient_norm:
            scale = self._settings.max_gradient_norm / gradient_norm
            for main in self.main_parameters.values():
                main.grad.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.num_updates += 1
        for name, main in self.main_parameters.items():
            if main is not self._parameters[name]:
                self._parameters[name].copy_(main)
        self.discard_gradients()

    def moments(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(name of the moment, its tensors by Megatron's parameter name), for checkpoints and their restoration."""
        for moment in MOMENTS:
            yield moment, {name: self._adam.state[main][moment] for name, main in self.main_parameters.items()}

    @torch.no_grad()
    def restored(self, num_updates: int) -> None:
        """After main parameters and moments were filled: sets the number of updates and the model's parameters."""
        self.num_updates = num_updates
        for name, main in self.main_parameters.items():
            self._adam.state[main]["step"].fill_(num_updates)
            if main is not self._parameters[name]:
                self._parameters[name].copy_(main)
