# pyright: basic
# fsspec has no type information; this file is a thin adapter around it.
"""Content-addressed blobs: number arrays that are too large to travel inside an event.

A blob's name is its sha256, so writing it twice writes the same object, and a reader can tell a torn or replaced one.
Write the blob first and the event after it: an event never refers to what does not exist.
"""

import base64
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from clawstream.deadline_calls import DeadlineCalls
from clawstream.durable_files import sync_directory
from clawstream.errors import BlobError, BlobUnavailable, SettingsError
from schemas.arrays import MAX_INLINE_BYTES, BlobReference, NumberArray, from_bytes

_NONCE_BYTES = 12
DEADLINE_SECONDS = 30.0
"""Of one blob's writing or reading. A mount may hang for ever otherwise, and whoever waits with it."""


class BlobStore:
    """Writes blobs below one fsspec URL. All calls block: use a thread inside an event loop."""

    def __init__(self, url: str, *, encrypts: bool = False, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        """`url` is a folder: a path, `file:///...`, `s3://bucket/prefix`... Made when the first blob is written.

        `encrypts`: every blob under a key of its own, which its reference holds. Then two writings of one array are two
        blobs.

        Raises SettingsError for a URL that nothing here can write to.
        """
        try:
            found, path = cast("tuple[AbstractFileSystem, str]", fsspec.url_to_fs(url))
        except (ImportError, ValueError) as error:
            raise SettingsError(f"blob store {url}: {error}") from error
        self._filesystem = found
        self._base = path.rstrip("/")
        self._encrypts = encrypts
        self._calls = DeadlineCalls(f"blob store {url}", seconds=deadline_seconds)

    def write(self, block: bytes) -> BlobReference:
        """Stores `block` and returns where it is. Returns when it is safe on disk, or in the bucket.

        Raises BlobError when the store refuses, or does not answer in time.
        """
        key = b""
        if self._encrypts:
            key, nonce = AESGCM.generate_key(256), os.urandom(_NONCE_BYTES)
            block = nonce + AESGCM(key).encrypt(nonce, block, None)
        checksum = hashlib.sha256(block).hexdigest()
        path = f"{self._base}/{checksum[:2]}/{checksum}"
        try:
            with _as_os_errors():
                self._calls.call(lambda: self._put(path, block))
        except OSError as error:
            raise BlobError(f"blob {path}: cannot be written: {error}") from error
        return BlobReference(
            uri=str(self._filesystem.unstrip_protocol(path)),
            sha256=checksum,
            size_bytes=len(block),
            encryption_key=base64.b64encode(key).decode(),
        )

    def pack(self, array: npt.NDArray[Any]) -> NumberArray:
        """`array` as part of an event: inline up to `MAX_INLINE_BYTES`, else as a blob that is written now."""
        if array.nbytes <= MAX_INLINE_BYTES:
            return NumberArray.from_numpy(array)
        little_endian = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return NumberArray(
            dtype=array.dtype.name,  # pyright: ignore[reportArgumentType] - pydantic checks it
            shape=list(array.shape),
            blob=self.write(little_endian.tobytes()),
        )

    def _put(self, path: str, block: bytes) -> None:
        if isinstance(self._filesystem, LocalFileSystem):
            _write_local(Path(path), block)
        elif not self._is_stored(path, len(block)):
            self._filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._filesystem.pipe_file(path, block)

    def _is_stored(self, path: str, size_bytes: int) -> bool:
        try:
            return int(self._filesystem.size(path) or 0) == size_bytes
        except FileNotFoundError:
            return False


class BlobReader:
    """Reads blobs from wherever they were written. One for a process. Thread-safe; all calls block.

    A store that hangs costs every read its deadline, and the process a few threads: while so many reads of one store
    have not come back, further ones are refused at once.
    """

    def __init__(self, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._calls: dict[str, DeadlineCalls] = {}
        """Of each store: one that hangs must not keep others from being read."""

    def read(self, reference: BlobReference) -> bytes:
        """The content of a blob.

        Raises BlobError when the store does not have it, or its bytes have another checksum; BlobUnavailable when the
        store does not answer in time, refuses, or is not there as a whole: then asking again later may help.
        """
        try:
            filesystem, path = cast("tuple[AbstractFileSystem, str]", fsspec.url_to_fs(reference.uri))
            # One byte more than expected is enough to see that a replaced object is too long.
            end = reference.size_bytes + 1
            with _as_os_errors():
                block = self._calls_of_store(reference).call(
                    lambda: cast("bytes", filesystem.cat_file(path, start=0, end=end))
                )
        except FileNotFoundError as error:
            if isinstance(filesystem, LocalFileSystem) and not Path(path).parent.parent.is_dir():
                raise BlobUnavailable(f"blob {reference.uri}: the store's folder is not there: {error}") from error
            raise BlobError(f"blob {reference.uri}: cannot be read: {error}") from error
        except (ValueError, ImportError) as error:
            raise BlobError(f"blob {reference.uri}: cannot be read: {error}") from error
        except OSError as error:
            raise BlobUnavailable(f"blob {reference.uri}: cannot be read now: {error}") from error
        if len(block) != reference.size_bytes or hashlib.sha256(block).hexdigest() != reference.sha256:
            raise BlobError(
                f"blob {reference.uri}: its bytes do not have the checksum {reference.sha256}; it was damaged"
            )
        return _decrypted(block, reference) if reference.encryption_key else block

    def resolve(self, array: NumberArray) -> npt.NDArray[Any]:
        """The elements of `array`, read-only, wherever they are. Raises as `read`."""
        if array.blob is None:
            return array.to_numpy()
        return from_bytes(self.read(array.blob), array.dtype, array.shape)

    def inlined(self, array: NumberArray) -> NumberArray:
        """The same array with its elements inside. Raises as `read`."""
        return array if array.blob is None else NumberArray.from_numpy(self.resolve(array))

    def _calls_of_store(self, reference: BlobReference) -> DeadlineCalls:
        store = reference.uri.rsplit("/", 2)[0]  # A blob lies in STORE/FIRST-TWO-DIGITS/CHECKSUM.
        with self._lock:
            if store not in self._calls:
                self._calls[store] = DeadlineCalls(f"blob store {store}", seconds=self._deadline_seconds)
            return self._calls[store]


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """What a remote store raises of its own (botocore's errors, Azure's, a bug) is to its callers an I/O error."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _decrypted(block: bytes, reference: BlobReference) -> bytes:
    try:
        key = base64.b64decode(reference.encryption_key, validate=True)
        return AESGCM(key).decrypt(block[:_NONCE_BYTES], block[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise BlobError(f"blob {reference.uri}: the key of its reference does not decrypt it") from error


def remove_blob(reference: BlobReference) -> bool:
    """Removes a blob for good. False when there was none any more. Raises BlobError when the store refuses."""
    try:
        filesystem, path = cast("tuple[AbstractFileSystem, str]", fsspec.url_to_fs(reference.uri))
        with _as_os_errors():
            filesystem.rm_file(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, ImportError) as error:
        raise BlobError(f"blob {reference.uri}: cannot be removed: {error}") from error
    return True


def _write_local(path: Path, block: bytes) -> None:
    """Writes beside the target, syncs and renames: a crash leaves the whole blob or none."""
    if path.is_file() and path.stat().st_size == len(block):
        # Another writer may have put it there just now, and not have synced its name yet.
        _sync_names(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_names(path)


def _sync_names(path: Path) -> None:
    """The blob's name, its folder's name and the store's own are on the disk."""
    for directory in (path.parent, path.parent.parent, path.parent.parent.parent):
        sync_directory(directory)
