"""Settings of the trainer."""

from typing import Any, Literal

from pydantic import Field, model_validator

from clawstream.dependence import Dependence, Provision
from clawstream.memory_need import MemoryNeed, model_size
from clawstream.settings import ConfigPath, ModelDirectory, Section, ServiceSettings
from services.trainer.advantages import AdvantageMode
from services.trainer.algorithms.options import OPTIONS, IdSource, LearningSignal, learning_signal, options_of
from services.trainer.guards.settings import GuardsSection, contradictions
from services.trainer.history import MAX_UNANNOUNCED_STEPS
from services.trainer.learning_rate import LearningRateSchedule

_TORCH_BYTES = 900 * 1024**2
"""Of a process with torch and Megatron."""
_ADAPTER_SHARE = 0.02
"""Of a model's parameters that adapters have, roughly."""
_ACTIVATIONS_PER_HIDDEN = 20
"""Numbers that a layer keeps for backward, for each token and hidden dimension (Korthikanti et al. 2022, less what
attention keeps, which is not stored)."""


class LearningRateSection(Section):
    """The learning rate over updates: linear warm-up, then constant or a cosine."""

    peak: float = Field(default=1e-5, gt=0)
    """Learning rate after the warm-up."""
    shape: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates until the peak."""
    decay_updates: int = Field(default=1000, ge=1)
    """Length of the cosine in updates."""
    final_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak at the end of the cosine."""

    def schedule(self) -> LearningRateSchedule:
        """As a function of the updates made."""
        return LearningRateSchedule(self.peak, self.shape, self.warmup_updates, self.decay_updates, self.final_share)


class OptimizerSection(Section):
    """AdamW. Defaults are OpenClaw-RL's."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay of matrices."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


class AlgorithmSection(Section):
    """The loss."""

    factory: str = "services.trainer.algorithms.binary:Binary"
    """Import path `package.module:name` of what makes it."""
    options: dict[str, Any] = Field(default={})
    """Its keyword arguments; for the losses that ship see `services.trainer.algorithms.options`."""

    @model_validator(mode="after")
    def _options_are_its_own(self) -> "AlgorithmSection":
        options_of(self.factory, self.options)
        return self

    @property
    def learning_signal(self) -> LearningSignal:
        """What the loss learns from."""
        return learning_signal(self.factory, options_of(self.factory, self.options))


class AdvantageSection(Section):
    """From rewards to advantages; formulas in `services.trainer.advantages`."""

    mode: AdvantageMode = AdvantageMode.REWARD
    """The reward itself, its place among the group's rollouts, or its distance from the user's moving average."""
    outcome_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the outcome, and of the reward of a conversation's turn."""
    step_coefficient: float = Field(default=1.0, ge=0)
    """Weight of a judge's reward of a rollout's step."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """What the outcome is worth one turn before the end, and so on."""
    group_size: int | None = Field(default=None, ge=2)
    """Rollouts of a group that are compared with each other, with mode `group`."""
    rollout_timeout_seconds: float = Field(default=120.0, gt=0)
    """A rollout, or a group, of which nothing came for so long is over, whatever is missing."""
    rollout_settle_seconds: float = Field(default=2.0, ge=0)
    """An outcome ends a rollout that does not say how many steps it has when nothing came for so long."""
    baseline_decay: float = Field(default=0.95, ge=0, lt=1)
    """Of a user's moving average, with mode `user_baseline`."""

    @model_validator(mode="after")
    def _limits_agree(self) -> "AdvantageSection":
        if (self.mode is AdvantageMode.GROUP) != (self.group_size is not None):
            raise ValueError(f"group_size must be given exactly with mode=group, not with {self.mode.value}")
        if self.outcome_coefficient == 0 and self.step_coefficient == 0:
            raise ValueError("outcome_coefficient and step_coefficient are both 0: no reward would be left")
        if self.rollout_settle_seconds >= self.rollout_timeout_seconds:
            raise ValueError(
                f"rollout_settle_seconds={self.rollout_settle_seconds} must be below "
                f"rollout_timeout_seconds={self.rollout_timeout_seconds}"
            )
        return self


class LoraSection(Section):
    """Low-rank adapters: only they are trained, checkpointed and published."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """They are scaled by alpha / rank."""
    modules: list[Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]] = Field(
        default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], min_length=1
    )
    """What has adapters, by Megatron's names: queries, keys and values; attention output; gate and up; down."""


