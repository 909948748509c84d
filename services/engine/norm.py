"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) in few passes: torch's own is composed of nine operators on CPUs."""

from typing import cast

import torch
from torch import Tensor
from torch.linalg import vector_norm  # pyright: ignore[reportUnknownVariableType] - a builtin without a signature


def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension; the mean in fp32, as Hugging Face does.

    `x` [.., width]; `weight` [width], or anything that broadcasts to `x`; `epsilon` [], fp32. Returns x's shape, dtype.
    """
    norm = cast("Tensor", vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32))  # [.., 1]
    scale = torch.addcmul(epsilon, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)
