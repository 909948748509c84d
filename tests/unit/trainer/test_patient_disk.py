"""A full disk is waited for; anything else, and the end of the process, is not."""

import errno
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from clawstream import disk_patience
from clawstream.disk_patience import DiskPatience
from clawstream.disk_space import is_out_of_space
from clawstream.durable_files import replace_file
from clawstream.errors import BlobError, WeightsError
from clawstream.log import get_logger
from services.trainer.batch_archive import ArchivedBatch
from services.trainer.ledger_file import LedgerFile
from services.trainer.patient_disk import PatientArchive, PatientStore
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry, LedgerMark
from tests.unit.trainer.fake_compute import Disk as FakeDisk
from tests.unit.trainer.fake_compute import FakeStore, Faults

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite words it")
    error.sqlite_errorcode = code
    return error


def raised_from(cause: BaseException) -> WeightsError:
    error = WeightsError("could not be published")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "quota"), True),
        (raised_from(FULL), True),
        (raised_from(SafetensorError("I/O error: No space left on device (os error 28)")), True),
        (raised_from(sqlite_error(sqlite3.SQLITE_FULL)), True),
        (raised_from(SafetensorError("I/O error: Disk quota exceeded (os error 122)")), True),
        (raised_from(sqlite_error(sqlite3.SQLITE_IOERR_WRITE)), False),
        (OSError(errno.EACCES, "denied"), False),
        (raised_from(SafetensorError("I/O error: Permission denied (os error 13)")), False),
        (WeightsError("other weights"), False),
    ],
)
def test_only_missing_space_is_out_of_space(error: BaseException, expected: bool) -> None:
    assert is_out_of_space(error) is expected


class Disk:
    """An archive that refuses as often as it is told to."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)

    def write(self, lineage: str, step: int, samples: object) -> ArchivedBatch:
        if self.refusals:
            raise BlobError(f"step {step}") from self.refusals.pop(0)
        return ArchivedBatch(Path(lineage), "sha")


class ForwardingTurns(FakeStore):
    """A store of nothing but turns."""

    def __init__(self, turns: LedgerFile) -> None:
        super().__init__(FakeDisk(turns=turns), Faults())
        self.tries = 0

    def append_turns(self, addition: LedgerAddition) -> None:
        self.tries += 1
        super().append_turns(addition)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_patience, "_RETRY_SECONDS", 0.001)


def test_a_full_disk_is_tried_again_until_there_is_space() -> None:
    archive = PatientArchive(Disk(FULL, FULL), DiskPatience(threading.Event(), get_logger(), waits="it waits"))
    assert archive.write("lineage", 1, []).path == Path("lineage")


def test_a_turn_ledger_without_space_is_tried_again_too(tmp_path: Path) -> None:
    turns = LedgerFile(tmp_path / "turns.sqlite")
    old = LedgerMark().after([LedgerEntry("old", 1.0)])
    turns.append(LedgerAddition(LedgerMark(), old, (LedgerEntry("old", 1.0),)))
    database = turns._connection  # pyright: ignore[reportPrivateUsage] - SQLite's own way to be full
    assert database is not None
    database.execute("PRAGMA max_page_count = 1")

    class Freed(threading.Event):
        """The process goes on; while it waits, somebody frees the disk."""

        def wait(self, timeout: float | None = None) -> bool:
            database.execute("PRAGMA max_page_count = 10000")
            return False

    entries = tuple(LedgerEntry(f"turn-{number}", 2.0) for number in range(500))
    disk = ForwardingTurns(turns)
    PatientStore(disk, DiskPatience(Freed(), get_logger(), waits="it waits")).append_turns(
        LedgerAddition(old, old.after(entries), entries)
    )
    assert disk.tries == 2
    turns.check(old.after(entries))
    turns.close()


def test_another_refusal_is_raised_at_once() -> None:
    disk = Disk(OSError(errno.EROFS, "read only"), FULL)
    with pytest.raises(BlobError, match="step 1"):
        PatientArchive(disk, DiskPatience(threading.Event(), get_logger(), waits="it waits")).write("lineage", 1, [])
    assert disk.refusals == [FULL]


def test_the_end_of_the_process_is_not_held_up() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(BlobError, match="step 1"):
        PatientArchive(Disk(FULL), DiskPatience(stop, get_logger(), waits="it waits")).write("lineage", 1, [])


def test_a_file_that_could_not_be_replaced_leaves_no_part_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    replace_file(file, b"old")

    def refuse(path: Path, content: bytes) -> int:
        path.open("wb").write(content[:1])
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"
