# pyright: basic
# Reason: makes models of the Megatron engine, whose tensors are untyped.
"""Models from Hugging Face directories: the one that is trained, and those beside it that stay as they are."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.trainer.engine.bridge import read_config
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import load_hugging_face
from services.trainer.interruption import Interruption


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What models are made of, beside their directories."""

    dtype: torch.dtype = torch.float32
    """The type that they compute in."""
    recompute_activations: bool = False
    """Layers run twice in place of keeping what is inside them."""
    lora: LoraSettings | None = None
    """Only adapters are trained."""
    seed: int = 0
    """Of the adapters' first values."""


class PolicyModels:
    """The models in memory. A frozen one is there once, whatever it is for; where only adapters are trained, the model
    that they were added to is the policy without them.

    Loading raises SettingsError for a model that cannot be trained, WeightsError for missing or misshapen tensors.
    """

    def __init__(self, layout: ParallelLayout, options: ModelOptions, interruption: Interruption) -> None:
        """`interruption` may leave any of them in the middle of a pass."""
        self._layout = layout
        self._options = options
        self._interruption = interruption
        self._policy: PolicyModel | None = None
        self._policy_directory: Path | None = None
        self.frozen: dict[Path, PolicyModel] = {}
        """By directory: those with memory of their own."""

    @property
    def policy(self) -> PolicyModel:
        """The model that is trained. Raises RuntimeError before `load_policy`."""
        if self._policy is None:
            raise RuntimeError("load a model first")
        return self._policy

    def load_policy(self, directory: Path) -> None:
        """Its adapters, if there are any, start afresh."""
        model = self._read(directory)
        if self._options.lora is not None:
            model.add_adapters(self._options.lora, self._layout, self._options.seed)
        self._policy, self._policy_directory = model, directory.resolve()

    def load_frozen(self, directory: Path) -> PolicyModel:
        """The model in `directory`, which training does not change. To be used under `without_adapters`."""
        place = directory.resolve()
        if self._options.lora is not None and place == self._policy_directory:
            return self.policy
        if place not in self.frozen:
            self.frozen[place] = self._read(directory)
            self.frozen[place].network.requires_grad_(False)
        return self.frozen[place]

    def _read(self, directory: Path) -> PolicyModel:
        model = PolicyModel(
            read_config(str(directory)),
            dtype=self._options.dtype,
            tensor_parallel_size=self._layout.tensor_size,
            fused_norms=self._options.lora is None,
            recompute_activations=self._options.recompute_activations,
        )
        load_hugging_face(model, self._layout, directory)
        self._interruption.watch(model.network.decoder.layers)
        return model
