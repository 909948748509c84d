# pyright: basic
# Reason: torch.ops.mkldnn is a private, untyped operator namespace.
"""Packed weights on huge pages: a decode step reads all of them once, and 2 MB pages spare it most of the page walks.

Measured with SmolLM2 in fp32 at batch 16 on a busy machine: the linears of a step take 60 instead of 66 ms of processor
time (the best of each). oneDNN allocates the memory itself, so the pages are merged afterwards, by Linux's
`madvise(MADV_COLLAPSE)` (since 6.1). It is a hint: where the system cannot, the weights stay on small pages and
everything works.

The weights serve meanwhile: merging takes longer than loading (1.4 of 2.3 seconds in a fresh process, where the system
has no huge page free), and nobody should wait for new weights so long.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from services.engine.linear import Linear

HUGE_PAGE_BYTES = 2**21
_MADV_COLLAPSE = 25
"""From Linux's mman-common.h; Python's mmap module does not know it."""


def page_collapser() -> Callable[[int], bool]:
    """Merges what lies on the aligned huge page of a number. About 4 ms of processor time. False: not possible."""
    if not sys.platform.startswith("linux"):
        return lambda _number: False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda number: madvise(number * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0


def huge_pages(linears: Iterable[Linear]) -> list[int]:
    """Numbers of the aligned huge pages that packed weights lie on. Those at the ends are shared with other memory."""
    numbers: set[int] = set()
    for linear in linears:
        if linear.packed:
            start = torch.ops.mkldnn.data_ptr(linear.weight)
            end = start + torch.ops.mkldnn._nbytes(linear.weight)
            numbers.update(range(start // HUGE_PAGE_BYTES, -(-end // HUGE_PAGE_BYTES)))
    return sorted(numbers)


class HugePageMover:
    """Moves weights to huge pages on a thread of its own. One version at a time. Not thread-safe itself."""

    def __init__(self, collapse: Callable[[int], bool] | None = None) -> None:
        """`collapse` is for tests; else `page_collapser`'s."""
        self._collapse = collapse or page_collapser()
        self._no_longer_wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, linears: Sequence[Linear]) -> None:
        """Begins with these, which serve from now on. What was under way ends, after one more page."""
        self._no_longer_wanted.set()
        self.wait()
        self._no_longer_wanted = threading.Event()
        arguments = (linears, self._no_longer_wanted)
        self._thread = threading.Thread(target=self._move, args=arguments, name="huge-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until everything is moved that can be."""
        if self._thread is not None:
            self._thread.join()

    def _move(self, linears: Sequence[Linear], no_longer_wanted: threading.Event) -> None:
        # `linears` is held to the end: else the memory could be another's by then.
        for number in huge_pages(linears):
            if no_longer_wanted.is_set():
                return
            self._collapse(number)
