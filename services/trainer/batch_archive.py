# pyright: basic
# Reason: safetensors is untyped.
"""Each step's batch, kept as it was trained: trace, audit and retraining read it when the topic has forgotten.

One safetensors file per step. Arrays of all samples are end to end, with bounds; the metadata holds one JSON
document (`clawstream`) with the sample ids. The same batch always gives the same bytes, so its sha256 names it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from clawstream.durable_files import replace_file, sha256_of_file
from clawstream.errors import BlobError
from services.trainer.sample import IdTargets, TeacherTargets, TrainingSample

_FORMAT = 2
_ID_TARGETS = ("top", "support")


@dataclass(frozen=True, slots=True)
class ArchivedBatch:
    """Where a batch is, for the `train-step` event."""

    path: Path
    """The file."""
    sha256: str
    """Its checksum."""


class BatchArchive:
    """The batches of one policy: `directory/LINEAGE/step-00000012.safetensors`.

    A lineage that goes on from an older checkpoint, or from none, makes steps of the same numbers again; what the lost
    ones trained is named by events on the log, so it stays.
    """

    def __init__(
        self, directory: Path, *, keep: int | None = None, on_not_removed: Callable[[OSError], None] | None = None
    ) -> None:
        """`keep` newest batches stay; None keeps all. Raises ValueError when it is below 1.

        `on_not_removed` is told of an old one that the disk does not let go: the next `write` tries again.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._directory = directory
        self._keep = keep
        self._on_not_removed = on_not_removed

    def write(self, lineage: str, step: int, samples: Sequence[TrainingSample]) -> ArchivedBatch:
        """Archives a batch, synced to the disk; the same step of the lineage is replaced. Raises BlobError."""
        path = self._directory / lineage / f"step-{step:08d}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, step, samples)
        except OSError as error:
            raise BlobError(f"batch {path} could not be written: {error}; free some space, then try again") from error
        if self._keep is not None:
            # By time: a lineage that begins anew has lower numbers than what it replaces.
            written = self._directory.rglob("step-*.safetensors")
            try:
                for old in sorted(written, key=lambda each: (each.stat().st_mtime_ns, each.name))[: -self._keep]:
                    old.unlink()
            except OSError as error:  # The new one is whole: only space is lost.
                if self._on_not_removed is not None:
                    self._on_not_removed(error)
        return ArchivedBatch(path, sha256_of_file(path))


