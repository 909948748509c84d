"""What an algorithm is: a loss on plain tensors, in one file of its own, loadable by import path.

A batch is computed in micro-batches, possibly on several ranks, so an algorithm never averages over what it sees.
Before the forward pass it is shown the masks of the *whole* batch and says what a token of each sample weighs
(`sample_weights`, see `aggregation`); with these weights the losses of all micro-batches of all ranks add up to the
loss of the batch, however it was cut. Each component (`rl`, `opd`) has weights, so a denominator, of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch

from clawstream.errors import SettingsError
from services.trainer.algorithms.options import AggregationOptions, IdSource, RatioMode, RatioOptions


@dataclass(frozen=True, slots=True)
class GivenIds:
    """Log-probs at ids that were not necessarily sampled, all at temperature 1. Each [tokens, k]."""

    log_probs: torch.Tensor
    """Current policy; differentiable."""
    proximal_log_probs: torch.Tensor
    """Policy at the start of the batch; constant."""
    teacher_log_probs: torch.Tensor
    """Teacher; constant."""
    mask: torch.Tensor
    """Bool: entries that exist. The others are padding, whatever stands in them."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch, end to end; masked ones included.

    T_s is the temperature that a sample was sampled with. Log-probs may be empty where only masks and advantages are
    read (`sample_weights`, `has_signal`).
    """

    log_probs: torch.Tensor
    """[tokens] current policy at T_s; differentiable."""
    proximal_log_probs: torch.Tensor
    """[tokens] policy at the start of the batch at T_s; constant."""
    behaviour_log_probs: torch.Tensor
    """[tokens] policy that sampled, at T_s; constant."""
    sample_of_token: torch.Tensor
    """[tokens] int64: index of each token's sample in the micro-batch."""
    advantages: torch.Tensor
    """[samples] advantage of the RL component; 0 for a sample without one."""
    rl_mask: torch.Tensor
    """[tokens] bool: tokens of the RL component."""
    opd_mask: torch.Tensor
    """[tokens] bool: tokens of the distillation component."""
    rollout_of_sample: torch.Tensor
    """[samples] int64: samples with the same number are turns of one rollout."""
    teacher_log_probs: torch.Tensor
    """[tokens] teacher at temperature 1; 0 outside `opd_mask`."""
    unit_log_probs: torch.Tensor
    """[tokens] current policy at temperature 1; differentiable. Empty unless `Needs.unit_temperature`."""
    unit_proximal_log_probs: torch.Tensor
    """[tokens] policy at the start of the batch at temperature 1; constant."""
    entropies: torch.Tensor
    """[tokens] entropy of the current policy at T_s in nats; differentiable."""
    reference_log_probs: torch.Tensor | None = None
    """[tokens] base model at T_s; only with `Needs.reference`."""
    given: GivenIds | None = None
    """At the ids of `Needs.ids`."""

    @property
    def num_samples(self) -> int:
        """Samples of the micro-batch."""
        return self.advantages.numel()


@dataclass(frozen=True, slots=True)
class ComponentLoss:
    """One component's answer for one micro-batch."""

    per_sample: torch.Tensor
    """[samples] each sample's share of the batch's loss, weighted; differentiable."""
    active: torch.Tensor
    """[tokens] bool: tokens in the loss."""
    rejected: torch.Tensor
    """[tokens] bool: tokens of the component that off-policy control left out; they stay in the denominator."""
    clipped: torch.Tensor
    """[tokens] bool: active tokens whose gradient a clip removed."""
    capped: torch.Tensor
    """[tokens] bool: active tokens whose weight against the behaviour policy was cut to its cap."""
    ratio: torch.Tensor
    """[tokens] rho."""
    advantages: torch.Tensor
    """[tokens] A; where a component has several a token, their sum over the ids."""

    def times(self, coefficient: float) -> "ComponentLoss":
        """The same component, its loss times `coefficient`."""
        return replace(self, per_sample=self.per_sample * coefficient)


@dataclass(frozen=True, slots=True)
class AlgorithmLoss:
    """An algorithm's answer for one micro-batch."""

    components: Mapping[str, ComponentLoss]
    """By name, exactly those of `Algorithm.components`."""
    regularisation: torch.Tensor
    """[samples] share of what holds the policy back (KL, entropy); differentiable, 0 without."""

    @property
    def per_sample(self) -> torch.Tensor:
        """[samples] each sample's share of the batch's loss; differentiable. Their sum is descended."""
        return torch.stack([*(part.per_sample for part in self.components.values()), self.regularisation]).sum(0)


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be computed for an algorithm beside log-probs and entropies at T_s."""

    unit_temperature: bool = False
    """The policy's log-probs at temperature 1."""
    ids: IdSource = IdSource.NONE
    """The policy's log-probs at further ids (temperature 1)."""
    ids_per_token: int | None = None
    """At most so many of them; None takes all that the samples carry."""
    reference: bool = False
    """The base model's log-probs."""
    recomputed_proximal: bool = False
    """A forward pass of its own at the start of the batch, although one update would not need it."""
    every_sample: bool = False
    """Samples without signal have a gradient too (KL, entropy)."""


def needs_of(
    options: AggregationOptions,
    *,
    unit_temperature: bool = False,
    ids: IdSource = IdSource.NONE,
    ids_per_token: int | None = None,
) -> Needs:
    """What a loss with `options` needs, beside what is particular to it."""
    return Needs(
        unit_temperature=unit_temperature,
        ids=ids,
        ids_per_token=ids_per_token,
        reference=options.kl_coefficient > 0 and options.kl_reference == "base",
        recomputed_proximal=isinstance(options, RatioOptions) and options.ratio is RatioMode.RECOMPUTED,
        every_sample=options.is_regularised,
    )


@runtime_checkable
class Algorithm(Protocol):
    """A loss, with its components and their denominators."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components, always the same."""
        ...

    @property
    def needs(self) -> Needs:
        """What must be computed for it."""
        ...

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """By component: [samples] float64, what a token of each sample weighs; 0 for samples that do not belong.

        Called once with the masks of the whole batch, before the forward pass.
        """
        ...

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: which samples can have a gradient: an unmasked token with an advantage or a teacher."""
        ...

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The loss of a micro-batch; `weights` are `sample_weights` of its samples."""
        ...


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
    except (TypeError, ValueError) as error:
        raise SettingsError(f"algorithm {import_path!r} does not take the options {dict(options)}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise SettingsError(f"algorithm {import_path!r} lacks components, needs, sample_weights, has_signal or loss")
    return algorithm
