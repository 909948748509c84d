"""Names and shapes of the tensors in a directory of safetensors, from the files' headers. No torch.

An engine must be given the tensors that it has, in their shapes. SGLang 0.5.23 keeps the old values of a tensor that is
missing, without a word, and ends when one has another shape: its way back reads the same files again.
"""

import json
import struct
from pathlib import Path
from typing import Any, cast

from clawstream.errors import WeightsError

_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit."""
_OPTIONAL_SUFFIXES = ("lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that follow from others: a tied output layer, rotary frequencies. Some checkpoints carry them."""
_NAMED = 3


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name. Raises WeightsError when there is no safetensors file or one is no such file."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{directory} holds no safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                shapes[name] = tuple(entry["shape"])
    return shapes


def check_same_tensors(directory: Path, reference: Path) -> None:
    """Raises WeightsError, naming tensors, unless `directory` holds the tensors of `reference` in their shapes.

    A reference that cannot be read (an engine was started from a hub's name, or from another format) tells nothing.
    """
    try:
        expected = tensor_shapes(reference)
    except WeightsError:
        return
    found = tensor_shapes(directory)
    wrong = [
        f"{name} is {list(found[name])}, not {list(expected[name])}"
        for name in found.keys() & expected.keys()
        if found[name] != expected[name]
    ]
    wrong += [f"{name} is missing" for name in expected.keys() - found.keys() if not name.endswith(_OPTIONAL_SUFFIXES)]
    wrong += [f"{name} is unknown" for name in found.keys() - expected.keys() if not name.endswith(_OPTIONAL_SUFFIXES)]
    if wrong:
        named = "; ".join(sorted(wrong)[:_NAMED])
        raise WeightsError(
            f"{directory} does not fit the model in service ({reference}): {named} ({len(wrong)} differences in all); "
            "it was published for another model"
        )


def _header(file: Path) -> dict[str, Any]:
    """https://github.com/huggingface/safetensors#format: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        content = stream.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        header = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{file} is no safetensors file") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{file} is no safetensors file")
    return cast("dict[str, Any]", header)
