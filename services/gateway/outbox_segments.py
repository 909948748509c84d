"""The files of the outbox: append-only segments of checksummed frames.

    segment   16-byte header: magic, sequence number of its first entry (big-endian u64); then frames
    frame     8-byte header: payload length, CRC-32 of length and payload (big-endian u32 each); then the payload

A segment is named after its first sequence number. What a crash left of the last frame is cut off when it is opened;
a frame that is damaged anywhere else is an error, because entries after it were acknowledged.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawstream.errors import OutboxError

_MAGIC = b"CLAWBOX1"
_SEGMENT_HEADER = struct.Struct(">8sQ")
_FRAME_HEADER = struct.Struct(">II")
SEGMENT_HEADER_BYTES = _SEGMENT_HEADER.size
FRAME_HEADER_BYTES = _FRAME_HEADER.size
_SUFFIX = ".segment"


@dataclass(frozen=True, slots=True)
class SegmentContent:
    """What a scan found in one segment."""

    first_sequence: int
    payloads: list[bytes]
    valid_bytes: int
    """Length of the file up to the end of its last whole frame."""
    file_bytes: int
    """Length of the file."""

    @property
    def next_sequence(self) -> int:
        return self.first_sequence + len(self.payloads)


def segment_path(directory: Path, first_sequence: int) -> Path:
    """The file that holds `first_sequence` first."""
    return directory / f"{first_sequence:020d}{_SUFFIX}"


def segment_header(first_sequence: int) -> bytes:
    """The start of a segment file."""
    return _SEGMENT_HEADER.pack(_MAGIC, first_sequence)


def frame(payload: bytes) -> bytes:
    """The bytes of one entry."""
    length = len(payload)
    checksum = zlib.crc32(payload, zlib.crc32(length.to_bytes(4, "big")))
    return _FRAME_HEADER.pack(length, checksum) + payload


def list_segments(directory: Path) -> list[tuple[int, Path]]:
    """First sequence numbers and files, in order."""
    return sorted((int(path.name.removesuffix(_SUFFIX)), path) for path in directory.glob(f"*{_SUFFIX}"))


def read_frames(content: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Payloads from `offset` on and the offset after each; ends at the first frame that is not whole."""
    view = memoryview(content)
    while offset + FRAME_HEADER_BYTES <= len(content):
        length, checksum = _FRAME_HEADER.unpack_from(content, offset)
        end = offset + FRAME_HEADER_BYTES + length
        if end > len(content):
            return
        payload = bytes(view[offset + FRAME_HEADER_BYTES : end])
        if zlib.crc32(payload, zlib.crc32(length.to_bytes(4, "big"))) != checksum:
            return
        yield payload, end
        offset = end


def scan_segment(path: Path, first_sequence: int) -> SegmentContent:
    """Reads a whole segment. A file shorter than its header, or with a torn header, holds nothing."""
    content = path.read_bytes()
    header = content[:SEGMENT_HEADER_BYTES]
    if header != segment_header(first_sequence):
        if len(content) > SEGMENT_HEADER_BYTES:
            raise OutboxError(f"{path}: not an outbox segment that starts with entry {first_sequence}; move it away")
        return SegmentContent(first_sequence=first_sequence, payloads=[], valid_bytes=0, file_bytes=len(content))
    payloads: list[bytes] = []
    valid = SEGMENT_HEADER_BYTES
    for payload, end in read_frames(content, SEGMENT_HEADER_BYTES):
        payloads.append(payload)
        valid = end
    return SegmentContent(first_sequence=first_sequence, payloads=payloads, valid_bytes=valid, file_bytes=len(content))
