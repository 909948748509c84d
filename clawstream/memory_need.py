"""How much memory a process will take, roughly: from its settings and the headers of a model's files. No torch."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_LARGEST_HEADER_BYTES = 100 * 1024**2

PROCESS_BYTES = 250 * 1024**2
"""Of a Python process with our packages, without torch and without a model."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Of one process. An estimate for people, never a limit."""

    fixed_bytes: int
    """Taken from the start: programs, weights, gradients, an optimizer's state."""
    working_bytes: int = 0
    """Taken at most besides, when everything that is bounded is at its bound: keys and values, activations."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a rough estimate of memory needs."""

    parameters: int
    """Numbers in its safetensors files."""
    layers: int
    hidden: int
    vocabulary: int
    key_value_width: int
    """Numbers in the keys of one token in one layer; its values have as many."""


def model_size(directory: Path) -> ModelSize | None:
    """The size of a decoder, or None where the files do not say it: unreadable, no safetensors, other names."""
    try:
        config = cast("dict[str, Any]", json.loads((directory / "config.json").read_text(encoding="utf-8")))
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        head = int(config.get("head_dim") or hidden // heads)
        parameters = sum(stored_numbers(file) for file in directory.glob("*.safetensors"))
        return ModelSize(
            parameters=parameters,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            vocabulary=int(config["vocab_size"]),
            key_value_width=int(config.get("num_key_value_heads") or heads) * head,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, struct.error):
        return None


def stored_numbers(file: Path) -> int:
    """Numbers in all tensors of a safetensors file: 8 bytes of little-endian length, then a JSON header.

    Raises OSError, struct.error and ValueError for what is no such file.
    """
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > _LARGEST_HEADER_BYTES:
            raise ValueError(f"{file}: a header of {length} bytes")
        header = cast("dict[str, Any]", json.loads(handle.read(length)))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
