# pyright: basic
# Reason: drives the Megatron engine, whose tensors and groups are untyped.
"""The policy being trained: load, step, snapshot, restore. No Kafka, no clock, no files but the base model's.

Every rank holds the same batch and calls the same methods in the same order. A step is one optimizer update on
one batch: gradients accumulate over micro-batches, losses are divided by global counts, so how a batch is cut
into micro-batches and spread over ranks changes nothing but rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.trainer.algorithms.base import Algorithm, TokenBatch
from services.trainer.engine import cpu_platform
from services.trainer.engine.bridge import read_config
from services.trainer.engine.log_probabilities import VocabularyShard, log_probabilities
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.optimizer import OptimizerSettings, ParallelAdamW
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import ReadTensor, load_hugging_face, load_shards, whole_tensors
from services.trainer.metrics import StepMeasurements
from services.trainer.packing import pack, plan_micro_batches, share_among_ranks
from services.trainer.sample import StepResult, TrainingSample, UnchangedReason


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A copy of everything that training has changed, in Hugging Face's names and shapes, on the CPU.

    It does not depend on the number of ranks, and later steps do not touch it: it can be written by another thread.
    """

    weights: dict[str, torch.Tensor]
    """fp32 main parameters (or the model's own type where that is wider)."""
    moments: dict[str, dict[str, torch.Tensor]]
    """Adam's moments by torch's name, then by Hugging Face's tensor name."""
    random_state: dict[str, torch.Tensor]
    """Generator states by device kind, uint8."""
    num_updates: int
    """Optimizer updates made."""
    model_dtype: torch.dtype
    """The type that the model computes in, and in which weights are published."""


