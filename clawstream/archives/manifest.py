"""What an archive holds. Written last: a folder without it is no archive."""

from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from clawstream.durable_files import replace_file, sha256_of_file
from clawstream.errors import ArchiveError

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ArchivedFile(_Part):
    """One file: a range of one partition."""

    path: str
    """Relative to the archive."""
    sha256: str
    """Checksum of its bytes."""
    rows: int = Field(ge=1)
    """Number of records."""
    first_offset: int
    """Of its first record."""
    last_offset: int
    """Of its last record."""


class ArchivedPartition(_Part):
    """One partition, from `start_offset` to before `end_offset`."""

    partition: int
    """Its number."""
    start_offset: int
    """The first offset that was retained."""
    end_offset: int
    """The end for committed readers when the export began."""
    files: list[ArchivedFile]
    """In order; none when the partition was empty."""


class ArchivedTopic(_Part):
    """One topic."""

    topic: str
    """Name without namespace."""
    partitions: list[ArchivedPartition]
    """All of them."""

    @property
    def rows(self) -> int:
        """Number of records."""
        return sum(file.rows for partition in self.partitions for file in partition.files)


class Manifest(_Part):
    """The whole archive."""

    format: int = _FORMAT
    """Of this folder."""
    namespace: str
    """Where the topics were."""
    exported_at: AwareDatetime
    """When the export began."""
    topics: list[ArchivedTopic]
    """What was asked for."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Makes the folder an archive. Raises OSError."""
    replace_file(directory / MANIFEST_NAME, manifest.model_dump_json(indent=2).encode())


def read_manifest(directory: Path) -> Manifest:
    """Raises ArchiveError for a folder that is no archive, or none that this program reads."""
    file = directory / MANIFEST_NAME
    if not file.is_file():
        raise ArchiveError(f"{directory}: no {MANIFEST_NAME}: no archive, or one whose export did not finish")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ArchiveError(f"{file}: {error}") from error
    if manifest.format != _FORMAT:
        raise ArchiveError(f"{file}: format {manifest.format}; this program reads {_FORMAT}")
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Raises ArchiveError naming the first file that is missing or has another checksum."""
    for topic in manifest.topics:
        for partition in topic.partitions:
            for file in partition.files:
                path = directory / file.path
                if not path.is_file():
                    raise ArchiveError(f"{path}: missing from the archive")
                if sha256_of_file(path) != file.sha256:
                    raise ArchiveError(f"{path}: its checksum is not the manifest's; it was damaged")