def read_batch(path: Path, sha256: str) -> list[TrainingSample]:
    """The samples of an archived batch, exactly as trained.

    Raises BlobError when the file is missing or its bytes have another checksum.
    """
    if not path.is_file():
        raise BlobError(f"archived batch {path} is missing: its retention has passed, or it was removed")
    found = sha256_of_file(path)
    if found != sha256:
        raise BlobError(f"archived batch {path} has checksum {found}, but its train-step says {sha256}")
    with safe_open(path, framework="numpy") as file:
        document = orjson.loads(file.metadata()["clawstream"])
        arrays: dict[str, NDArray[Any]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no dict
    if document["format"] != _FORMAT:
        raise BlobError(f"archived batch {path} has format {document['format']}, this program reads {_FORMAT}")
    prompts = np.split(arrays["prompt_ids"], arrays["prompt_ends"][:-1])
    ends = arrays["response_ends"][:-1]
    responses, behaviour, masks = (
        np.split(arrays[name], ends) for name in ("response_ids", "behaviour_log_probs", "rl_mask")
    )
    teachers = _teachers(arrays, ends)
    advantages = [
        float(advantage) if is_given else None
        for advantage, is_given in zip(arrays["advantages"], arrays["has_advantage"], strict=True)
    ]
    return [
        TrainingSample(
            sample_id=sample_id,
            prompt_ids=prompts[index],
            response_ids=responses[index],
            behaviour_log_probs=behaviour[index],
            rl_mask=masks[index].astype(np.bool_),
            reward=float(arrays["rewards"][index]),
            sampling_temperature=float(arrays["sampling_temperatures"][index]),
            advantage=advantages[index],
            teacher=teachers[index],
            rollout_id=document["rollout_ids"][index],
        )
        for index, sample_id in enumerate(document["sample_ids"])
    ]


def rewrite_without(path: Path, sha256: str, sample_ids: frozenset[str]) -> str:
    """Rewrites an archived batch in place without some samples, and returns its new checksum.

    At least one sample must be left. Raises BlobError as `read_batch` does.
    """
    samples = [sample for sample in read_batch(path, sha256) if sample.sample_id not in sample_ids]
    if not samples:
        raise ValueError(f"archived batch {path} would be empty: remove it instead")
    step = int(path.stem.rpartition("-")[2])
    written_at = path.stat()
    _write(path, step, samples)
    os.utime(path, ns=(written_at.st_atime_ns, written_at.st_mtime_ns))  # it is as old as before: retention asks
    return sha256_of_file(path)


def _write(path: Path, step: int, samples: Sequence[TrainingSample]) -> None:
    document = {
        "format": _FORMAT,
        "step": step,
        "sample_ids": [sample.sample_id for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
    }
    replace_file(path, save(_to_arrays(samples), metadata={"clawstream": orjson.dumps(document).decode()}))


def _to_arrays(samples: Sequence[TrainingSample]) -> dict[str, NDArray[Any]]:
    zeros = [np.zeros(sample.response_ids.size, np.float32) for sample in samples]
    arrays = {
        "prompt_ids": np.concatenate([sample.prompt_ids for sample in samples]),
        "prompt_ends": np.cumsum([sample.prompt_ids.size for sample in samples], dtype=np.int64),
        "response_ids": np.concatenate([sample.response_ids for sample in samples]),
        "response_ends": np.cumsum([sample.response_ids.size for sample in samples], dtype=np.int64),
        "behaviour_log_probs": np.concatenate([sample.behaviour_log_probs for sample in samples]),
        "rl_mask": np.concatenate([sample.rl_mask for sample in samples]).astype(np.uint8),
        "rewards": np.asarray([sample.reward for sample in samples], dtype=np.float64),
        "advantages": np.asarray([sample.rl_advantage for sample in samples], dtype=np.float64),
        "has_advantage": np.asarray([sample.advantage is not None for sample in samples], dtype=np.uint8),
        "sampling_temperatures": np.asarray([sample.sampling_temperature for sample in samples], dtype=np.float64),
        "has_teacher": np.asarray([sample.teacher is not None for sample in samples], dtype=np.uint8),
        "opd_mask": np.concatenate([sample.opd_mask for sample in samples]).astype(np.uint8),
        "teacher_log_probs": np.concatenate(
            [
                none if sample.teacher is None else sample.teacher.log_probs
                for sample, none in zip(samples, zeros, strict=True)
            ]
        ),
    }
    for name in _ID_TARGETS:
        targets = [None if sample.teacher is None else getattr(sample.teacher, name) for sample in samples]
        arrays[f"teacher_{name}_widths"] = np.asarray(
            [0 if each is None else each.ids.shape[1] for each in targets], dtype=np.int64
        )
        flat = [each for each in targets if each is not None]
        none = IdTargets(np.empty(0, np.int32), np.empty(0, np.float32))
        arrays[f"teacher_{name}_ids"] = np.concatenate([each.ids.ravel() for each in (none, *flat)])
        arrays[f"teacher_{name}_log_probs"] = np.concatenate([each.log_probs.ravel() for each in (none, *flat)])
    return arrays


def _teachers(arrays: dict[str, NDArray[Any]], ends: NDArray[np.int64]) -> list[TeacherTargets | None]:
    masks = np.split(arrays["opd_mask"].astype(np.bool_), ends)
    log_probs = np.split(arrays["teacher_log_probs"], ends)
    targets: dict[str, list[IdTargets | None]] = {}
    for name in _ID_TARGETS:
        widths = arrays[f"teacher_{name}_widths"]
        bounds = np.cumsum([mask.size * width for mask, width in zip(masks, widths, strict=True)])[:-1]
        ids, values = (np.split(arrays[f"teacher_{name}_{what}"], bounds) for what in ("ids", "log_probs"))
        targets[name] = [
            IdTargets(ids[index].reshape(-1, width), values[index].reshape(-1, width)) if width else None
            for index, width in enumerate(widths)
        ]
    return [
        TeacherTargets(masks[index], log_probs[index], targets["top"][index], targets["support"][index])
        if has_teacher
        else None
        for index, has_teacher in enumerate(arrays["has_teacher"])
    ]
