# pyright: basic
# Reason: torch tensors in and out; torch's stubs are partial.
"""The measurements of a training step, summed over micro-batches and ranks, then divided once.

Per active response token, with w' = exp(l_prox - mu) before its cap:
- `shift_mean_abs`, `shift_max_abs`: |l_prox - mu| in nats: how far the policy has moved since the data was sampled;
- `effective_sample_share`: (sum w')^2 / (n * sum w'^2): Kish's effective sample size over the number of tokens;
- `behaviour_weight_capped_share`: share of tokens whose w' was cut to the cap;
- `clipped_share`: share of tokens whose gradient the clip removed;
- `ratio_mean`, `ratio_max`: rho; `entropy_mean`: nats at the sampling temperature.
"""

import torch

from services.trainer.algorithms.base import AlgorithmLoss, TokenBatch
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.sample import SampleStatistics

_SUMS = ("tokens", "entropy", "shift", "weight", "weight_squared", "capped", "clipped", "ratio", "computed_tokens")
_SAMPLE_COLUMNS = ("loss", "tokens", "shift", "entropy", "clipped")
_LARGEST_LOG_WEIGHT = 40.0
"""exp of a larger difference would overflow the squares; such tokens have no effective weight left anyway."""


class StepMeasurements:
    """Accumulates one step's measurements on this rank."""

    def __init__(self, num_samples: int, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.zeros(2, dtype=torch.float64, device=device)  # |shift|, ratio
        self._samples = torch.zeros(num_samples, len(_SAMPLE_COLUMNS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        indices: torch.Tensor,  # [samples of the micro-batch] int64: their places in the batch
        tokens: TokenBatch,
        entropies: torch.Tensor,  # [tokens]
        loss: AlgorithmLoss,
        computed_tokens: int,
    ) -> None:
        """Adds a micro-batch. `computed_tokens` counts every token that the model ran on."""
        active = loss.active
        log_weight = (tokens.proximal_log_probs - tokens.behaviour_log_probs).double()
        shift = log_weight.abs()
        weight = log_weight.clamp(max=_LARGEST_LOG_WEIGHT).exp()
        ratio = loss.ratio.double()
        per_token = (
            torch.ones_like(shift),
            entropies.double(),
            shift,
            weight,
            weight * weight,
            loss.capped.double(),
            loss.clipped.double(),
            ratio,
        )
        for column, values in enumerate(per_token):
            self._sums[column] += values[active].sum()
        self._sums[-1] += computed_tokens
        if bool(active.any()):
            self._largest[0] = torch.maximum(self._largest[0], shift[active].max())
            self._largest[1] = torch.maximum(self._largest[1], ratio[active].max())
        owner = indices[tokens.sample_of_token]
        self._samples[:, 0].index_add_(0, indices, loss.per_sample.double())
        for column, values in enumerate((torch.ones_like(shift), shift, entropies.double(), loss.clipped.double())):
            self._samples[:, column + 1].index_add_(0, owner, torch.where(active, values, 0.0))

    def combine(self, layout: ParallelLayout) -> None:
        """Adds up the ranks. A collective of the data-parallel group."""
        layout.sum_over_data_ranks(self._sums)
        layout.max_over_data_ranks(self._largest)
        layout.sum_over_data_ranks(self._samples)

    @property
    def loss(self) -> float:
        """The batch's loss."""
        return float(self._samples[:, 0].sum())

    def metrics(self) -> dict[str, float]:
        """The module's measurements, after `combine`."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        count = max(1.0, sums["tokens"])
        squares = sums["weight_squared"]
        return {
            "loss": self.loss,
            "active_tokens": sums["tokens"],
            "computed_tokens": sums["computed_tokens"],
            "entropy_mean": sums["entropy"] / count,
            "shift_mean_abs": sums["shift"] / count,
            "shift_max_abs": float(self._largest[0]),
            "effective_sample_share": sums["weight"] ** 2 / (count * squares) if squares > 0 else 0.0,
            "behaviour_weight_capped_share": sums["capped"] / count,
            "clipped_share": sums["clipped"] / count,
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": float(self._largest[1]),
        }

    def sample_statistics(self) -> list[SampleStatistics]:
        """One per sample of the batch, after `combine`."""
        statistics = []
        for loss, tokens, shift, entropy, clipped in self._samples.tolist():
            count = max(1.0, tokens)
            statistics.append(SampleStatistics(loss, int(tokens), shift / count, entropy / count, clipped / count))
        return statistics
