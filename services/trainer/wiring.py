# pyright: basic
# Reason: makes torch's part of the trainer.
"""What the trainer's processes and commands make of the settings."""

from collections.abc import Callable, Mapping

import torch

from clawstream.errors import SettingsError
from services.trainer.algorithms.base import Algorithm, load_algorithm
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.optimizer import OptimizerSettings
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.guards.knobs import Knob
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.publish import WeightStore
from services.trainer.settings import TrainerSettings


def new_policy(
    settings: TrainerSettings, layout: ParallelLayout, is_ending: Callable[[], bool] | None = None
) -> PolicyTrainer:
    """Without a model yet. `is_ending`: see `Interruption`."""
    optimizer = settings.optimizer

    def with_coefficients(coefficients: Mapping[str, float]) -> Algorithm:
        return load_algorithm(settings.algorithm.factory, settings.algorithm.options | dict(coefficients))

    return PolicyTrainer(
        layout,
        load_algorithm(settings.algorithm.factory, settings.algorithm.options),
        model_options=ModelOptions(
            dtype=getattr(torch, settings.dtype),
            recompute_activations=settings.recompute_activations,
            lora=lora_settings(settings),
            seed=settings.seed,
        ),
        optimizer_settings=OptimizerSettings(
            optimizer.beta1,
            optimizer.beta2,
            optimizer.epsilon,
            optimizer.weight_decay,
            optimizer.max_gradient_norm,
        ),
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        updates_per_batch=settings.updates_per_batch,
        reference_directory=settings.model,
        with_coefficients=with_coefficients,
        keeps_reference=with_coefficients(guarded_extremes(settings)).needs.reference,
        teacher=own_teacher(settings),
        is_ending=is_ending,
    )


def weight_store(settings: TrainerSettings) -> WeightStore:
    """Where this policy's versions are published."""
    return WeightStore(settings.weights_directory or settings.data_directory / "weights", settings.policy)


def own_teacher(settings: TrainerSettings) -> OwnTeacherOptions | None:
    """Raises SettingsError for a version that is not there."""
    teacher = settings.own_teacher
    if teacher is None:
        return None
    directory = teacher.model
    if teacher.version is not None:
        directory = weight_store(settings).directory_of(teacher.version)
        if not (directory / "model.safetensors").is_file():
            raise SettingsError(f"trainer.own_teacher.version={teacher.version}: {directory} holds no whole model")
    return OwnTeacherOptions(directory, teacher.top_k)


def guarded_extremes(settings: TrainerSettings) -> dict[str, float]:
    """The largest coefficients that guards may ask the loss for: whether it takes them shows before the first step."""
    rules = settings.guards.knob_rules(settings.algorithm.options)
    return {knob.value: each.high for knob, each in rules.items() if knob is not Knob.LEARNING_RATE}


def lora_settings(settings: TrainerSettings) -> LoraSettings | None:
    """As the engine takes them."""
    lora = settings.lora
    return None if lora is None else LoraSettings(lora.rank, lora.alpha, tuple(lora.modules))
