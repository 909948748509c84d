"""The folder of an outbox: who owns it, which outbox it is, and its segments, recovered after a crash."""

import fcntl
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clawstream.durable_files import replace_file, sync_directory
from clawstream.errors import OutboxError
from services.gateway.outbox_segments import (
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    list_segments,
    scan_segment,
    segment_header,
    segment_path,
)

Sync = Callable[[int], None]
"""Makes a file descriptor's content durable."""


@dataclass(slots=True)
class Segment:
    """One file of the outbox, as far as it is synced."""

    first_sequence: int
    path: Path
    size_bytes: int = SEGMENT_HEADER_BYTES
    """Length of the synced part of the file."""
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    """File offset of each entry."""

    @property
    def next_sequence(self) -> int:
        return self.first_sequence + len(self.offsets)

    def end_of(self, index: int) -> int:
        """File offset after the entry at `index`."""
        return self.offsets[index + 1] if index + 1 < len(self.offsets) else self.size_bytes

    def bytes_from(self, sequence: int) -> int:
        """Bytes of the entries from `sequence` on."""
        index = max(0, sequence - self.first_sequence)
        return self.size_bytes - self.offsets[index] if index < len(self.offsets) else 0


def lock_directory(directory: Path) -> int:
    """The descriptor that holds the lock until it is closed. Raises OutboxError when another process has it."""
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OutboxError(
            f"outbox {directory} is used by another process; give every gateway a name of its own"
        ) from error
    return descriptor


def outbox_identity(directory: Path, new_id: Callable[[], str]) -> str:
    """What tells this outbox from any other, made the first time."""
    file = directory / "identity"
    if not file.exists():
        replace_file(file, new_id().encode())
    return file.read_text(encoding="ascii")


def recover_segments(directory: Path, sync: Sync) -> tuple[list[Segment], int]:
    """All segments, at least one, and how many bytes an interrupted append had left; those are cut off.

    Raises OutboxError for damage that acknowledged entries follow.
    """
    torn_bytes = 0
    found = list_segments(directory)
    segments: list[Segment] = []
    for number, (first_sequence, path) in enumerate(found):
        content = scan_segment(path, first_sequence)
        is_last = number == len(found) - 1
        if segments and segments[-1].next_sequence != first_sequence:
            raise OutboxError(f"{path}: entry {segments[-1].next_sequence} is missing before it")
        if content.valid_bytes != content.file_bytes:
            if not is_last:
                raise OutboxError(
                    f"{path}: damaged at byte {content.valid_bytes}; acknowledged turns follow: restore the file, "
                    "or move the folder away to go on without them"
                )
            torn_bytes = content.file_bytes - content.valid_bytes
        segment = Segment(first_sequence=first_sequence, path=path)
        for payload in content.payloads:
            segment.offsets.append(segment.size_bytes)
            segment.size_bytes += FRAME_HEADER_BYTES + len(payload)
        if is_last and (content.valid_bytes != content.file_bytes or content.valid_bytes == 0):
            _cut(path, segment.size_bytes, segment_header(first_sequence))
        segments.append(segment)
    if not segments:
        segments.append(new_segment(directory, 0, sync))
    sync_directory(directory)
    return segments, torn_bytes


def new_segment(directory: Path, first_sequence: int, sync: Sync) -> Segment:
    """An empty segment whose name is on the disk."""
    path = segment_path(directory, first_sequence)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_at(descriptor, segment_header(first_sequence), 0)
        sync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(directory)
    return Segment(first_sequence=first_sequence, path=path)


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Writes all of `content`."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _cut(path: Path, length: int, header: bytes) -> None:
    """Leaves the first `length` bytes, with a whole header, and syncs."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        write_at(descriptor, header, 0)
        os.ftruncate(descriptor, length)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
