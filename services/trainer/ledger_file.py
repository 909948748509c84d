"""The turn ledger on the disk: one SQLite file beside the checkpoints, to which entries are only added.

A checkpoint names a number of entries and their digest. Entries are on the disk before the checkpoint that counts
them, so a crash between the two leaves a tail that no checkpoint knows: it is not looked at, and the next addition,
which stands in its place, removes it in the same transaction. A checkpoint whose entries were removed in this way (it
was passed over once, and came back) no longer has its digest, and is refused.

SQLite, because a turn can come back at any time as a later revision, so all ids must be findable, exactly; its page
cache keeps memory the same however many there are. The rollback journal, because it needs no shared memory: all ranks
see the file system, and it may be a network's.
"""

import sqlite3
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from clawstream.disk_space import reason_of
from clawstream.durable_files import sync_directory
from clawstream.errors import TurnLedgerError, TurnLedgerUnreadable
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry, LedgerMark

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS turns (
    sequence INTEGER PRIMARY KEY,
    turn_id TEXT NOT NULL,
    left_at REAL NOT NULL,
    epoch INTEGER,
    is_explicit INTEGER,
    position INTEGER
);
CREATE INDEX IF NOT EXISTS by_turn ON turns (turn_id);
CREATE TABLE IF NOT EXISTS marks (entries INTEGER PRIMARY KEY, digest TEXT NOT NULL, left_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS forgotten (id INTEGER PRIMARY KEY CHECK (id = 0), entries INTEGER NOT NULL);
INSERT OR IGNORE INTO forgotten VALUES (0, 0);
"""
_COLUMNS: Final = "turn_id, left_at, epoch, is_explicit, position"
_MARKS_FORGOTTEN_AT_ONCE: Final = 2
"""More than an addition brings, so that forgetting keeps up; few, so that no step pays for a long pause."""
_FORGOTTEN_MARKS_KEPT: Final = 1000
"""A checkpoint all of whose turns were forgotten is still known by its mark."""
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_WRONG_CONTENT: Final = _DAMAGED | {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_MISMATCH}
"""`SQLITE_ERROR` is a table that is not there."""
_PRIMARY_CODE: Final = 0xFF


class LedgerFile:
    """Implements `services.trainer.turn_ledger.RememberedTurns`. Thread-safe; one process at a time."""

    def __init__(self, file: Path) -> None:
        """`file` is made by the first addition."""
        self._file = file
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Releases the file."""
        with self._lock:
            self._disconnect()

    # ---- reading

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        """See `RememberedTurns`. Raises TurnLedgerError."""
        if entries == 0:
            return None
        query = f"SELECT {_COLUMNS} FROM turns WHERE turn_id = ? AND sequence <= ? ORDER BY sequence DESC LIMIT 1"
        with self._lock, self._told("read"):
            row = self._open().execute(query, (turn_id, entries)).fetchone()
        return None if row is None else _entry(*row)

    def check(self, mark: LedgerMark) -> None:
        """Reads the file whole. Raises TurnLedgerError when it does not hold exactly what `mark` counts,
        TurnLedgerUnreadable when that cannot be told now: then no checkpoint must be passed over for it."""
        if mark.entries == 0:
            return
        with self._lock, self._told("read"):
            database = self._open()
            problem = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise TurnLedgerError(f"{self._file} is damaged: {problem}")
            found = self._mark_of_first(database, mark.entries)
        if found != mark:
            raise TurnLedgerError(
                f"{self._file} does not hold the {mark.entries} entries of digest {mark.digest} that the checkpoint "
                f"counts, but {found or 'fewer'}: another run has gone on from an older checkpoint since, or the file "
                "is not the one that belongs to it"
            )

    def _mark_of_first(self, database: sqlite3.Connection, entries: int) -> LedgerMark | None:
        """The mark of the first so many entries, by what is there of them; that of forgotten ones as it was."""
        forgotten = _forgotten(database)
        start = _mark_at(database, min(forgotten, entries))
        query = f"SELECT {_COLUMNS} FROM turns WHERE sequence > ? AND sequence <= ? ORDER BY sequence"
        rows = database.execute(query, (forgotten, entries))
        return None if start is None else start.after(_entry(*row) for row in rows)

    # ---- writing

    def append(self, addition: LedgerAddition) -> None:
        """Returns when the entries are on the disk, behind those of `addition.base` and with nothing after them.

        The same again changes nothing. Raises TurnLedgerError (its cause: a full disk or quota): then nothing has
        changed.
        """
        if not addition.entries:
            return
        base, mark = addition.base, addition.mark
        with self._lock, self._told("written"):
            if base.entries == 0:
                self._set_aside()
            database = self._open(create=True)
            with _transaction(database):
                database.execute("DELETE FROM turns WHERE sequence > ?", (base.entries,))
                database.execute("DELETE FROM marks WHERE entries > ?", (base.entries,))
                database.execute("UPDATE forgotten SET entries = min(entries, ?)", (base.entries,))
                if _mark_at(database, base.entries) != base:
                    raise TurnLedgerError(
                        f"{self._file} does not end with the entry that the checkpoint before counts as number "
                        f"{base.entries}: the file was exchanged under the trainer; start it again"
                    )
                database.executemany(
                    f"INSERT INTO turns (sequence, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                    _rows(addition.entries, base.entries + 1),
                )
                left_at = max(entry.left_at for entry in addition.entries)
                (before,) = database.execute("SELECT left_at FROM marks ORDER BY entries DESC LIMIT 1").fetchone() or (
                    left_at,
                )
                # Never less than the mark before: a clock that is set back only makes forgetting later.
                marked = (mark.entries, mark.digest, max(left_at, before))
                database.execute("INSERT INTO marks (entries, digest, left_at) VALUES (?, ?, ?)", marked)
                _forget(database, addition.forget_before)

    def _set_aside(self) -> None:
        """A run begins with nothing remembered: what another one remembered stays, under another name."""
        if not self._file.exists():
            return
        try:
            marks = self._open(create=True).execute("SELECT 1 FROM marks LIMIT 2").fetchall()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE not in _DAMAGED:
                raise
        else:
            if len(marks) < 2:  # at most the tail that this very run left when it died at its first checkpoint
                return
        self._disconnect()
        self._file.replace(self._file.with_name(f"{self._file.name}.before"))
        # SQLite would take it for the new file's.
        self._file.with_name(f"{self._file.name}-journal").unlink(missing_ok=True)
        sync_directory(self._file.parent)

    # ---- the file

    def _open(self, *, create: bool = False) -> sqlite3.Connection:
        if self._connection is None:
            place = f"{self._file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            connection = sqlite3.connect(place, uri=True, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA synchronous = EXTRA")  # an addition must not be undone by a power cut
            self._connection = connection
        if create:
            self._connection.executescript(_SCHEMA)
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _told(self, what: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if what == "read" and self._file.exists() and not _is_of_the_file(error):
                raise TurnLedgerUnreadable(f"{self._file} could not be read: {error}") from error
            reason = reason_of(error, self._file.parent)
            raise TurnLedgerError(f"{self._file} could not be {what}: {reason}") from reason


def _is_of_the_file(error: sqlite3.Error | OSError) -> bool:
    """Whether its content is at fault (damaged, or another's), and not the disk, a lock or a permission."""
    return isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode & _PRIMARY_CODE in _WRONG_CONTENT


@contextmanager
def _transaction(database: sqlite3.Connection) -> Generator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # a full disk may have ended it
            database.execute("ROLLBACK")
        raise


def _forget(database: sqlite3.Connection, seconds: float) -> None:
    """Removes the oldest entries, by whole marks, as far as they left before that time."""
    oldest = database.execute(
        "SELECT entries FROM marks WHERE entries > ? AND left_at < ? ORDER BY entries LIMIT ?",
        (_forgotten(database), seconds, _MARKS_FORGOTTEN_AT_ONCE),
    ).fetchall()
    if oldest:
        database.execute("DELETE FROM turns WHERE sequence <= ?", oldest[-1])
        database.execute("UPDATE forgotten SET entries = ?", oldest[-1])
        database.execute(
            "DELETE FROM marks WHERE entries <="
            " (SELECT entries FROM marks WHERE entries <= ? ORDER BY entries DESC LIMIT 1 OFFSET ?)",
            (*oldest[-1], _FORGOTTEN_MARKS_KEPT),
        )


def _forgotten(database: sqlite3.Connection) -> int:
    """How many entries at the beginning are no longer there."""
    return database.execute("SELECT coalesce(max(entries), 0) FROM forgotten").fetchone()[0]


def _mark_at(database: sqlite3.Connection, entries: int) -> LedgerMark | None:
    """The mark that an addition ended with."""
    if entries == 0:
        return LedgerMark()
    row = database.execute("SELECT digest FROM marks WHERE entries = ?", (entries,)).fetchone()
    return None if row is None else LedgerMark(entries=entries, digest=row[0])


def _rows(entries: Iterable[LedgerEntry], first: int) -> Generator[tuple[Any, ...]]:
    for sequence, entry in enumerate(entries, first):
        yield (sequence, entry.turn_id, entry.left_at, *(entry.revision or (None, None, None)))


def _entry(turn_id: str, left_at: float, epoch: int | None, is_explicit: int, position: int) -> LedgerEntry:
    return LedgerEntry(turn_id, left_at, None if epoch is None else (epoch, bool(is_explicit), position))
