# pyright: basic
# Reason: torch.ops.mkldnn is a private, untyped operator namespace.
"""Linear layers with weights packed once for oneDNN, which on CPUs is up to three times as fast as `F.linear`.

The two operators are private to torch. So torch is pinned, they are compared with `F.linear` at start-up, and where
they are missing or disagree `F.linear` is used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

EXPECTED_ROWS = 16
"""The number of rows that packing optimises for: a decode step of a full batch. Any number of rows works."""
LARGEST_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Beyond this the packed result is not trusted."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias."""

    weight: Tensor
    """[out, in], in oneDNN's blocked layout when `packed`."""
    bias: Tensor | None
    """[out]"""
    packed: bool

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + y, in one pass over y; `residual` [rows, out] is not changed. [rows, in] -> [rows, out]"""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return residual + functional.linear(x, self.weight, self.bias)


def make_linear(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Linear:
    """A linear layer that owns a copy of `weight` [out, in], so that its file may disappear."""
    if packed:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), EXPECTED_ROWS)
        return Linear(reordered, None if bias is None else bias.clone(), packed=True)
    return Linear(weight.clone(), None if bias is None else bias.clone(), packed=False)


def packing_works(dtype: torch.dtype) -> bool:
    """Whether the packed operators exist here and agree with `F.linear`, for one row, a full batch and a prompt."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    try:
        layer = make_linear(weight, bias, packed=True)
        errors = [relative_error(layer, weight, bias, rows, generator) for rows in (1, EXPECTED_ROWS, 100)]
    except (AttributeError, RuntimeError):  # the operators are not in this build, or not for this dtype or processor
        return False
    return max(errors) <= LARGEST_RELATIVE_ERROR[dtype]


def relative_error(layer: Linear, weight: Tensor, bias: Tensor, rows: int, generator: torch.Generator) -> float:
    """Largest difference between `layer` and fp32 arithmetic on random input, relative to the largest output.

    With and without a residual.
    """
    x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
    residual = torch.randn(rows, weight.shape[0], generator=generator).to(weight.dtype)
    expected = functional.linear(x.float(), weight.float(), bias.float())
    plain = (layer(x).float() - expected).abs().max()
    added = (layer.added_to(residual, x).float() - residual.float() - expected).abs().max()
    return float(torch.maximum(plain, added) / expected.abs().max())
