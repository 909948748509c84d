"""Whether an archived batch is still what its step trained. Reads the header of the file, not its arrays.

Format: safetensors, 8 bytes with the header's length (little-endian), then a JSON header with `__metadata__`
(https://huggingface.co/docs/safetensors). The trainer writes its document under the key `clawstream`.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import orjson

from clawstream.durable_files import sha256_of_file
from schemas.events import TrainStepEvent

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


class BatchState(StrEnum):
    """What became of a batch."""

    NONE = "none"
    """The step had none."""
    WHOLE = "whole"
    """The very bytes that were trained, with the samples that the step names."""
    MISSING = "missing"
    """Not at its place: its retention has passed, it was removed, or it is on another machine."""
    CHANGED = "changed"
    """Other bytes, or other samples than the step names."""


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """What was found."""

    state: BatchState
    sample_ids: tuple[str, ...] = ()
    """As the file names them."""


def check_batch(step: TrainStepEvent) -> BatchCheck:
    """Compares the archived batch of `step` with what the step says of it. Raises OSError when it cannot be read."""
    if not step.batch_uri:
        return BatchCheck(BatchState.NONE)
    path = batch_path(step.batch_uri)
    if not path.is_file():
        return BatchCheck(BatchState.MISSING)
    if sha256_of_file(path) != step.batch_sha256:
        return BatchCheck(BatchState.CHANGED)
    found = _sample_ids(path)
    named = {sample.sample_id for sample in step.samples}
    # Samples that made the loss non-finite are in the batch, and among the step's drops.
    listed = named | {drop.sample_id for drop in step.drops}
    is_same = named <= set(found) <= listed
    return BatchCheck(BatchState.WHOLE if is_same else BatchState.CHANGED, found)


def batch_path(uri: str) -> Path:
    """The file behind a `file:` URL."""
    return Path(unquote(urlsplit(uri).path))


def _sample_ids(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header: Any = orjson.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    document: Any = orjson.loads(header["__metadata__"]["clawstream"])
    return tuple(cast("list[str]", document["sample_ids"]))