class PolicyTrainer:
    """See the module's docstring. Not safe for concurrent use; a snapshot is."""

    def __init__(
        self,
        layout: ParallelLayout,
        algorithm: Algorithm,
        *,
        optimizer_settings: OptimizerSettings | None = None,
        tokens_per_micro_batch: int = 2048,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layout = layout
        self._algorithm = algorithm
        self._optimizer_settings = optimizer_settings or OptimizerSettings()
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._dtype = dtype
        self._model: PolicyModel | None = None
        self._optimizer: ParallelAdamW | None = None

    @property
    def model(self) -> PolicyModel:
        """The network. Raises RuntimeError before `load`."""
        if self._model is None:
            raise RuntimeError("load a model first")
        return self._model

    @property
    def optimizer(self) -> ParallelAdamW:
        """The optimizer. Raises RuntimeError before `load`."""
        if self._optimizer is None:
            raise RuntimeError("load a model first")
        return self._optimizer

    def load(self, hugging_face_directory: Path) -> None:
        """Builds the model of a Hugging Face directory and loads its weights; the optimizer starts afresh.

        Raises SettingsError for a model that cannot be trained, WeightsError for missing or misshapen tensors.
        """
        config = read_config(str(hugging_face_directory))
        model = PolicyModel(config, dtype=self._dtype, tensor_parallel_size=self.layout.tensor_size)
        load_hugging_face(model, self.layout, hugging_face_directory)
        self._model = model
        self._optimizer = ParallelAdamW(model.named_parameters(), self.layout, self._optimizer_settings)

    def train_step(self, batch: Sequence[TrainingSample], learning_rate: float) -> StepResult:
        """One update on `batch`, or none, with the reason. A collective of all ranks.

        Raises ValueError for an empty batch and for token ids outside the vocabulary.
        """
        if not batch:
            raise ValueError("a batch needs at least one sample")
        self._check_vocabulary(batch)
        self.optimizer.discard_gradients()
        measurements = StepMeasurements(len(batch), cpu_platform.device())

        def unchanged(reason: UnchangedReason, culprits: Sequence[str] = ()) -> StepResult:
            self.optimizer.discard_gradients()
            return self._result(batch, measurements, reason, 0.0, learning_rate, culprits)

        culprits = [sample.sample_id for sample in batch if not sample.is_finite]
        if culprits:
            return unchanged(UnchangedReason.NON_FINITE, culprits)
        whole_batch = _token_batch(batch, torch.empty(0))
        components = self._algorithm.component_samples(whole_batch)
        num_samples = {name: int(members.sum()) for name, members in components.items()}
        if not any(num_samples.values()):
            return unchanged(UnchangedReason.ALL_MASKED)
        has_signal = self._algorithm.has_signal(whole_batch).tolist()
        if not any(has_signal):
            return unchanged(UnchangedReason.ZERO_ADVANTAGE)

        # A sample without signal adds exactly 0 to the gradient: it counts in the denominators, and costs nothing.
        computed = [index for index, signal in enumerate(has_signal) if signal]
        lengths = [batch[index].num_tokens for index in computed]
        plan = plan_micro_batches(lengths, self._tokens_per_micro_batch)
        for micro_batch in share_among_ranks(plan, lengths, self.layout.data_size)[self.layout.data_rank]:
            self._accumulate(batch, [computed[place] for place in micro_batch], num_samples, measurements)
        measurements.combine(self.layout)
        gradient_norm = self.optimizer.reduce_gradients()
        if not np.isfinite(gradient_norm) or not np.isfinite(measurements.loss):
            statistics = measurements.sample_statistics()
            culprits = [
                sample.sample_id
                for sample, statistic in zip(batch, statistics, strict=True)
                if not np.isfinite(statistic.loss)
            ]
            return unchanged(UnchangedReason.NON_FINITE, culprits)
        if gradient_norm == 0.0:
            return unchanged(UnchangedReason.ZERO_GRADIENT)
        self.optimizer.step(learning_rate, gradient_norm)
        return self._result(batch, measurements, None, gradient_norm, learning_rate)

    def _accumulate(
        self,
        batch: Sequence[TrainingSample],
        indices: list[int],
        num_samples: dict[str, int],
        measurements: StepMeasurements,
    ) -> None:
        """Forward and backward of one micro-batch."""
        samples = [batch[index] for index in indices]
        row = pack([(sample.prompt_ids, sample.response_ids) for sample in samples])
        log_probs, entropies = self._log_probs(samples, row, self.model.logits(row))
        # With one update per batch the policy at its start is the current one: no second forward pass.
        tokens = _token_batch(samples, log_probs)
        loss = self._algorithm.loss(tokens, num_samples)
        loss.per_sample.sum().backward()
        place = torch.as_tensor(indices, device=log_probs.device)
        measurements.add(place, tokens, entropies, loss, row.token_ids.size)

    def _log_probs(self, samples, row, logits) -> tuple[torch.Tensor, torch.Tensor]:
        temperatures = np.asarray([sample.sampling_temperature for sample in samples])[row.sequence_of_target]
        shard = VocabularyShard.of_rank(
            self.model.vocabulary_size,
            logits.size(1),
            self.layout.tensor_rank,
            self.layout.tensor_size,
            self.layout.tensor_group,
        )
        return log_probabilities(
            logits,
            torch.as_tensor(row.target_ids, device=logits.device),
            torch.as_tensor(temperatures, device=logits.device),
            shard,
        )

    @torch.no_grad()
    def score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Current log-probs of every response, each [response_tokens], at its sampling temperature.

        A collective of the tensor-parallel group; every data-parallel rank computes all of them.
        """
        self._check_vocabulary(samples)
        answers: list[np.ndarray] = [np.empty(0)] * len(samples)
        for micro_batch in plan_micro_batches([s.num_tokens for s in samples], self._tokens_per_micro_batch):
            chosen = [samples[index] for index in micro_batch]
            row = pack([(sample.prompt_ids, sample.response_ids) for sample in chosen])
            log_probs, _ = self._log_probs(chosen, row, self.model.logits(row))
            ends = np.cumsum([sample.response_ids.size for sample in chosen])[:-1]
            for index, part in zip(micro_batch, np.split(log_probs.cpu().numpy(), ends), strict=True):
                answers[index] = part
        return answers

    def _check_vocabulary(self, samples: Sequence[TrainingSample]) -> None:
        size = self.model.vocabulary_size
        for sample in samples:
            for ids in (sample.prompt_ids, sample.response_ids):
                if ids.min() < 0 or ids.max() >= size:
                    raise ValueError(
                        f"sample {sample.sample_id}: token ids {ids.min()}..{ids.max()} do not fit "
                        f"the model's vocabulary of {size}; it was made with another tokenizer"
                    )

    def _result(
        self,
        batch: Sequence[TrainingSample],
        measurements: StepMeasurements,
        reason: UnchangedReason | None,
        gradient_norm: float,
        learning_rate: float,
        culprits: Sequence[str] = (),
    ) -> StepResult:
        rewards = np.asarray([sample.reward for sample in batch if sample.rl_mask.any()] or [0.0])
        metrics = measurements.metrics() | {
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
            "num_updates": float(self.optimizer.num_updates),
            "num_samples": float(len(batch)),
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "nonzero_reward_share": float((rewards != 0).mean()),
        }
        statistics = measurements.sample_statistics()
        return StepResult(
            changed=reason is None,
            unchanged_reason=reason,
            metrics=metrics,
            samples={sample.sample_id: stats for sample, stats in zip(batch, statistics, strict=True)},
            non_finite_samples=tuple(culprits),
        )

    def snapshot(self) -> PolicySnapshot | None:
        """A copy of the state, on rank 0; None on the others. A collective of all ranks."""
        weights = self._whole_copies(self.optimizer.main_parameters)
        moments = {name: self._whole_copies(tensors) for name, tensors in self.optimizer.moments()}
        if self.layout.rank != 0:
            return None
        return PolicySnapshot(weights, moments, _random_state(), self.optimizer.num_updates, self._dtype)

    def _whole_copies(self, sources: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by Hugging Face's name on rank 0; the other ranks give their shards and keep nothing."""
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in whole_tensors(self.model, self.layout, sources):
            if self.layout.rank == 0:
                copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return copies

    def restore(
        self,
        read_weight: ReadTensor,
        read_moment: dict[str, ReadTensor],
        random_state: dict[str, torch.Tensor],
        num_updates: int,
    ) -> None:
        """Continues where a snapshot was taken; the model must have been loaded. All ranks read for themselves.

        Raises WeightsError when a tensor is missing or does not fit.
        """
        load_shards(self.model, self.layout, read_weight, self.optimizer.main_parameters)
        for name, tensors in self.optimizer.moments():
            load_shards(self.model, self.layout, read_moment[name], tensors)
        self.optimizer.discard_gradients()
        self.optimizer.restored(num_updates)
        torch.set_rng_state(random_state["cpu"])
        if cpu_platform.has_gpu():
            torch.cuda.set_rng_state(random_state["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if cpu_platform.has_gpu():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _token_batch(samples: Sequence[TrainingSample], log_probs: torch.Tensor) -> TokenBatch:
    """The samples' tokens end to end. `log_probs` may be empty where only masks and rewards are read."""
    device, dtype = log_probs.device, log_probs.dtype
    masks = np.concatenate([sample.rl_mask for sample in samples])
    behaviour = np.concatenate([sample.behaviour_log_probs for sample in samples])
    lengths = [sample.response_ids.size for sample in samples]
    return TokenBatch(
        log_probs=log_probs,
        proximal_log_probs=log_probs.detach(),
        # A masked token's number is never used; 0 keeps a NaN in it from reaching the gradient as 0 * NaN.
        behaviour_log_probs=torch.as_tensor(np.where(masks, behaviour, 0.0), device=device, dtype=dtype),
        sample_of_token=torch.as_tensor(np.repeat(np.arange(len(samples)), lengths), device=device),
        rewards=torch.as_tensor([sample.reward for sample in samples], device=device, dtype=dtype),
        rl_mask=torch.as_tensor(masks, device=device),
    )
