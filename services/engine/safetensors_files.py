# pyright: basic
# Reason: safetensors' readers are untyped.
"""Reads safetensors files."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from clawstream.errors import WeightsError


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of `files`, memory-mapped. Raises `WeightsError` naming a file that is torn or absent."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                tensors.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
    return tensors
