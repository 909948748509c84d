"""The marker file that says a model directory is complete and what it was made from."""

import hashlib
import json
from pathlib import Path

MARKER_NAME = "clawstream-model.json"


def file_sha256(path: Path) -> str:
    """The hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_marker(directory: Path, *, source: str, source_sha256: str) -> None:
    """Mark `directory` as complete. Write this last, before the directory is renamed into place."""
    marker = {"source": source, "source_sha256": source_sha256}
    (directory / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")


def is_complete(directory: Path, source_sha256: str) -> bool:
    """Whether `directory` holds a whole model made from the source with this checksum."""
    path = directory / MARKER_NAME
    if not path.is_file():
        return False
    return json.loads(path.read_text()).get("source_sha256") == source_sha256
