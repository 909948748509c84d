# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false
# Reason: torch.distributed is untyped; after a backward pass gradients are never None.
"""Parameters end to end in one buffer, of which each data-parallel rank owns an equal part.

This is ZeRO's first stage (Rajbhandari et al., arXiv 1910.02054): all copies of the model hold all parameters, but only
the owner of a part holds its fp32 main parameters and optimizer moments. Gradients are summed into the owner's part by
one reduce-scatter, new values go to everyone by one all-gather.

The model's parameters and their gradients become views of the buffers: a backward pass accumulates in place, and
nothing is copied before a collective. Parameters of less than 32 bits accumulate into fp32 gradients all the same.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as distributed

from services.trainer.engine.parallel import ParallelLayout

_ALIGNMENT = 64
"""Elements. Every parameter starts on a cache line, as if it had been allocated by itself."""


class FlatParameters:
    """One buffer of parameters of one type. Every rank of the data-parallel group makes it from the same names."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], layout: ParallelLayout) -> None:
        self._layout = layout
        self._parameters = dict(parameters)
        self._start: dict[str, int] = {}
        size = 0
        for name, parameter in self._parameters.items():
            self._start[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._part_size = -(-size // (layout.data_size * _ALIGNMENT)) * _ALIGNMENT
        first = next(iter(self._parameters.values()))
        total = self._part_size * layout.data_size
        self._values = torch.zeros(total, dtype=first.dtype, device=first.device)  # [elements of all parameters]
        self._gradients = torch.zeros(total, dtype=torch.float32, device=first.device)  # the same places
        for name, parameter in self._parameters.items():
            view = self.view(self._values, name)
            view.copy_(parameter.detach())
            parameter.data = view
            if parameter.dtype == torch.float32:
                parameter.grad = self.view(self._gradients, name)
            else:
                parameter.register_post_accumulate_grad_hook(self._accumulate_in_float32(name))
        part = self._values[self._own]
        self.main = part if first.dtype == torch.float32 else part.float()
        """fp32 values of this rank's part; the model's own where those are fp32."""
        self.main.grad = self._gradients[self._own]

    @property
    def _own(self) -> slice:
        start = self._layout.data_rank * self._part_size
        return slice(start, start + self._part_size)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The parameter's place in a buffer, in its shape."""
        parameter = self._parameters[name]
        return flat[self._start[name] : self._start[name] + parameter.numel()].view(parameter.shape)

    def gradient(self, name: str) -> torch.Tensor:
        """What this rank has accumulated for a parameter; shaped like it."""
        return self.view(self._gradients, name)

    def _accumulate_in_float32(self, name: str):
        def accumulate(parameter: torch.nn.Parameter) -> None:
            self.gradient(name).add_(parameter.grad)
            parameter.grad = None

        return accumulate

    def discard_gradients(self) -> None:
        """Forgets what was accumulated."""
        self._gradients.zero_()

    def reduce_gradients(self) -> None:
        """Sums this rank's part over all data-parallel ranks, into `main.grad`. A collective."""
        if self._layout.data_size > 1:
            summed = torch.empty_like(self.main.grad)
            distributed.reduce_scatter_tensor(summed, self._gradients, group=self._layout.data_group)
            self.main.grad.copy_(summed)

    def spread(self) -> None:
        """After an update of `main`: gives the model its new values, on all data-parallel ranks. A collective."""
        own = self._values[self._own]
        if self.main.dtype != own.dtype:
            own.copy_(self.main)
        if self._layout.data_size > 1:
            distributed.all_gather_into_tensor(self._values, own.clone(), group=self._layout.data_group)

    def own_pieces(self, part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that lies in this rank's part, and its piece of a tensor that is shaped like `main`."""
        for name in self._parameters:
            in_part, _ = self._overlap(name)
            if in_part.start < in_part.stop:
                yield name, part[in_part]

    def gather(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's tensor from all ranks' parts (each shaped like `main`), in its shape. A collective.

        With one data-parallel rank it is a view of `part`.
        """
        in_part, in_parameter = self._overlap(name)
        shape = self._parameters[name].shape
        if self._layout.data_size == 1:
            return part[in_part].view(shape)
        whole = torch.zeros(self._parameters[name].numel(), dtype=part.dtype, device=part.device)
        whole[in_parameter] = part[in_part]
        distributed.all_reduce(whole, group=self._layout.data_group)  # one rank's number and zeros: exact
        return whole.view(shape)

    def put(self, part: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        """Puts this rank's piece of a parameter-shaped tensor into its place in `part`."""
        in_part, in_parameter = self._overlap(name)
        part[in_part] = tensor.reshape(-1)[in_parameter].to(part)

    def _overlap(self, name: str) -> tuple[slice, slice]:
        """Where the parameter meets this rank's part: in the part, and in the flattened parameter."""
        own, start = self._own, self._start[name]
        first = max(own.start, start)
        last = max(first, min(own.stop, start + self._parameters[name].numel()))
        return slice(first - own.start, last - own.start), slice(first - start, last - start)
