"""Log files of supervised processes: bounded, and safe to read while they are written.

Processes write to their file directly, opened for appending, so that they survive their supervisor. Rotation copies
the file and truncates it; lines that are written in between may be lost, which is why nothing that matters is only in
a log file.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

LARGEST_FILE_BYTES = 10 * 1024 * 1024
KEPT_FILES = 3


def rotate(file: Path, *, largest_bytes: int = LARGEST_FILE_BYTES, kept: int = KEPT_FILES) -> bool:
    """Moves the content of `file` to `file.1` (and that to `file.2`...) when it is too large. Returns whether.

    Raises OSError (the disk is full); `file` is then as it was.
    """
    if not file.exists() or file.stat().st_size < largest_bytes:
        return False
    for number in range(kept - 1, 0, -1):
        older = file.with_name(f"{file.name}.{number}")
        if older.exists():
            older.replace(file.with_name(f"{file.name}.{number + 1}"))
    copy = file.with_name(f"{file.name}.1")
    try:
        shutil.copyfile(file, copy)
    except OSError:
        copy.unlink(missing_ok=True)  # a part of it would take the space that is missing
        raise
    with file.open("r+b") as handle:
        handle.truncate(0)
    return True


def tail(file: Path, lines: int) -> list[str]:
    """The last lines of a file, or none when it does not exist."""
    if not file.exists():
        return []
    # 400 bytes a line are plenty for logs; reading a bounded end keeps this quick for large files.
    with file.open("rb") as handle:
        size = handle.seek(0, 2)
        handle.seek(max(0, size - lines * 400))
        return handle.read().decode("utf-8", errors="replace").splitlines()[-lines:]


class LogFollower:
    """New lines of a file since the last call; starts at a given position and notices truncation."""

    def __init__(self, file: Path, *, position_bytes: int) -> None:
        self._file = file
        self._position_bytes = position_bytes
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Whole lines that were written since the last call."""
        if not self._file.exists():
            return
        with self._file.open("rb") as handle:
            if handle.seek(0, 2) < self._position_bytes:
                self._position_bytes, self._rest = 0, b""
            handle.seek(self._position_bytes)
            content = handle.read()
        self._position_bytes += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", errors="replace")


def has_line_matching(follower: LogFollower, pattern: str) -> bool:
    """Whether one of the new lines matches."""
    return any(re.search(pattern, line) for line in follower.lines())
