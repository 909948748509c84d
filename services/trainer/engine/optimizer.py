# pyright: basic, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# Reason: Megatron marks parameters with attributes of its own; after a backward pass gradients are never None.
"""AdamW over this rank's shards, with gradient sums and clipping that know about tensor and data parallelism.

Update (Loshchilov and Hutter, arXiv 1711.05101): theta <- theta - lr * (m / (sqrt(v) + eps) + decay * theta), with
bias-corrected moments m and v. Vectors (norms and biases) are not decayed, as in Megatron.

Megatron's own optimizer is not used: in 0.16.1 all its variants allocate on `device='cuda'` in their constructors
or in clipping, so they cannot run on a CPU. As its distributed optimizer does, this one gives every data-parallel rank
an equal part of the main parameters and moments (`flat_parameters`); what leaves it for a checkpoint is whole again, so
a checkpoint fits any number of ranks. Parameters of less than 32 bits get fp32 main parameters and fp32 gradient sums,
so small steps are not lost.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from services.trainer.engine.flat_parameters import FlatParameters
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


class OptimizerTensors(Mapping[str, torch.Tensor]):
    """Main parameters, or one of the moments: name of a parameter to a tensor of its shape, fp32.

    Reading one is a collective of the data-parallel group: all of its ranks read the same names in the same order.
    """

    def __init__(self, parts: list[tuple[FlatParameters, torch.Tensor]], group_of: Mapping[str, int]) -> None:
        self._parts = parts
        self._group_of = group_of

    def __getitem__(self, name: str) -> torch.Tensor:
        parameters, part = self._parts[self._group_of[name]]
        return parameters.gather(part, name)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces one. Every rank gives the whole tensor and keeps its piece."""
        parameters, part = self._parts[self._group_of[name]]
        parameters.put(part, name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)


class ParallelAdamW:
    """Owns main parameters, gradients and moments. Gradients accumulate until `step` or `discard_gradients`."""

    def __init__(
        self, parameters: dict[str, torch.nn.Parameter], layout: ParallelLayout, settings: OptimizerSettings
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._parameters = parameters
        self.num_updates = 0
        matrices = {name: parameter for name, parameter in parameters.items() if parameter.ndim > 1}
        vectors = {name: parameter for name, parameter in parameters.items() if parameter.ndim <= 1}
        kinds = [(named, decay) for named, decay in ((matrices, settings.weight_decay), (vectors, 0.0)) if named]
        self._groups = [FlatParameters(named, layout) for named, _ in kinds]
        members = [named for named, _ in kinds]
        # In the model's order, which every rank shares.
        self._group_of = {name: next(i for i, named in enumerate(members) if name in named) for name in parameters}
        self._adam = torch.optim.AdamW(
            [
                {"params": [group.main], "weight_decay": decay}
                for group, (_, decay) in zip(self._groups, kinds, strict=True)
            ],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,  # one pass over memory instead of ten, on CPUs too
        )
        for group in self._groups:
            self._adam.state[group.main] = {
                "step": torch.zeros((), device=group.main.device),  # the fused kernel reads it where it runs
                **{moment: torch.zeros_like(group.main) for moment in MOMENTS},
            }

    @property
    def main_parameters(self) -> OptimizerTensors:
        """fp32 parameters by Megatron's name."""
        return OptimizerTensors([(group, group.main) for group in self._groups], self._group_of)

    def moments(self) -> Iterator[tuple[str, OptimizerTensors]]:
        """(name of the moment, its tensors by Megatron's parameter name), for checkpoints and their restoration."""
        for moment in MOMENTS:
            parts = [(group, self._adam.state[group.main][moment]) for group in self._groups]
            yield moment, OptimizerTensors(parts, self._group_of)

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""
        for group in self._groups:
            group.discard_gradients()

    def gradient(self, name: str) -> torch.Tensor:
        """What this rank has accumulated for a parameter, fp32; shaped like it."""
        return self._groups[self._group_of[name]].gradient(name)

    def reduce_gradients(self) -> float:
        """Sums the gradients over ranks and returns their global L2 norm (infinite or NaN if they are).

        A collective of all ranks: each must call it, also one that had no micro-batch.
        """
        layout = self._layout
        if layout.tensor_size > 1:
            for name in self._parameters:
                # Heads of one layer share these norms but live on several ranks, each with its part of the gradient.
                if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                    distributed.all_reduce(self.gradient(name), group=layout.tensor_group)
        squares = torch.zeros(2, dtype=torch.float64, device=self._groups[0].main.device)  # replicated, sharded
        for group in self._groups:
            group.reduce_gradients()
            for name, piece in group.own_pieces(group.main.grad):
                place = int(self._parameters[name].tensor_model_parallel)
                squares[place] += torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2
        layout.sum_over_data_ranks(squares)
        if layout.tensor_size > 1:
            distributed.all_reduce(squares[1], group=layout.tensor_group)
        return math.sqrt(value) if math.isfinite(value := float(squares.sum())) else value

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """One update with reduced gradients of `gradient_norm`, clipped; gradients are forgotten. A collective."""
        if gradient_norm > self._settings.max_gradient_norm:
            scale = self._settings.max_gradient_norm / gradient_norm
            for group in self._groups:
                group.main.grad.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.num_updates += 1
        for group in self._groups:
            group.spread()
        self.discard_gradients()

    @torch.no_grad()
    def restored(self, num_updates: int) -> None:
        """After main parameters and moments were put: sets the number of updates and the model. A collective."""
        self.num_updates = num_updates
        for group in self._groups:
            self._adam.state[group.main]["step"].fill_(num_updates)
            group.spread()
