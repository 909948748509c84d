# pyright: basic
# Reason: drives the Megatron engine, whose tensors and groups are untyped.
"""The policy being trained: load, step, snapshot, restore. No Kafka, no clock, no files but the base model's.

Every rank holds the same batch and calls the same methods in the same order. A step is one optimizer update on
one batch (or several, each on a part of its own): gradients accumulate over micro-batches, losses are divided by
global counts, so how a batch is cut into micro-batches and spread over ranks changes nothing but rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.options import IdSource
from services.trainer.engine import cpu_platform
from services.trainer.engine.adapter_weights import (
    WEIGHTS_NAME,
    check_adapter_config,
    load_adapters,
    whole_adapters,
)
from services.trainer.engine.bridge import read_config
from services.trainer.engine.log_probabilities import log_probabilities, log_probabilities_at
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.optimizer import OptimizerSettings, ParallelAdamW
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import (
    ReadTensor,
    SafetensorsDirectory,
    load_hugging_face,
    load_shards,
    whole_tensors,
)
from services.trainer.given_ids import given_ids
from services.trainer.guards.bounds import Breach, breaches
from services.trainer.guards.controls import StepControls
from services.trainer.metrics import StepMeasurements
from services.trainer.own_teacher import OwnTeacher, OwnTeacherOptions
from services.trainer.packing import PackedRow, pack, plan_micro_batches
from services.trainer.sample import StepResult, TrainingSample, UnchangedReason
from services.trainer.step_plan import MicroBatch, PartPlan, consecutive_parts, plan_part
from services.trainer.token_batches import PolicyOutputs, token_batch
from services.trainer.vocabulary import check_shares_vocabulary


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """A copy of everything that training has changed, in Hugging Face's names and shapes, on the CPU.

    It does not depend on the number of ranks, and later steps do not touch it: it can be written by another thread.
    """

    weights: dict[str, torch.Tensor]
    """fp32 main parameters; only the adapters, in PEFT's names, where only they are trained."""
    moments: dict[str, dict[str, torch.Tensor]]
    """Adam's moments by torch's name, then by Hugging Face's tensor name."""
    random_state: dict[str, torch.Tensor]
    """Generator states by device kind, uint8."""
    num_updates: int
    """Optimizer updates made."""
    model_dtype: torch.dtype
    """The type that the model computes in, and in which weights are published."""
    lora: LoraSettings | None = None
    """Of the adapters, if there are any."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one part of a batch."""

    reason: UnchangedReason | None
    """Why nothing changed; None when something did."""
    measurements: StepMeasurements
    gradient_norm: float = 0.0
    culprits: tuple[str, ...] = ()
    """Samples to blame for `non_finite`."""
    offenders: dict[int, Breach] = field(default_factory=dict[int, Breach])
    """By place: samples that must be left out before the part can be trained."""
    held: tuple[Breach, ...] = ()
    """Why a guard allows no update."""


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
        updates_per_batch: int = 1,
        reference_directory: Path | None = None,
        recompute_activations: bool = False,
        lora: LoraSettings | None = None,
        seed: int = 0,
        with_coefficients: Callable[[Mapping[str, float]], Algorithm] | None = None,
        keeps_reference: bool = False,
        teacher: OwnTeacherOptions | None = None,
    ) -> None:
        """`updates_per_batch` cuts a batch into so many parts, with an update on each; all of them are bounded against
        the policy at the start of the batch. `reference_directory` holds the base model where the algorithm needs it
        (None: what is loaded first). With `lora` only adapters are trained; `seed` is of their first values.
        `with_coefficients` makes the algorithm with other options, as a step's controls ask; with `keeps_reference`
        the base model is loaded although the algorithm does not need it yet. With `teacher` a frozen model answers the
        samples that ask for one. A frozen model is in memory once, whatever it is for; where only adapters are trained
        the base model is the policy without them.
        """
        self.layout = layout
        self._algorithm = algorithm
        self._optimizer_settings = optimizer_settings or OptimizerSettings()
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._dtype = dtype
        self._updates_per_batch = updates_per_batch
        self._reference_directory = reference_directory
        self._with_coefficients = with_coefficients
        self._coefficients: dict[str, float] = {}
        self._keeps_reference = keeps_reference
        self._frozen: dict[Path, PolicyModel] = {}
        self._reference: PolicyModel | None = None
        self._teacher_options = teacher
        self._teacher: OwnTeacher | None = None
        self._recompute_activations = recompute_activations
        self._lora = lora
        self._seed = seed
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
        """Builds the model of a Hugging Face directory and loads its weights; adapters and optimizer start afresh.

        Raises SettingsError for a model that cannot be trained, WeightsError for missing or misshapen tensors.
        """
        self._model = self._read_model(hugging_face_directory)
        if self._lora is not None:
            self._model.add_adapters(self._lora, self.layout, self._seed)
        self._optimizer = ParallelAdamW(self._model.trained_parameters(), self.layout, self._optimizer_settings)
        self._reference = self._teacher = None
        if self._reference_directory is None:
            self._reference_directory = hugging_face_directory
        base_directory = self._reference_directory
        if self._keeps_reference or self._algorithm.needs.reference:
            self._reference = self._frozen_model(base_directory, hugging_face_directory)
        if self._teacher_options is not None:
            self._teacher = self._new_teacher(self._teacher_options, base_directory, hugging_face_directory)

    def _new_teacher(self, options: OwnTeacherOptions, base: Path, loaded: Path) -> OwnTeacher:
        """Raises SettingsError for a model that cannot teach this policy."""
        directory = options.directory or base
        model = self._frozen_model(directory, loaded)
        check_shares_vocabulary(directory, base, model, self.model)
        needs = self._algorithm.needs
        return OwnTeacher(
            model,
            self.model,
            self.layout,
            tokens_per_micro_batch=self._tokens_per_micro_batch,
            source=needs.ids,
            ids_per_token=needs.ids_per_token or options.top_k,
        )

    def _frozen_model(self, directory: Path, loaded: Path) -> PolicyModel:
        """The model in `directory`, which training does not change; `loaded` is where the policy's is from."""
        if self._lora is not None and directory.resolve() == loaded.resolve():
            return self.model
        place = directory.resolve()
        if place not in self._frozen:
            self._frozen[place] = self._read_model(directory)
            self._frozen[place].network.requires_grad_(False)
        return self._frozen[place]

    def _read_model(self, directory: Path) -> PolicyModel:
        model = PolicyModel(
            read_config(str(directory)),
            dtype=self._dtype,
            tensor_parallel_size=self.layout.tensor_size,
            fused_norms=self._lora is None,
            recompute_activations=self._recompute_activations,
        )
        load_hugging_face(model, self.layout, directory)
        return model

    def load_published_adapters(self, directory: Path) -> None:
        """Continues published adapters, over the base model that was loaded; the optimizer starts afresh.

        Raises WeightsError when they have other settings, or are missing or misshapen. A collective of all ranks.
        """
        assert self._lora is not None
        check_adapter_config(directory, self._lora)
        read = SafetensorsDirectory(directory, [WEIGHTS_NAME]).read
        load_adapters(self.model, self.layout, read, self.optimizer.main_parameters.put)
        self.optimizer.restored(0)

    def train_step(
        self, batch: Sequence[TrainingSample], learning_rate: float, controls: StepControls | None = None
    ) -> StepResult:
        """One update on `batch` (or on each part of it), or none, with the reason. A collective of all ranks.

        Samples that `controls` drop take no part, as if they had not been there. Where it holds a part of the batch,
        that part and those after it make no update. Raises ValueError for an empty batch, for token ids outside the
        vocabulary, and for dropping with several updates per batch.
        """
        controls = controls or StepControls()
        if not batch:
            raise ValueError("a batch needs at least one sample")
        if controls.drop and self._updates_per_batch > 1:
            raise ValueError("samples can be dropped by what a step measures only with one update per batch")
        self._check_vocabulary(batch)
        self._use_coefficients(controls.coefficients)
        plans = self._plans(batch)
        proximal = self._proximal(batch, plans)
        total = self._new_measurements(batch)
        outcomes: list[_Outcome] = []
        dropped: dict[str, Breach] = {}
        for plan in plans:
            outcome = self._update(batch, plan, proximal, learning_rate, controls)
            if outcome.offenders:
                dropped = {batch[place].sample_id: breach for place, breach in outcome.offenders.items()}
                batch = [each if index not in outcome.offenders else each.masked() for index, each in enumerate(batch)]
                (plan_of_rest,) = self._plans(batch)
                proximal = self._proximal(batch, [plan_of_rest])
                outcome = self._update(batch, plan_of_rest, proximal, learning_rate, replace(controls, drop=()))
            if outcome.reason is not UnchangedReason.NON_FINITE or len(plans) == 1:
                total.merge(outcome.measurements)
            outcomes.append(outcome)
            if outcome.reason is UnchangedReason.HELD:
                break
        changed = any(outcome.reason is None for outcome in outcomes)
        result = self._result(
            batch,
            total,
            None if changed else outcomes[0].reason,
            max(outcome.gradient_norm for outcome in outcomes),
            learning_rate,
            [culprit for outcome in outcomes for culprit in outcome.culprits],
            len(dropped),
        )
        return replace(result, dropped=dropped, held=outcomes[-1].held)

    def _use_coefficients(self, coefficients: Mapping[str, float]) -> None:
        if dict(coefficients) == self._coefficients:
            return
        if self._with_coefficients is None:
            raise ValueError(f"this policy's loss cannot be given other coefficients: {dict(coefficients)}")
        self._algorithm = self._with_coefficients(coefficients)
        self._coefficients = dict(coefficients)

    def _plans(self, batch: Sequence[TrainingSample]) -> list[PartPlan]:
        return [
            plan_part(batch, part, self._algorithm, self._tokens_per_micro_batch, self.layout)
            for part in consecutive_parts(len(batch), self._updates_per_batch)
        ]

    @torch.no_grad()
    def _proximal(self, batch: Sequence[TrainingSample], plans: Sequence[PartPlan]) -> dict[MicroBatch, PolicyOutputs]:
        """The policy at the start of the batch, where it cannot be read off the first forward pass."""
        if len(plans) == 1 and not self._algorithm.needs.recomputed_proximal:
            return {}
        micro_batches = [each for plan in plans for each in plan.micro_batches]
        return {each: self._forward([batch[index] for index in each])[0] for each in micro_batches}

    def _update(
        self,
        batch: Sequence[TrainingSample],
        plan: PartPlan,
        proximal: dict[MicroBatch, PolicyOutputs],
        learning_rate: float,
        controls: StepControls,
    ) -> _Outcome:
        """One part of the batch."""
        self.optimizer.discard_gradients()
        measurements = self._new_measurements(batch)
        if plan.reason is not None:
            return _Outcome(plan.reason, measurements, culprits=tuple(plan.culprits))
        for micro_batch in plan.micro_batches:
            self._accumulate(batch, micro_batch, plan, proximal.get(micro_batch), measurements)
        measurements.combine(self.layout)
        if controls.drop:
            statistics = measurements.sample_statistics()
            offenders = controls.offenders([statistic.measurements for statistic in statistics])
            if offenders:
                self.optimizer.discard_gradients()
                return _Outcome(UnchangedReason.HELD, measurements, offenders=offenders)
        gradient_norm = self.optimizer.reduce_gradients()
        if not np.isfinite(gradient_norm) or not np.isfinite(measurements.loss):
            self.optimizer.discard_gradients()
            culprits = [
                sample.sample_id
                for sample, statistic in zip(batch, measurements.sample_statistics(), strict=True)
                if not np.isfinite(statistic.loss)
            ]
            return _Outcome(UnchangedReason.NON_FINITE, measurements, culprits=tuple(culprits))
        if gradient_norm == 0.0:
            self.optimizer.discard_gradients()
            return _Outcome(UnchangedReason.ZERO_GRADIENT, measurements)
        held = breaches(controls.hold, measurements.metrics()) if controls.hold else []
        if held:
            self.optimizer.discard_gradients()
            return _Outcome(UnchangedReason.HELD, measurements, gradient_norm, held=tuple(held))
        self.optimizer.step(learning_rate, gradient_norm)
        return _Outcome(None, measurements, gradient_norm)

    def _accumulate(
        self,
        batch: Sequence[TrainingSample],
        micro_batch: MicroBatch,
        plan: PartPlan,
        proximal: PolicyOutputs | None,
        measurements: StepMeasurements,
    ) -> None:
        """Forward and backward of one micro-batch."""
        samples = [batch[index] for index in micro_batch]
        outputs, row = self._forward(samples)
        # Without a forward pass of its own the policy at the start of the batch is the current one.
        tokens = token_batch(samples, outputs, proximal or outputs.constant(), self._algorithm.needs)
        if self._reference is not None and self._algorithm.needs.reference:
            with torch.no_grad(), self._reference.without_adapters():
                reference = self._forward(samples, self._reference, sampled_ids_only=True)[0]
            tokens = replace(tokens, reference_log_probs=reference.log_probs)
        place = torch.as_tensor(micro_batch, device=outputs.log_probs.device)
        weights = {name: each.to(place.device)[place - plan.first] for name, each in plan.weights.items()}
        loss = self._algorithm.loss(tokens, weights)
        loss.per_sample.sum().backward()
        measurements.add(place, tokens, loss, row.token_ids.size)

    def _forward(
        self, samples: Sequence[TrainingSample], model: PolicyModel | None = None, *, sampled_ids_only: bool = False
    ) -> tuple[PolicyOutputs, PackedRow]:
        """One pass over the samples packed into a row; log-probs at all temperatures and ids that are needed."""
        model = model or self.model
        needs = self._algorithm.needs
        row = pack([(sample.prompt_ids, sample.response_ids) for sample in samples])
        logits = model.logits(row)
        shard = model.shard(logits, self.layout)
        targets = torch.as_tensor(row.target_ids, device=logits.device)
        temperatures = torch.as_tensor(
            np.asarray([sample.sampling_temperature for sample in samples])[row.sequence_of_target],
            device=logits.device,
        )
        log_probs, entropies = log_probabilities(logits, targets, temperatures, shard)
        unit, given = log_probs.new_empty(0), log_probs.new_empty(0)
        if not sampled_ids_only and (needs.unit_temperature or needs.ids is not IdSource.NONE):
            further = np.empty((targets.numel(), 0), np.int64)
            if needs.ids is not IdSource.NONE:
                further = given_ids(samples, needs.ids, needs.ids_per_token).ids
            if needs.unit_temperature and further.shape[1] == 0 and bool((temperatures == 1).all()):
                unit = log_probs
            else:
                ids = torch.cat([targets[:, None], torch.as_tensor(further, device=logits.device)], dim=1)
                both, _ = log_probabilities_at(logits, ids, torch.ones_like(temperatures), shard)  # [tokens, 1 + k]
                unit, given = both[:, 0], both[:, 1:]
        return PolicyOutputs(log_probs, entropies, unit, given), row

    def _new_measurements(self, batch: Sequence[TrainingSample]) -> StepMeasurements:
        return StepMeasurements(len(batch), self._algorithm.components, cpu_platform.device())

    @torch.no_grad()
    def score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Current log-probs of every response, each [response_tokens], at its sampling temperature.

        A collective of the tensor-parallel group; every data-parallel rank computes all of them.
        """
        self._check_vocabulary(samples)
        answers: list[np.ndarray] = [np.empty(0)] * len(samples)
        for micro_batch in plan_micro_batches([s.num_tokens for s in samples], self._tokens_per_micro_batch):
            chosen = [samples[index] for index in micro_batch]
            log_probs = self._forward(chosen)[0].log_probs
            ends = np.cumsum([sample.response_ids.size for sample in chosen])[:-1]
            for index, part in zip(micro_batch, np.split(log_probs.cpu().numpy(), ends), strict=True):
                answers[index] = part
        return answers

    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples with what the own teacher says about those that ask for it. A collective of all ranks.

        Raises ValueError when a sample asks and there is no own teacher.
        """
        asking = [sample for sample in samples if sample.asked_prompt_ids is not None]
        if not asking:
            return list(samples)
        if self._teacher is None:
            raise ValueError(f"sample {asking[0].sample_id} asks for a teacher of the trainer's own; there is none")
        self._check_vocabulary(asking)
        return self._teacher.taught(samples)

    def _check_vocabulary(self, samples: Sequence[TrainingSample]) -> None:
        size = self.model.vocabulary_size
        for sample in samples:
            teacher = sample.teacher
            targets = [] if teacher is None else [each.ids for each in (teacher.top, teacher.support) if each]
            texts = [sample.prompt_ids, sample.response_ids]
            if sample.asked_prompt_ids is not None:
                texts.append(sample.asked_prompt_ids)
            for lowest, ids in (*((0, each) for each in texts), *((-1, each) for each in targets)):
                if ids.size and (ids.min() < lowest or ids.max() >= size):
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
        num_dropped: int = 0,
    ) -> StepResult:
        rewarded = [sample for sample in batch if sample.rl_mask.any()]
        rewards = np.asarray([sample.reward for sample in rewarded] or [0.0])
        advantages = np.asarray([sample.rl_advantage for sample in rewarded] or [0.0])
        metrics = measurements.metrics() | {
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
            "num_updates": float(self.optimizer.num_updates),
            "num_samples": float(len(batch) - num_dropped),
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "nonzero_reward_share": float((rewards != 0).mean()),
            "nonzero_advantage_share": float((advantages != 0).mean()),
            "num_rl_samples": float(len(rewarded)),
            "num_opd_samples": float(sum(bool(sample.opd_mask.any()) for sample in batch)),
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
        return PolicySnapshot(weights, moments, _random_state(), self.optimizer.num_updates, self._dtype, self._lora)

    def _whole_copies(self, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by Hugging Face's name on rank 0; the other ranks give their shards and keep nothing."""
        copies: dict[str, torch.Tensor] = {}
        whole = whole_tensors if self._lora is None else whole_adapters
        for name, tensor in whole(self.model, self.layout, sources):
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
        load = load_shards if self._lora is None else load_adapters
        load(self.model, self.layout, read_weight, self.optimizer.main_parameters.put)
        for name, tensors in self.optimizer.moments():
            load(self.model, self.layout, read_moment[name], tensors.put)
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
