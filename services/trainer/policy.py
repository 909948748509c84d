# pyright: basic
# Reason: drives the Megatron engine, whose tensors and groups are untyped.
"""The policy being trained: load, step, snapshot, restore. No Kafka, no clock, no files but the base model's.

Every rank holds the same batch and calls the same methods in the same order. `train_step` says what a step is,
`forward_pass` and `backward_pass` what is computed, `policy_models` which models are in memory, `policy_snapshot` what
of all this lasts.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.algorithms.base import Algorithm
from services.trainer.backward_pass import BackwardPass
from services.trainer.engine.adapter_weights import WEIGHTS_NAME, check_adapter_config, load_adapters
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.optimizer import OptimizerSettings, ParallelAdamW
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import ReadTensor, SafetensorsDirectory
from services.trainer.forward_pass import score
from services.trainer.guards.controls import StepControls
from services.trainer.interruption import Interruption
from services.trainer.own_teacher import OwnTeacher, OwnTeacherOptions
from services.trainer.policy_models import ModelOptions, PolicyModels
from services.trainer.policy_snapshot import PolicySnapshot, restore_snapshot, take_snapshot
from services.trainer.sample import StepResult, TrainingSample
from services.trainer.train_step import TrainStep
from services.trainer.vocabulary import check_shares_vocabulary, check_token_ids


class PolicyTrainer:
    """See the module's docstring. Not safe for concurrent use; a snapshot is."""

    def __init__(
        self,
        layout: ParallelLayout,
        algorithm: Algorithm,
        *,
        model_options: ModelOptions | None = None,
        optimizer_settings: OptimizerSettings | None = None,
        tokens_per_micro_batch: int = 2048,
        updates_per_batch: int = 1,
        reference_directory: Path | None = None,
        with_coefficients: Callable[[Mapping[str, float]], Algorithm] | None = None,
        keeps_reference: bool = False,
        teacher: OwnTeacherOptions | None = None,
        is_ending: Callable[[], bool] | None = None,
    ) -> None:
        """`updates_per_batch` cuts a batch into so many parts, with an update on each; all of them are bounded against
        the policy at the start of the batch. `reference_directory` holds the base model where the algorithm needs it
        (None: what is loaded first). `with_coefficients` makes the algorithm with other options, as a step's controls
        ask; with `keeps_reference` the base model is loaded although the algorithm does not need it yet. With `teacher`
        a frozen model answers the samples that ask for one. `is_ending` is asked while a step is computed (see
        `Interruption`).
        """
        self.layout = layout
        self._algorithm = algorithm
        self._model_options = model_options or ModelOptions()
        self._optimizer_settings = optimizer_settings or OptimizerSettings()
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._updates_per_batch = updates_per_batch
        self._reference_directory = reference_directory
        self._with_coefficients = with_coefficients
        self._coefficients: dict[str, float] = {}
        self._keeps_reference = keeps_reference
        self._teacher_options = teacher
        self._interruption = Interruption(is_ending, layout)
        self.models = PolicyModels(layout, self._model_options, self._interruption)
        """All of them that are in memory."""
        self._reference: PolicyModel | None = None
        self._teacher: OwnTeacher | None = None
        self._optimizer: ParallelAdamW | None = None

    @property
    def model(self) -> PolicyModel:
        """The network. Raises RuntimeError before `load`."""
        return self.models.policy

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
        self.models.load_policy(hugging_face_directory)
        self._optimizer = ParallelAdamW(self.model.trained_parameters(), self.layout, self._optimizer_settings)
        self._reference = self._teacher = None
        if self._reference_directory is None:
            self._reference_directory = hugging_face_directory
        if self._keeps_reference or self._algorithm.needs.reference:
            self._reference = self.models.load_frozen(self._reference_directory)
        if self._teacher_options is not None:
            self._teacher = self._new_teacher(self._teacher_options, self._reference_directory)

    def _new_teacher(self, options: OwnTeacherOptions, base_directory: Path) -> OwnTeacher:
        """Raises SettingsError for a model that cannot teach this policy."""
        directory = options.directory or base_directory
        model = self.models.load_frozen(directory)
        check_shares_vocabulary(directory, base_directory, model, self.model)
        needs = self._algorithm.needs
        return OwnTeacher(
            model,
            self.model,
            self.layout,
            tokens_per_micro_batch=self._tokens_per_micro_batch,
            source=needs.ids,
            ids_per_token=needs.ids_per_token or options.top_k,
            interruption=self._interruption,
        )

    def load_published_adapters(self, directory: Path) -> None:
        """Continues published adapters, over the base model that was loaded; the optimizer starts afresh.

        Raises WeightsError when they have other settings, or are missing or misshapen. A collective of all ranks.
        """
        lora = self._model_options.lora
        assert lora is not None
        check_adapter_config(directory, lora)
        read = SafetensorsDirectory(directory, [WEIGHTS_NAME]).read
        load_adapters(self.model, self.layout, read, self.optimizer.main_parameters.put)
        self.optimizer.restored(0)

    def train_step(
        self, batch: Sequence[TrainingSample], learning_rate: float, controls: StepControls | None = None
    ) -> StepResult:
        """One update on `batch` (or on each part of it), or none, with the reason: see `TrainStep.run`.

        Raises ValueError for an empty batch, for token ids outside the vocabulary, and for controls that this policy
        cannot follow; StepInterrupted, with everything as it was, when the process is to end. All ranks together.
        """
        controls = controls or StepControls()
        if not batch:
            raise ValueError("a batch needs at least one sample")
        check_token_ids(batch, self.model.vocabulary_size)
        self._use_coefficients(controls.coefficients)
        step = TrainStep(
            BackwardPass(self.model, self._reference, self.layout, self._algorithm, self._interruption),
            self.optimizer,
            tokens_per_micro_batch=self._tokens_per_micro_batch,
            updates_per_batch=self._updates_per_batch,
        )
        return step.run(batch, learning_rate, controls)

    def _use_coefficients(self, coefficients: Mapping[str, float]) -> None:
        if dict(coefficients) == self._coefficients:
            return
        if self._with_coefficients is None:
            raise ValueError(f"this policy's loss cannot be given other coefficients: {dict(coefficients)}")
        self._algorithm = self._with_coefficients(coefficients)
        self._coefficients = dict(coefficients)

    def score(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        """Current log-probs of every response, each [response_tokens], at its sampling temperature.

        A collective of the tensor-parallel group; every data-parallel rank computes all of them.
        """
        check_token_ids(samples, self.model.vocabulary_size)
        return score(self.model, samples, self.layout, self._tokens_per_micro_batch)

    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples with what the own teacher says about those that ask for it. A collective of all ranks.

        Raises ValueError when a sample asks and there is no own teacher, StepInterrupted when the process is to end.
        """
        asking = [sample for sample in samples if sample.asked_prompt_ids is not None]
        if not asking:
            return list(samples)
        if self._teacher is None:
            raise ValueError(f"sample {asking[0].sample_id} asks for a teacher of the trainer's own; there is none")
        check_token_ids(asking, self.model.vocabulary_size)
        return self._teacher.taught(samples)

    def snapshot(self) -> PolicySnapshot | None:
        """A copy of the state, on rank 0; None on the others. A collective of all ranks."""
        options = self._model_options
        return take_snapshot(self.model, self.optimizer, self.layout, model_dtype=options.dtype, lora=options.lora)

    def restore(
        self,
        read_weight: ReadTensor,
        read_moment: Mapping[str, ReadTensor],
        random_state: Mapping[str, torch.Tensor],
        num_updates: int,
    ) -> None:
        """Continues where a snapshot was taken; the model must have been loaded. All ranks read for themselves.

        Raises WeightsError when a tensor is missing or does not fit.
        """
        restore_snapshot(
            self.model,
            self.optimizer,
            self.layout,
            read_weight,
            read_moment,
            random_state,
            num_updates,
            lora=self._model_options.lora,
        )
