"""`manifest.json`: what a published directory of weights must hold, byte for byte.

The trainer seals a directory, the weight gate and the engines verify it before they load. The manifest's own
checksum travels in the `weight-version` event, so the chain from the log to every byte is closed.
"""

import hashlib
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from clawstream.durable_files import sha256_of_file, sync_file, write_file
from clawstream.errors import WeightsError

MANIFEST_NAME = "manifest.json"
"""Name of the manifest inside its directory."""


class ManifestError(WeightsError):
    """A published directory is not what its manifest says. Names the file."""


class ManifestFile(BaseModel):
    """One file of the directory."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name inside the directory; there are no folders in it."""
    size_bytes: int = Field(ge=0)
    """Length."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum in hexadecimal."""


class WeightManifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy: str = Field(min_length=1)
    """The policy that the weights belong to."""
    weight_version: int = Field(ge=0)
    """Number of the version; never used again."""
    base_version: int | None = Field(default=None, ge=0)
    """The version that the step started from; null for version 0."""
    lineage: str = Field(min_length=1)
    """The training run."""
    train_step_id: str | None = None
    """The step that made it; null for version 0."""
    created_at: AwareDatetime
    """When the directory was sealed."""
    files: list[ManifestFile] = Field(min_length=1)
    """Every file but the manifest, by name."""


def describe_files(directory: Path) -> list[ManifestFile]:
    """Every file of `directory` but the manifest, in order of name. Raises ManifestError for a folder in it."""
    described: list[ManifestFile] = []
    for path in sorted(directory.iterdir()):
        if path.name == MANIFEST_NAME:
            continue
        if not path.is_file():
            raise ManifestError(f"{path} is not a file: a published directory holds files only")
        described.append(ManifestFile(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of_file(path)))
    return described


def seal(
    directory: Path,
    *,
    policy: str,
    weight_version: int,
    base_version: int | None,
    lineage: str,
    train_step_id: str | None,
    created_at: datetime,
) -> WeightManifest:
    """Syncs every file of `directory`, writes its manifest and syncs that. The caller renames the directory after."""
    files = describe_files(directory)
    for file in files:
        sync_file(directory / file.name)
    manifest = WeightManifest(
        policy=policy,
        weight_version=weight_version,
        base_version=base_version,
        lineage=lineage,
        train_step_id=train_step_id,
        created_at=created_at,
        files=files,
    )
    write_file(directory / MANIFEST_NAME, manifest.model_dump_json(indent=2).encode())
    return manifest


def manifest_sha256(directory: Path) -> str:
    """Checksum of the manifest itself, for the `weight-version` event. Raises ManifestError when there is none."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise ManifestError(f"{path} is missing: the directory was not completely published")
    return sha256_of_file(path)


def read_manifest(directory: Path, expected_sha256: str | None = None) -> WeightManifest:
    """Reads `manifest.json` without looking at the other files.

    Raises ManifestError when it is missing, malformed, or not the one with `expected_sha256`.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise ManifestError(f"{path} is missing: the directory was not completely published")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if expected_sha256 is not None and found != expected_sha256:
        raise ManifestError(f"{path} has checksum {found}, but the weight-version event says {expected_sha256}")
    try:
        return WeightManifest.model_validate_json(content)
    except ValidationError as error:
        raise ManifestError(f"{path} is not a manifest: {error}") from error


def verify(directory: Path, expected_sha256: str | None = None) -> WeightManifest:
    """Checks every byte of a published directory and returns its manifest.

    Raises ManifestError naming the file that is missing, has another length or checksum, or is not listed
    (an engine that loads every `*.safetensors` would load it too).
    """
    manifest = read_manifest(directory, expected_sha256)
    listed = {file.name for file in manifest.files}
    for path in sorted(directory.iterdir()):
        if path.name not in listed and path.name != MANIFEST_NAME:
            raise ManifestError(f"{path} is not listed in the manifest of version {manifest.weight_version}")
    for file in manifest.files:
        path = directory / file.name
        if not path.is_file():
            raise ManifestError(f"{path} is missing")
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            raise ManifestError(f"{path} has {size_bytes} bytes, but the manifest says {file.size_bytes}")
        found = sha256_of_file(path)
        if found != file.sha256:
            raise ManifestError(f"{path} has checksum {found}, but the manifest says {file.sha256}")
    return manifest
