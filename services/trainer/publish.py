# pyright: basic
# Reason: torch and safetensors are untyped.
"""Publishing: a directory that any engine can load, complete or absent: Hugging Face's form, or PEFT's for adapters.

Runs on any thread: it reads a snapshot, never the model. The order is: files, sync, manifest, sync, rename, sync;
only then may the `weight-version` event be written.
"""

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from clawstream.durable_files import remove_directory, whole_directory
from clawstream.errors import WeightsError
from clawstream.weights.manifest import manifest_sha256, seal, verify
from services.trainer.engine.adapter_weights import CONFIG_NAME, WEIGHTS_NAME, adapter_config
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.weights import SafetensorsDirectory
from services.trainer.policy_snapshot import PolicySnapshot

_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth", "manifest.json")
"""Ends of the base model's file names that hold weights, or describe those weights."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """What the `weight-version` event needs to know."""

    directory: Path
    """The complete directory."""
    manifest_sha256: str
    """Checksum of its manifest."""


def export_hugging_face(snapshot: PolicySnapshot, base_directory: Path, directory: Path) -> None:
    """Writes `model.safetensors` and copies configuration and tokenizer files of the base model into `directory`."""
    weights = {name: tensor.to(snapshot.model_dtype) for name, tensor in snapshot.weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for path in sorted(base_directory.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)


def export_adapters(snapshot: PolicySnapshot, lora: LoraSettings, base_directory: Path, directory: Path) -> None:
    """Writes adapters as PEFT does. Configuration and tokenizer are the base model's, and stay there."""
    weights = {name: tensor.to(snapshot.model_dtype) for name, tensor in snapshot.weights.items()}
    save_file(weights, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    config = orjson.dumps(adapter_config(lora, base_directory), option=orjson.OPT_INDENT_2)
    (directory / CONFIG_NAME).write_bytes(config)


class WeightStore:
    """The published versions of one policy: `root/policy/00000007/`."""

    def __init__(self, root: Path, policy: str) -> None:
        if not policy or "/" in policy or policy.startswith("."):
            raise WeightsError(f"policy {policy!r} cannot be the name of a directory")
        self._directory = root / policy
        self._policy = policy

    def directory_of(self, weight_version: int) -> Path:
        """Where a version is, or would be."""
        return self._directory / f"{weight_version:08d}"

    def versions(self) -> list[int]:
        """Versions that are present, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def publish(
        self,
        snapshot: PolicySnapshot,
        base_directory: Path,
        *,
        weight_version: int,
        base_version: int | None,
        lineage: str,
        train_step_id: str | None,
        created_at: datetime,
    ) -> PublishedWeights:
        """Publishes a snapshot as `weight_version`.

        Publishing the same content again (a restart after the rename and before the event) gives the same answer.
        Raises WeightsError when the number is taken by other content, or when the disk is full; no version that
        was there before is touched.
        """
        final = self.directory_of(weight_version)
        if final.exists():
            return self._published_before(snapshot, final, lineage, train_step_id)
        try:
            with whole_directory(final) as partial:
                if snapshot.lora is None:
                    export_hugging_face(snapshot, base_directory, partial)
                else:
                    export_adapters(snapshot, snapshot.lora, base_directory, partial)
                seal(
                    partial,
                    policy=self._policy,
                    weight_version=weight_version,
                    base_version=base_version,
                    lineage=lineage,
                    train_step_id=train_step_id,
                    created_at=created_at,
                )
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{final} could not be published: {error}; free some space, then try again") from error
        return PublishedWeights(final, manifest_sha256(final))

    def _published_before(
        self, snapshot: PolicySnapshot, final: Path, lineage: str, train_step_id: str | None
    ) -> PublishedWeights:
        manifest = verify(final)
        same = (manifest.lineage, manifest.train_step_id) == (lineage, train_step_id)
        if not same or not _holds(final, snapshot):
            raise WeightsError(
                f"{final} already holds other weights (lineage {manifest.lineage}, step {manifest.train_step_id}); "
                "a version number is never used twice: publish under the next number"
            )
        return PublishedWeights(final, manifest_sha256(final))

    def delete(self, weight_version: int) -> None:
        """Removes a version; ask `clawstream.weights.retention.deletable` first. Not there: nothing happens."""
        remove_directory(self.directory_of(weight_version))


def _holds(directory: Path, snapshot: PolicySnapshot) -> bool:
    published = SafetensorsDirectory(directory)
    return all(
        torch.equal(published.read(name), tensor.to(snapshot.model_dtype)) for name, tensor in snapshot.weights.items()
    )
