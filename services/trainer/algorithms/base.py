"""What an algorithm is: a loss on plain tensors, in one file of its own, loadable by import path.

A batch is computed in micro-batches, possibly on several ranks, so an algorithm never averages over what it
sees: it divides by the *global* number of samples of each of its components, which it is given. The sum of the
losses of all micro-batches of all ranks is then the loss of the batch, however it was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch

from clawstream.errors import SettingsError


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch, end to end; masked ones included."""

    log_probs: torch.Tensor
    """[tokens] current policy at the sampling temperature; differentiable."""
    proximal_log_probs: torch.Tensor
    """[tokens] policy at the start of the batch at the sampling temperature; constant."""
    behaviour_log_probs: torch.Tensor
    """[tokens] policy that sampled, at the sampling temperature; constant."""
    sample_of_token: torch.Tensor
    """[tokens] int64: index of each token's sample in the micro-batch."""
    rewards: torch.Tensor
    """[samples] reward of the RL component; 0 for a sample without one."""
    rl_mask: torch.Tensor
    """[tokens] bool: tokens of the RL component."""


@dataclass(frozen=True, slots=True)
class AlgorithmLoss:
    """An algorithm's answer for one micro-batch."""

    per_sample: torch.Tensor
    """[samples] each sample's share of the batch's loss; differentiable. Their sum is descended."""
    active: torch.Tensor
    """[tokens] bool: tokens in the loss."""
    clipped: torch.Tensor
    """[tokens] bool: tokens whose gradient the clip removed."""
    ratio: torch.Tensor
    """[tokens] rho."""
    capped: torch.Tensor
    """[tokens] bool: tokens whose weight against the behaviour policy was cut to its cap."""


@runtime_checkable
class Algorithm(Protocol):
    """A loss, and how many samples each of its components has."""

    def component_samples(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        """Name of each component to a [samples] bool tensor: which samples belong to it.

        Reads masks and rewards only: it is called before the forward pass, with empty log-probs.
        """
        ...

    def has_signal(self, tokens: TokenBatch) -> torch.Tensor:
        """[samples] bool: which samples can have a gradient at all (an unmasked token and an advantage not 0)."""
        ...

    def loss(self, tokens: TokenBatch, num_samples: Mapping[str, int]) -> AlgorithmLoss:
        """The loss of a micro-batch; `num_samples` is the global number of samples of each component."""
        ...


def token_mean_per_sample(
    values: torch.Tensor, mask: torch.Tensor, sample_of_token: torch.Tensor, num_samples: int
) -> torch.Tensor:
    """[samples]: mean of `values` [tokens] over each sample's tokens in `mask`; 0 where it has none."""
    sums = values.new_zeros(num_samples).index_add(0, sample_of_token, torch.where(mask, values, 0.0))
    counts = values.new_zeros(num_samples).index_add(0, sample_of_token, mask.to(values.dtype))
    return sums / counts.clamp(min=1)


def samples_with_tokens(mask: torch.Tensor, sample_of_token: torch.Tensor, num_samples: int) -> torch.Tensor:
    """[samples] bool: which samples have a token in `mask` [tokens]."""
    counts = torch.zeros(num_samples, dtype=torch.int64, device=mask.device)
    return counts.index_add(0, sample_of_token, mask.to(torch.int64)) > 0


def load_algorithm(import_path: str, options: Mapping[str, object]) -> Algorithm:
    """Builds the algorithm at `package.module:name` with `options` as keyword arguments.

    Raises SettingsError when there is none, when it takes other options, or when it is not an Algorithm.
    """
    module_name, separator, name = import_path.partition(":")
    if not separator or not module_name or not name:
        raise SettingsError(f"algorithm {import_path!r} is not an import path of the form 'package.module:name'")
    try:
        factory = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"algorithm {import_path!r} cannot be imported: {error}") from error
    try:
        algorithm = factory(**options)
    except TypeError as error:
        raise SettingsError(f"algorithm {import_path!r} does not take the options {dict(options)}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise SettingsError(f"algorithm {import_path!r} lacks component_samples, has_signal or loss")
    return algorithm
