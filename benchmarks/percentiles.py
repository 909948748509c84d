"""Percentiles as the benchmarks report them."""

from collections.abc import Sequence

import numpy as np


def milliseconds(seconds: Sequence[float], *percentiles: float) -> dict[str, float]:
    """`{"p50": ..., "p99": ...}` in milliseconds. Raises ValueError when nothing was measured."""
    if not seconds:
        raise ValueError("nothing was measured")
    values = np.percentile(np.asarray(seconds), percentiles)
    return {
        f"p{percentile:g}": round(1000 * float(value), 2) for percentile, value in zip(percentiles, values, strict=True)
    }
