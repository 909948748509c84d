# pyright: basic
# Reason: torch's hooks and torch.distributed are untyped.
"""Giving a step up in the middle, when the process is to end: all ranks do, or none.

Until the first update of a step nothing but gradients has changed, and those are discarded. So an end need not wait for
the step: what it was made of is on the log, and is read again.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from clawstream.errors import StepInterrupted
from services.trainer.engine import cpu_platform
from services.trainer.engine.parallel import ParallelLayout

Each = TypeVar("Each")
Result = TypeVar("Result")


class _LeftOff(Exception):  # noqa: N818 - ends a forward or backward pass; never leaves this module
    """This rank computes no further."""


class Interruption:
    """Asks again and again whether the process is to end. Its ranks are told so at different moments."""

    def __init__(self, is_ending: Callable[[], bool] | None, layout: ParallelLayout) -> None:
        """`is_ending` may say something else on each rank. None, on all of them: nothing is ever given up."""
        self._is_ending = is_ending
        self._layout = layout
        self._is_interruptible = False

    def watch(self, layers: Iterable[torch.nn.Module]) -> None:
        """Asks after each of these layers too, forward and backward: on a CPU one micro-batch may take half a minute.

        Where several ranks share a copy of the model they compute every layer together, and none may leave alone.
        """
        if self._is_ending is not None and self._layout.tensor_size == 1:
            for layer in layers:
                layer.register_forward_hook(self._after_layer)

    def each(self, micro_batches: Sequence[Each], compute: Callable[[Each], Result]) -> list[Result]:
        """`compute` of this rank's micro-batches, one after the other. A collective of all ranks.

        Raises StepInterrupted, on every rank, when one of them was to end before all were computed: at once where one
        copy of the model is all there is, else when each copy has come to its own end. So copies, which have as many
        micro-batches as it happens, never wait for one another in between.
        """
        if self._is_ending is None:
            return [compute(each) for each in micro_batches]
        results: list[Result] = []
        given_up = False
        self._is_interruptible = True
        try:
            for each in micro_batches:
                given_up = self._any(self._layout.tensor_size, self._layout.tensor_group, self._is_ending())
                if given_up:
                    break
                results.append(compute(each))
        except _LeftOff:
            given_up = True
        finally:
            self._is_interruptible = False
        if self._any(self._layout.data_size, self._layout.data_group, given_up):
            raise StepInterrupted("the process is to end: the step is given up, and its samples are read again")
        return results

    def _after_layer(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._leave_if_ending()
        hidden = output[0] if isinstance(output, tuple) else output  # [tokens, 1, hidden]
        if hidden.requires_grad:
            hidden.register_hook(self._before_gradient)

    def _before_gradient(self, _gradient: torch.Tensor) -> None:
        self._leave_if_ending()

    def _leave_if_ending(self) -> None:
        if self._is_interruptible and self._is_ending is not None and self._is_ending():
            raise _LeftOff

    def _any(self, size: int, group: distributed.ProcessGroup, said: bool) -> bool:
        """Whether one rank of the group says so."""
        if size == 1:
            return said
        flag = torch.tensor([int(said)], device=cpu_platform.device())
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=group)
        return bool(flag.item())
