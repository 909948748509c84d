"""Rotary position embeddings (Su et al., arXiv 2104.09864) in Hugging Face's half-split layout."""

import math

import torch
from torch import Tensor

from services.engine.architecture import Llama3RopeScaling, ModelArchitecture


def rotary_tables(architecture: ModelArchitecture, context_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, each [context_tokens, head_dim]; computed in fp32.

    Both are repeated for the two halves of a head; the sines of the first half are negated, as `rotate` wants them.
    """
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents  # [head_dim / 2]
    if architecture.rope_scaling is not None:
        frequencies = scale_llama3(frequencies, architecture.rope_scaling)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), dim=-1).to(dtype), torch.cat((-sines, sines), dim=-1).to(dtype)


def scale_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3's scaling: long wavelengths slowed by `factor`, short ones kept, a blend between. [head_dim / 2]"""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context_tokens / wavelengths  # full turns within the original context
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`heads` [rows, heads, head_dim] turned by the rows' positions; cosines and signed sines [rows, 1, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)  # the second half first
    return (heads * cosines).addcmul_(swapped, sines)
