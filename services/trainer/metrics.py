# pyright: basic
# Reason: torch tensors in and out; torch's stubs are partial.
"""The measurements of a training step, summed over micro-batches and ranks, then divided once.

Per token that is active in any component, with w' = exp(l_prox - mu) at the sampling temperature, before its cap:
- `shift_mean_abs`, `shift_max_abs`: |l_prox - mu| in nats: how far the policy has moved since the data was sampled;
- `effective_sample_share`: (sum w')^2 / (n * sum w'^2): Kish's effective sample size over the number of tokens;
- `entropy_mean`: nats at the sampling temperature; `masked_share`: share of response tokens in no component.
Over the active tokens of all components, a token of two counting twice:
- `behaviour_weight_capped_share`: share of tokens whose w was cut to the cap;
- `clipped_share`: share of tokens whose gradient a clip removed; `ratio_mean`, `ratio_max`: rho;
- `rejected_share`: share of the components' tokens that off-policy control left out.
And per component, for example `opd_loss`: `loss`, `active_tokens`, `clipped_share`, `rejected_share`,
`advantage_mean`, `advantage_mean_abs`. `regularisation` is the loss of what holds the policy back.
"""

from collections.abc import Sequence

import torch

from services.trainer.algorithms.base import AlgorithmLoss, TokenBatch
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.sample import SampleStatistics

_SUMS = ("tokens", "all_tokens", "entropy", "shift", "weight", "weight_squared", "computed_tokens", "regularisation")
_COMPONENT_SUMS = ("loss", "tokens", "rejected", "clipped", "capped", "ratio", "advantage", "advantage_abs")
_SAMPLE_COLUMNS = ("loss", "tokens", "shift", "entropy", "clipped")
_LARGEST_LOG_WEIGHT = 40.0
"""exp of a larger difference would overflow the squares; such tokens have no effective weight left anyway."""


class StepMeasurements:
    """Accumulates one step's measurements on this rank."""

    def __init__(self, num_samples: int, components: Sequence[str], device: torch.device) -> None:
        """`components` are the algorithm's: every rank must have the same, also one without a micro-batch."""
        self._components = tuple(components)
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._parts = torch.zeros(len(self._components), len(_COMPONENT_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=device)  # |shift|, ratio
        self._samples = torch.zeros(num_samples, len(_SAMPLE_COLUMNS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        indices: torch.Tensor,  # [samples of the micro-batch] int64: their places in the batch
        tokens: TokenBatch,
        loss: AlgorithmLoss,
        computed_tokens: int,
    ) -> None:
        """Adds a micro-batch. `computed_tokens` counts every token that the model ran on."""
        active = torch.stack([part.active for part in loss.components.values()]).any(0)  # [tokens]
        clipped = torch.stack([part.clipped for part in loss.components.values()]).any(0)
        log_weight = (tokens.proximal_log_probs - tokens.behaviour_log_probs).double()
        shift = log_weight.abs()
        weight = log_weight.clamp(max=_LARGEST_LOG_WEIGHT).exp()
        entropies = tokens.entropies.detach().double()
        ones = torch.ones_like(shift)
        for column, values in enumerate((ones, None, entropies, shift, weight, weight * weight)):
            self._sums[column] += shift.numel() if values is None else values[active].sum()
        self._sums[-2] += computed_tokens
        self._sums[-1] += loss.regularisation.double().sum()
        for row, name in enumerate(self._components):
            part = loss.components[name]
            self._parts[row, 0] += part.per_sample.double().sum()
            self._parts[row, 2] += part.rejected.sum()
            per_token = (ones, part.clipped, part.capped, part.ratio, part.advantages, part.advantages.abs())
            for column, values in zip((1, 3, 4, 5, 6, 7), per_token, strict=True):
                self._parts[row, column] += values[part.active].double().sum()
            if bool(part.active.any()):
                self._largest[1] = torch.maximum(self._largest[1], part.ratio[part.active].max().double())
        if bool(active.any()):
            self._largest[0] = torch.maximum(self._largest[0], shift[active].max())
        owner = indices[tokens.sample_of_token]
        self._samples[:, 0].index_add_(0, indices, loss.per_sample.detach().double())
        for column, values in enumerate((ones, shift, entropies, clipped.double())):
            self._samples[:, column + 1].index_add_(0, owner, torch.where(active, values, 0.0))

    def combine(self, layout: ParallelLayout) -> None:
        """Adds up the ranks. A collective of the data-parallel group."""
        layout.sum_over_data_ranks(self._sums)
        layout.sum_over_data_ranks(self._parts)
        layout.max_over_data_ranks(self._largest)
        layout.sum_over_data_ranks(self._samples)

    def merge(self, other: "StepMeasurements") -> None:
        """Adds another part of the same batch; both are combined already."""
        self._sums += other._sums
        self._parts += other._parts
        self._largest = torch.maximum(self._largest, other._largest)
        self._samples += other._samples

    @property
    def loss(self) -> float:
        """The batch's loss."""
        return float(self._samples[:, 0].sum())

    def metrics(self) -> dict[str, float]:
        """The module's measurements, after `combine`."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        count = max(1.0, sums["tokens"])
        squares = sums["weight_squared"]
        all_parts = dict(zip(_COMPONENT_SUMS, self._parts.sum(0).tolist(), strict=True))
        active_in_parts = max(1.0, all_parts["tokens"])
        result = {
            "loss": self.loss,
            "active_tokens": sums["tokens"],
            "masked_share": 1 - sums["tokens"] / max(1.0, sums["all_tokens"]),
            "computed_tokens": sums["computed_tokens"],
            "entropy_mean": sums["entropy"] / count,
            "shift_mean_abs": sums["shift"] / count,
            "shift_max_abs": float(self._largest[0]),
            "effective_sample_share": sums["weight"] ** 2 / (count * squares) if squares > 0 else 0.0,
            "behaviour_weight_capped_share": all_parts["capped"] / active_in_parts,
            "clipped_share": all_parts["clipped"] / active_in_parts,
            "rejected_share": all_parts["rejected"] / max(1.0, all_parts["tokens"] + all_parts["rejected"]),
            "ratio_mean": all_parts["ratio"] / active_in_parts,
            "ratio_max": float(self._largest[1]),
            "regularisation": sums["regularisation"],
        }
        for name, values in zip(self._components, self._parts.tolist(), strict=True):
            part = dict(zip(_COMPONENT_SUMS, values, strict=True))
            active = max(1.0, part["tokens"])
            result |= {
                f"{name}_loss": part["loss"],
                f"{name}_active_tokens": part["tokens"],
                f"{name}_clipped_share": part["clipped"] / active,
                f"{name}_rejected_share": part["rejected"] / max(1.0, part["tokens"] + part["rejected"]),
                f"{name}_advantage_mean": part["advantage"] / active,
                f"{name}_advantage_mean_abs": part["advantage_abs"] / active,
            }
        return result

    def sample_statistics(self) -> list[SampleStatistics]:
        """One per sample of the batch, after `combine`."""
        statistics: list[SampleStatistics] = []
        for loss, tokens, shift, entropy, clipped in self._samples.tolist():
            count = max(1.0, tokens)
            statistics.append(SampleStatistics(loss, int(tokens), shift / count, entropy / count, clipped / count))
        return statistics
