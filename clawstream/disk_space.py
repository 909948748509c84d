"""Whether a disk, or a quota on it, has no room: one kind of failure, which waiting may mend, however it is worded."""

import contextlib
import errno
import os
import re
import sqlite3
from pathlib import Path
from typing import Final

from clawstream.durable_files import PARTIAL_PREFIX

FREE_SOME_SPACE: Final = "free some space there, or raise the quota"
"""What to do about it."""
_OUT_OF_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RUST_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust (safetensors) word an errno."""
_PRIMARY_CODE: Final = 0xFF
_WITHOUT_REASON: Final = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
"""What SQLite makes of every refusal but ENOSPC in a write: of a used-up quota, or of a file that cannot be made."""
_PROBE_BYTES: Final = 16 << 20
"""More than any of our transactions needs: what failed has given its space back before anybody can look."""
_CHUNK_BYTES: Final = 1 << 20


def is_out_of_space(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is a disk or a quota without space: it may be mended by waiting."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OUT_OF_SPACE:
            return True
        if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        worded = _RUST_OS_ERROR.search(str(cause))
        if worded is not None and int(worded[1]) in _OUT_OF_SPACE:
            return True
        cause = cause.__cause__
    return False


def reason_of(error: sqlite3.Error | OSError, directory: Path) -> sqlite3.Error | OSError:
    """Why a file of SQLite in `directory` could not be written: `error`, or the missing space that it does not tell.

    SQLite keeps the errno to itself, and says "disk I/O error" for a quota as for a broken disk. So `directory` is
    asked again, with a file that is written and removed.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code & _PRIMARY_CODE not in _WITHOUT_REASON:
        return error
    refusal = _refusal(directory)
    if refusal is None or not is_out_of_space(refusal):
        return error
    refusal.__cause__ = error
    return refusal


def _refusal(directory: Path) -> OSError | None:
    """What the disk says to a file of `_PROBE_BYTES`. Random bytes: some file systems store no zeros."""
    probe = directory / f"{PARTIAL_PREFIX}space-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        return error
    try:
        for _ in range(_PROBE_BYTES // _CHUNK_BYTES):
            chunk = memoryview(os.urandom(_CHUNK_BYTES))
            while chunk:
                chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)  # A network's file system may refuse only now.
    except OSError as error:
        return error
    finally:
        probe.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The same refusal once more.
            os.close(descriptor)
    return None
