# pyright: basic
# Reason: safetensors' readers are untyped.
"""LoRA adapters in PEFT's form, merged into the weights that they belong to: W + (alpha / r) B A."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clawstream.errors import WeightsError
from services.engine.architecture import read_json
from services.engine.safetensors_files import read_tensors

CONFIG_NAME = "adapter_config.json"
_WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Fields of PEFT's configuration that change the formula; absent, false or empty here."""


class Adapters:
    """The adapters of one directory. Each is taken once."""

    def __init__(self, directory: Path) -> None:
        """Raises `WeightsError` for adapters of another kind than plain LoRA, and for a torn directory."""
        self._directory = directory
        config: dict[str, Any] = read_json(directory / CONFIG_NAME)
        problems = [f"{field}={config[field]!r}" for field in _UNSUPPORTED if config.get(field)]
        problems += [f"peft_type={config.get('peft_type')!r}"] if config.get("peft_type") != "LORA" else []
        problems += [f"bias={config['bias']!r}"] if config.get("bias", "none") != "none" else []
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or not isinstance(alpha, int | float):
            problems.append(f"r={rank!r}, lora_alpha={alpha!r}")
        if problems:
            raise WeightsError(f"{directory / CONFIG_NAME}: cannot be merged: {', '.join(problems)}")
        self._scale: float = alpha / rank  # type: ignore[operator] # both were checked above
        self._tensors = read_tensors([directory / _WEIGHTS_NAME])

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """The base's tensor with its adapter, if it has one; in the base's type. Raises `WeightsError` for a misfit."""
        stem = _PREFIX + name.removesuffix(".weight")
        a = self._tensors.pop(f"{stem}.lora_A.weight", None)  # [r, in]
        b = self._tensors.pop(f"{stem}.lora_B.weight", None)  # [out, r]
        if a is None and b is None:
            return tensor
        if a is None or b is None or (b.size(0), a.size(1)) != tuple(tensor.shape) or b.size(1) != a.size(0):
            shapes = [None if each is None else tuple(each.shape) for each in (a, b)]
            raise WeightsError(f"{self._directory}: adapters {shapes} do not fit {name} {tuple(tensor.shape)}")
        return torch.addmm(tensor.float(), b.float(), a.float(), alpha=self._scale).to(tensor.dtype)

    def check_nothing_left(self) -> None:
        """Raises `WeightsError` when an adapter belongs to no weight of the base."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:5])
            raise WeightsError(f"{self._directory}: adapters of unknown modules: {names} ({len(self._tensors)} in all)")