class TeacherSection(Section):
    """A frozen model in the trainer's own memory, for samples that carry a hinted prompt instead of log-probs
    (`teacher.model.computed_by = "trainer"`)."""

    model: ConfigPath | None = None
    """Directory of its weights in Hugging Face's form, of the policy's vocabulary; null: `trainer.model`."""
    version: int | None = Field(default=None, ge=1)
    """A published version of this policy in place of `model`; it is never removed."""
    top_k: int = Field(default=50, ge=1, le=1000)
    """Its likeliest ids a token, for losses that compare distributions and do not say how many (`topk`)."""

    @model_validator(mode="after")
    def _one_model(self) -> "TeacherSection":
        if self.model is not None and self.version is not None:
            raise ValueError(f"model={self.model} and version={self.version} are two teachers: give one")
        return self


class TrainerSettings(ServiceSettings):
    """One trainer: a process, or the ranks that `launch_ranks` or torchrun start."""

    model: ModelDirectory
    """Directory of the base model in Hugging Face's form: version 0."""
    tokenizer_fingerprint: str = ""
    """Samples of another one are dropped; empty checks only that ids fit the vocabulary."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Shards of one model copy; the number of processes must be a multiple."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in, and what is published."""
    lora: LoraSection | None = None
    """Train adapters on a frozen model; null trains the whole model. Versions are then adapters in PEFT's form, which
    the CPU engine merges with the model that it was started with: that must be `model`."""
    recompute_activations: bool = False
    """Layers run a second time in the backward pass instead of keeping what is inside them: less memory, slower."""
    seed: int = 0
    """Of torch's generators."""
    threads: int = Field(default=0, ge=0)
    """Of torch on a CPU; 0 leaves torch's choice."""

    batch_size: int = Field(default=16, ge=1)
    """Effective samples (trainable, advantage not 0) that close a batch."""
    max_batch_age_seconds: float = Field(default=600.0, gt=0)
    """A batch closes when its first sample has waited so long, however few there are: one user is enough to learn."""
    max_age_versions: int | None = Field(default=8, ge=0)
    """Tokens whose weights are older by more versions are left out, and samples that have no others dropped; null
    trains any age."""
    max_sample_tokens: int = Field(default=8192, ge=2)
    """Samples whose prompt and response are longer become dead letters: the longest that surely fits in memory."""
    tokens_per_micro_batch: int = Field(default=8192, ge=2)
    """Micro-batches are packed up to so many tokens."""
    at_least_one: bool = False
    """OpenClaw-RL's rule: a session with only neutral answers in a batch counts as one sample toward `batch_size`. It
    changes when a batch closes, never a gradient."""
    trained_retention_days: float = Field(default=100.0, gt=0)
    """How long a trained turn's id is remembered at least. Longer than the retention of `samples`, or a turn could come
    back."""

    blob_patience_seconds: float = Field(default=3600.0, ge=0)
    """A sample whose large arrays are in a store that does not answer is waited for, and what comes after it with it.
    After so long it becomes a dead letter, as one whose arrays are gone does at once."""

    own_teacher: TeacherSection | None = None
    """A teacher inside the trainer; null for none: samples that ask for one train on their reward alone."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Cuts a batch into so many parts with an update on each. From the second on the ratio differs from 1, and the clip
    bounds how far one batch moves the policy."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """The loss."""
    advantage: AdvantageSection = AdvantageSection()
    """From rewards to advantages."""
    guards: GuardsSection = GuardsSection()
    """What is watched in every step, and what follows."""
    learning_rate: LearningRateSection = LearningRateSection()
    """Its schedule."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW."""

    checkpoint_every_steps: int = Field(default=1, ge=1, le=MAX_UNANNOUNCED_STEPS)
    """Steps from one checkpoint to the next. Versions are published from checkpoints only, so that no published weights
    can be lost; the steps since the last one are repeated after a crash."""
    checkpoints_keep: int = Field(default=2, ge=2)
    """Checkpoints that stay."""
    weights_keep: int = Field(default=3, ge=1)
    """Newest published versions that stay. Version 0, and what an engine serves or may still load, stays anyway."""
    batches_keep: int | None = Field(default=None, ge=1)
    """Archived batches that stay; null keeps all."""
    weights_directory: ConfigPath | None = None
    """Where versions are published; engines must see it under the same path. Null: in the data directory."""
    progress_seconds: float = Field(default=10.0, gt=0)
    """A line about the batch is logged at most this often."""

    @model_validator(mode="after")
    def _limits_agree(self) -> "TrainerSettings":
        if self.max_sample_tokens > self.tokens_per_micro_batch:
            raise ValueError(
                f"max_sample_tokens={self.max_sample_tokens} exceeds tokens_per_micro_batch="
                f"{self.tokens_per_micro_batch}: such a sample would be computed in one piece anyway; raise the "
                "micro-batch if memory allows, or lower max_sample_tokens"
            )
        if self.updates_per_batch > self.batch_size:
            raise ValueError(
                f"updates_per_batch={self.updates_per_batch} exceeds batch_size={self.batch_size}: "
                "a part needs a sample"
            )
        if self.own_teacher is not None and not self.algorithm.learning_signal.opd:
            raise ValueError(
                f"own_teacher is set, but {self.algorithm.factory} learns nothing from a teacher: leave it out"
            )
        if self.own_teacher is not None and self.own_teacher.version is not None and self.lora is not None:
            raise ValueError("own_teacher.version with lora: versions are adapters then; omit it for the base model")
        if self.at_least_one and self.advantage.mode is AdvantageMode.USER_BASELINE:
            raise ValueError("at_least_one has no effect with advantage.mode=user_baseline: every reward counts there")
        options = options_of(self.algorithm.factory, self.algorithm.options)
        held_to = options.kl_reference if options is not None and options.kl_coefficient > 0 else None
        if held_to == "proximal" and self.updates_per_batch == 1:
            raise ValueError(
                "algorithm.options.kl_reference=proximal with updates_per_batch=1: the policy at the start of the "
                "batch is the policy itself, so the divergence is 0; use base, or more updates"
            )
        mistakes = contradictions(
            self.guards,
            batch_size=self.batch_size,
            max_age_versions=self.max_age_versions,
            updates_per_batch=self.updates_per_batch,
            options=options,
            given_options=self.algorithm.options,
        )
        if mistakes:
            raise ValueError("; ".join(f"guards.{mistake}" for mistake in mistakes))
        return self

    def provides(self) -> frozenset[Provision]:
        """A teacher, where it has one; or no need of one."""
        needs_none = not self.algorithm.learning_signal.opd
        return frozenset({Provision.OWN_TEACHER}) if needs_none or self.own_teacher is not None else frozenset()

    def depends_on(self) -> list[Dependence]:
        """Samples that carry what the loss learns from. Of a loss of one's own that is not known here."""
        if self.algorithm.factory not in OPTIONS:
            return []
        signal = self.algorithm.learning_signal
        needed: dict[Provision, str] = {}
        if not signal.opd:
            needed[Provision.REWARD] = "no rewards: teacher.mode must be binary or combine"
        elif not signal.rl or signal.ids is not IdSource.NONE:
            needed[Provision.TEACHER] = "nothing from a teacher: teacher.mode must be opd or combine"
            if signal.ids in (IdSource.TEACHER_TOP, IdSource.OVERLAP):
                needed[Provision.TEACHER_TOP] = "no likeliest ids of the teacher: teacher.model.top_k must be above 0"
            if signal.ids in (IdSource.STUDENT_TOP, IdSource.OVERLAP):
                needed[Provision.STUDENT_TOP] = (
                    "no likeliest ids of the student: teacher.model.support_k must be above 0"
                )
        return [
            Dependence("teacher", provision, f"algorithm.factory: {self.algorithm.factory} would be given {remedy}")
            for provision, remedy in needed.items()
        ]

    def memory_need(self) -> MemoryNeed:
        """Of one rank that holds the whole model: weights, gradients, the optimizer's state; a micro-batch beside them.

        In fp32 a trained parameter takes 16 bytes (weight, gradient, two moments); in bf16 18, with its main weight.
        """
        size = model_size(self.model)
        if size is None:
            return MemoryNeed(_TORCH_BYTES)
        number_bytes = 4 if self.dtype == "float32" else 2
        trained_bytes = 16 if self.dtype == "float32" else 18
        if self.lora is None:
            model_bytes = size.parameters * trained_bytes
        else:
            model_bytes = int(size.parameters * (number_bytes + _ADAPTER_SHARE * trained_bytes))
        kept = size.hidden * (1 if self.recompute_activations else _ACTIVATIONS_PER_HIDDEN) * size.layers
        token_bytes = kept * number_bytes + size.vocabulary * (4 + number_bytes)
        return MemoryNeed(_TORCH_BYTES + model_bytes, self.tokens_per_micro_batch * token_bytes)
