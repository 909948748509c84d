"""What a process that has started says to Python's garbage collector."""

import gc


def settle() -> None:
    """Says that the process has made what it lives with: modules, models, clients. Called once, before the first input.

    Python's collector need not look at any of it again. Else each full collection, which a stream of events causes
    every few thousand inputs, walks through all of it: a tenth of a worker's time, and a stop of all streams.
    """
    gc.collect()
    gc.freeze()
