# pyright: basic
# Reason: torch.distributed is untyped.
"""Giving a step up between two micro-batches, when the process is to end: all ranks do, or none.

Until the first update of a step nothing but gradients has changed, and those are discarded. So an end need not wait for
the step: what it was made of is on the log, and is read again.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as distributed

from clawstream.errors import StepInterrupted
from services.trainer.engine import cpu_platform
from services.trainer.engine.parallel import ParallelLayout

Each = TypeVar("Each")


class Interruption:
    """Asks between micro-batches whether the process is to end. Its ranks are told so at different moments."""

    def __init__(self, is_ending: Callable[[], bool] | None, layout: ParallelLayout) -> None:
        """`is_ending` may say something else on each rank. None, on all of them: nothing is ever given up."""
        self._is_ending = is_ending
        self._layout = layout

    def unless_ending(self, micro_batches: Iterable[Each]) -> Iterator[Each]:
        """This rank's micro-batches, one after the other. A collective of all ranks.

        Raises StepInterrupted, on every rank, when one of them was to end before all were computed: at once where one
        copy of the model is all there is, else when each copy has come to its own end. So copies, which have as many
        micro-batches as it happens, never wait for one another in between.
        """
        if self._is_ending is None:
            yield from micro_batches
            return
        given_up = False
        for each in micro_batches:
            given_up = self._any(self._layout.tensor_size, self._layout.tensor_group, self._is_ending())
            if given_up:
                break
            yield each
        if self._any(self._layout.data_size, self._layout.data_group, given_up):
            raise StepInterrupted("the process is to end: the step is given up, and its samples are read again")

    def _any(self, size: int, group: distributed.ProcessGroup, said: bool) -> bool:
        """Whether one rank of the group says so. Shards of one copy compute every micro-batch together."""
        if size == 1:
            return said
        flag = torch.tensor([int(said)], device=cpu_platform.device())
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=group)
        return bool(flag.item())
