"""Files and directories that are either complete or absent, also after a crash or a power cut.

The pattern: write everything into a partial directory beside the final one, sync every file, sync the partial
directory, rename it, sync the parent. A reader that sees the final name sees all of it.
"""

import hashlib
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

PARTIAL_PREFIX = ".partial-"
"""Names of unfinished directories start so; nobody reads them, and the next writer removes them."""


def sync_file(path: Path) -> None:
    """Waits until the bytes of `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Waits until the names in directory `path` are on the disk."""
    sync_file(path)


def sha256_of_file(path: Path) -> str:
    """SHA-256 of the file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Writes and syncs a new file; not atomic by itself."""
    path.write_bytes(content)
    sync_file(path)


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` so that a reader sees the old content or the new, never a part. Raises OSError."""
    partial = path.with_name(PARTIAL_PREFIX + path.name)
    try:
        write_file(partial, content)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk its part would take space from what comes next
        raise
    partial.replace(path)
    sync_directory(path.parent)


@contextmanager
def whole_directory(final: Path) -> Generator[Path]:
    """Gives a partial directory to fill; it becomes `final` when the block ends without an exception.

    The caller syncs the files that it writes. An existing `final` is replaced: it is absent between two renames,
    so readers that must never miss it need an older sibling to fall back to. After an error the partial
    directory is removed and `final` is as before; what a killed process left is removed by the next call for
    the same `final`.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(PARTIAL_PREFIX + final.name)
    old = final.with_name(PARTIAL_PREFIX + "old-" + final.name)
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        yield partial
        sync_directory(partial)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync_directory(final.parent)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Removes a directory so that its final name vanishes first: a crash in between leaves no torn `path`."""
    if not path.exists():
        return
    condemned = path.with_name(PARTIAL_PREFIX + "old-" + path.name)
    if condemned.exists():
        shutil.rmtree(condemned)
    path.rename(condemned)
    sync_directory(path.parent)
    shutil.rmtree(condemned)
