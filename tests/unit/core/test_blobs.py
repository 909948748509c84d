"""Content-addressed blobs: on disk and on another fsspec file system."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from clawstream.blobs import BlobReader, BlobStore, remove_blob
from clawstream.errors import BlobError, BlobUnavailable
from schemas.arrays import MAX_INLINE_BYTES, NumberArray


def large_array() -> np.ndarray[Any, Any]:
    return np.arange(MAX_INLINE_BYTES // 4 + 1, dtype=np.int32)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_what_is_packed_comes_back_the_same(tmp_path: Path, scheme: str) -> None:
    store = BlobStore(f"{scheme}{tmp_path}")
    packed = store.pack(large_array())
    assert packed.data is None
    assert NumberArray.model_validate_json(packed.model_dump_json()) == packed
    resolved = BlobReader().resolve(packed)
    assert resolved.dtype == np.int32
    np.testing.assert_array_equal(resolved, large_array())


def test_only_arrays_above_the_limit_become_blobs(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    at_the_limit = np.zeros(MAX_INLINE_BYTES // 8, dtype=np.float64)
    assert store.pack(at_the_limit).blob is None
    assert list(tmp_path.iterdir()) == []
    assert store.pack(np.zeros(MAX_INLINE_BYTES // 8 + 1, dtype=np.float64)).blob is not None


@settings(max_examples=30)
@given(npst.arrays(dtype=st.sampled_from([np.int32, np.float32, np.int64, np.dtype(">f4")]), shape=npst.array_shapes()))
def test_small_arrays_of_any_shape_come_back_the_same(array: np.ndarray[Any, Any]) -> None:
    resolved = BlobReader().resolve(BlobStore("memory://small").pack(array))
    assert resolved.shape == array.shape
    assert resolved.tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_writing_twice_gives_one_object_under_its_checksum(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    first = store.write(b"some bytes")
    assert store.write(b"some bytes") == first
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == [first.sha256]
    assert BlobReader().read(first) == b"some bytes"


def test_a_torn_object_is_written_again(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    reference = store.write(b"some bytes")
    file = tmp_path / reference.sha256[:2] / reference.sha256
    file.write_bytes(b"some")
    store.write(b"some bytes")
    assert BlobReader().read(reference) == b"some bytes"


@pytest.mark.parametrize("content", [b"", b"some byteX", b"some bytes and more"])
def test_a_damaged_object_is_refused(tmp_path: Path, content: bytes) -> None:
    reference = BlobStore(str(tmp_path)).write(b"some bytes")
    (tmp_path / reference.sha256[:2] / reference.sha256).write_bytes(content)
    with pytest.raises(BlobError, match="checksum"):
        BlobReader().read(reference)


def test_a_missing_object_is_refused(tmp_path: Path) -> None:
    reference = BlobStore(str(tmp_path)).write(b"some bytes")
    (tmp_path / reference.sha256[:2] / reference.sha256).unlink()
    with pytest.raises(BlobError, match="cannot be read"):
        BlobReader().read(reference)


def test_a_store_that_is_not_there_or_refuses_may_be_asked_again(tmp_path: Path) -> None:
    store = tmp_path / "mount"
    reference = BlobStore(str(store)).write(b"some bytes")
    store.rename(tmp_path / "away")
    with pytest.raises(BlobUnavailable, match="the store's folder is not there"):
        BlobReader().read(reference)
    (tmp_path / "away").rename(store)
    assert BlobReader().read(reference) == b"some bytes"
    blob = store / reference.sha256[:2] / reference.sha256
    blob.unlink()
    blob.mkdir()
    with pytest.raises(BlobUnavailable, match="cannot be read now"):
        BlobReader().read(reference)


def test_a_store_that_hangs_ends_with_a_deadline(tmp_path: Path) -> None:
    """A pipe that nobody writes to hangs as a dead mount does."""
    reference = BlobStore(str(tmp_path)).write(b"some bytes")
    blob = tmp_path / reference.sha256[:2] / reference.sha256
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(BlobUnavailable, match="no answer within"):
        BlobReader(deadline_seconds=0.05).read(reference)
    writer = os.open(blob, os.O_WRONLY)  # Lets the reader go that was left behind.
    os.close(writer)


def test_reads_that_hang_cost_a_process_a_few_threads_and_other_stores_nothing(tmp_path: Path) -> None:
    hangs, answers = (BlobStore(str(tmp_path / name)).write(b"some bytes") for name in ("hangs", "answers"))
    blob = tmp_path / "hangs" / hangs.sha256[:2] / hangs.sha256
    blob.unlink()
    os.mkfifo(blob)
    reader, threads = BlobReader(deadline_seconds=0.02), threading.active_count()
    for _ in range(12):
        with pytest.raises(BlobUnavailable, match=r"no answer within|earlier calls have not come back"):
            reader.read(hangs)
    assert threading.active_count() - threads <= 4
    while True:  # On a busy machine the deadline is short for this one, too.
        try:
            assert reader.read(answers) == b"some bytes"
        except BlobUnavailable as error:
            assert "no answer within" in str(error)  # noqa: PT017 - and not that earlier calls have not come back
        else:
            break
    os.close(os.open(blob, os.O_WRONLY))  # Lets the readers go that were left behind.


def test_a_write_that_hangs_ends_with_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: release.wait())
    with pytest.raises(BlobError, match="no answer within"):
        BlobStore(str(tmp_path), deadline_seconds=0.05).write(b"some bytes")
    release.set()


def test_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    reference = BlobStore(str(tmp_path)).write(b"x").model_copy(update={"uri": "nosuch://bucket/x"})
    with pytest.raises(BlobError, match="cannot be read"):
        BlobReader().read(reference)


def test_an_array_in_a_blob_says_so_when_it_is_used_unresolved(tmp_path: Path) -> None:
    packed = BlobStore(str(tmp_path)).pack(large_array())
    with pytest.raises(ValueError, match="in a blob"):
        packed.to_numpy()


def test_an_encrypted_blob_is_read_by_its_reference_alone_and_by_nothing_else(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path), encrypts=True)
    packed, again = store.pack(large_array()), store.pack(large_array())
    assert NumberArray.model_validate_json(packed.model_dump_json()) == packed
    np.testing.assert_array_equal(BlobReader().resolve(packed), large_array())
    assert packed.blob is not None
    assert again.blob is not None
    assert packed.blob.sha256 != again.blob.sha256, "equal content gives nothing away"
    stored = BlobReader().read(packed.blob.model_copy(update={"encryption_key": ""}))
    assert large_array()[:8].tobytes() not in stored
    other = packed.blob.model_copy(update={"encryption_key": again.blob.encryption_key})
    with pytest.raises(BlobError, match="the key of its reference does not decrypt it"):
        BlobReader().read(other)


class StoreError(Exception):
    """As the libraries of remote stores have them: no OSError."""


def test_what_a_remote_store_raises_of_its_own_is_one_of_our_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore("memory://raising")
    reference = store.write(b"some bytes")

    def refuse(*_arguments: object, **_options: object) -> bytes:
        raise StoreError("the token has expired")

    for method in ("pipe_file", "cat_file", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, method, refuse)
    with pytest.raises(BlobError, match="StoreError: the token has expired"):
        store.write(b"other bytes")
    with pytest.raises(BlobUnavailable, match="StoreError: the token has expired"):
        BlobReader().read(reference)
    with pytest.raises(BlobError, match="StoreError: the token has expired"):
        remove_blob(reference)
