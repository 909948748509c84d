# pyright: basic
# Reason: makes torch's part of the trainer.
"""What the trainer's processes and commands make of the settings."""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.base import Algorithm, load_algorithm
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.optimizer import OptimizerSettings
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.guards.knobs import Knob
from services.trainer.policy import PolicyTrainer
from services.trainer.settings import TrainerSettings


def new_policy(settings: TrainerSettings, layout: ParallelLayout) -> PolicyTrainer:
    """Without a model yet."""
    optimizer = settings.optimizer

    def with_coefficients(coefficients: Mapping[str, float]) -> Algorithm:
        return load_algorithm(settings.algorithm.factory, settings.algorithm.options | dict(coefficients))

    return PolicyTrainer(
        layout,
        load_algorithm(settings.algorithm.factory, settings.algorithm.options),
        optimizer_settings=OptimizerSettings(
            optimizer.beta1,
            optimizer.beta2,
            optimizer.epsilon,
            optimizer.weight_decay,
            optimizer.max_gradient_norm,
        ),
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        dtype=getattr(torch, settings.dtype),
        recompute_activations=settings.recompute_activations,
        lora=lora_settings(settings),
        seed=settings.seed,
        updates_per_batch=settings.updates_per_batch,
        reference_directory=settings.model,
        with_coefficients=with_coefficients,
        keeps_reference=with_coefficients(guarded_extremes(settings)).needs.reference,
    )


def guarded_extremes(settings: TrainerSettings) -> dict[str, float]:
    """The largest coefficients that guards may ask the loss for: whether it takes them shows before the first step."""
    rules = settings.guards.knob_rules(settings.algorithm.options)
    return {knob.value: each.high for knob, each in rules.items() if knob is not Knob.LEARNING_RATE}


def lora_settings(settings: TrainerSettings) -> LoraSettings | None:
    """As the engine takes them."""
    lora = settings.lora
    return None if lora is None else LoraSettings(lora.rank, lora.alpha, tuple(lora.modules))
