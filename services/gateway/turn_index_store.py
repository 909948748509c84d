"""The turn index on disk: a fold of the turn-index topic into one SQLite file.

Entries and the offsets up to which the topic was read are written in one transaction, so that a crash repeats a read
and never skips one. SQLite's page cache is the bounded cache in memory.
"""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from clawstream.disk_space import FREE_SOME_SPACE, is_out_of_space, reason_of
from clawstream.errors import TurnIndexUnwritable
from schemas.events import TurnIndexEvent
from services.gateway.known_turn import KnownTurn

_FORMAT: Final = 2
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS turns (
    turn_id TEXT PRIMARY KEY,
    answer_key TEXT NOT NULL,
    principal TEXT NOT NULL,
    response_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    parent_turn_id TEXT,
    session_hint TEXT,
    rollout_id TEXT,
    is_main INTEGER NOT NULL,
    own INTEGER NOT NULL,
    ended INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    entry BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_answer ON turns (answer_key, created_at);
CREATE INDEX IF NOT EXISTS by_response ON turns (response_id);
CREATE INDEX IF NOT EXISTS by_session ON turns (session_id, created_at);
CREATE INDEX IF NOT EXISTS by_parent ON turns (parent_turn_id) WHERE parent_turn_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_hint ON turns (session_hint, created_at) WHERE session_hint IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_rollout ON turns (rollout_id, created_at) WHERE rollout_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_age ON turns (created_at);
CREATE TABLE IF NOT EXISTS positions (partition INTEGER PRIMARY KEY, next_offset INTEGER NOT NULL);
"""
_MAX_CANDIDATES = 64
_MAX_OF_SESSION = 32
_MAX_OF_ROLLOUT = 2000
_MAX_WAITING_ENDS = 20_000
_REFUSALS: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_PRIMARY_CODE: Final = 0xFF


class TurnIndexStore:
    """Thread-safe: one connection writes, one reads, and write-ahead logging keeps them apart."""

    def __init__(self, file: Path, *, cache_bytes: int) -> None:
        """Opens or makes the file. One of another format is emptied: the topic holds all of it.

        Raises TurnIndexUnwritable, OSError.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._waiting_ends: OrderedDict[str, None] = OrderedDict()
        """Turns that were ended and whose rows do not say so yet: they are not there, or the disk refused."""
        self._marked: list[str] = []
        """Of those, which the transaction that is open has marked."""
        self._was_refused = False
        with self._refusals(at_start=True), ExitStack() as opened:
            self._writer = opened.enter_context(closing(self._connect(file, cache_bytes)))
            found = self._writer.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _FORMAT):
                self._writer.execute("DROP TABLE IF EXISTS turns")
                self._writer.execute("DROP TABLE IF EXISTS positions")
            if found != _FORMAT:
                self._writer.executescript(_SCHEMA)
                self._writer.execute(f"PRAGMA user_version = {_FORMAT}")
            self._reader = opened.enter_context(closing(self._connect(file, cache_bytes)))
            self._reader.execute("PRAGMA query_only = ON")
            opened.pop_all()

    def close(self) -> None:
        """Closes both connections."""
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    # ---- writing; all of it raises TurnIndexUnwritable when the disk refuses, and then nothing has changed

    def fold(
        self,
        turns: Sequence[tuple[KnownTurn, bool]],
        positions: Mapping[int, int],
        *,
        removed: Collection[str] = (),
    ) -> None:
        """Adds turns (with whether this gateway served them), removes others, moves the offsets, in one transaction."""
        rows = [
            (
                turn.turn_id,
                turn.answer_key,
                turn.principal,
                turn.response_id,
                turn.session_id,
                turn.parent_turn_id,
                turn.session_hint,
                turn.rollout.rollout_id if turn.rollout is not None else None,
                turn.is_main,
                own,
                turn.created_at.timestamp(),
                orjson.dumps(turn.to_event().model_dump(mode="json")),
            )
            for turn, own in turns
        ]
        with self._transaction():
            self._writer.executemany(
                "INSERT INTO turns (turn_id, answer_key, principal, response_id, session_id, parent_turn_id,"
                " session_hint, rollout_id, is_main, own, created_at, entry) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
                " ON CONFLICT (turn_id) DO UPDATE SET entry = excluded.entry",
                rows,
            )
            self._writer.executemany("DELETE FROM turns WHERE turn_id = ?", [(turn_id,) for turn_id in removed])
            self._writer.executemany("INSERT OR REPLACE INTO positions VALUES (?, ?)", list(positions.items()))
            self._mark([turn.turn_id for turn, _ in turns])

    def mark_ended(self, turn_ids: Sequence[str]) -> None:
        """Remembers that these turns were given a next state of kind `session_end`.

        Never raises TurnIndexUnwritable: what the disk refuses, and what is not in the index yet, is marked later.
        """
        with self._write_lock:
            for turn_id in turn_ids:
                self._waiting_ends[turn_id] = None
            while len(self._waiting_ends) > _MAX_WAITING_ENDS:
                self._waiting_ends.popitem(last=False)
        with suppress(TurnIndexUnwritable), self._transaction():
            self._mark(turn_ids)

    def forget_before(self, moment: datetime) -> int:
        """Removes turns that were created before `moment`, as the topic's retention does. Returns how many."""
        with self._transaction():
            return self._writer.execute("DELETE FROM turns WHERE created_at < ?", (moment.timestamp(),)).rowcount

    def reset(self) -> None:
        """Empties the index: the topic is not the one that was read before."""
        with self._transaction():
            self._writer.execute("DELETE FROM turns")
            self._writer.execute("DELETE FROM positions")

    @contextmanager
    def _transaction(self) -> Generator[None]:
        with self._write_lock:
            try:
                with self._refusals(), self._writer:
                    self._writer.execute("BEGIN IMMEDIATE")
                    self._marked = []
                    yield
                    if self._was_refused:
                        self._mark(list(self._waiting_ends))
            except TurnIndexUnwritable:
                self._was_refused = True
                raise
            self._was_refused = False
            for turn_id in self._marked:
                self._waiting_ends.pop(turn_id, None)

    def _mark(self, turn_ids: Sequence[str]) -> None:
        """Inside a transaction: those of these that were ended say so, if they are in the index."""
        for turn_id in turn_ids:
            if turn_id not in self._waiting_ends:
                continue
            if self._writer.execute("UPDATE turns SET ended = 1 WHERE turn_id = ?", (turn_id,)).rowcount:
                self._marked.append(turn_id)

    @contextmanager
    def _refusals(self, *, at_start: bool = False) -> Generator[None]:
        """`at_start` the file itself may not be there yet, and whether waiting helps is asked."""
        try:
            yield
        except sqlite3.OperationalError as error:
            reason = reason_of(error, self._file.parent) if at_start else error
            if error.sqlite_errorcode & _PRIMARY_CODE not in _REFUSALS and not is_out_of_space(reason):
                raise
            raise TurnIndexUnwritable(f"{self._file}: {reason}; {FREE_SOME_SPACE}") from reason

    # ---- reading

    def positions(self) -> dict[int, int]:
        """The next offset to read of every partition that was read."""
        return {int(row[0]): int(row[1]) for row in self._rows("SELECT partition, next_offset FROM positions", ())}

    def count(self) -> int:
        """Number of turns."""
        return int(self._rows("SELECT count(*) FROM turns", ())[0][0])

    def by_answer(self, answer_key: str, session_id: str | None) -> list[KnownTurn]:
        """Turns that gave an answer, newest first; those of `session_id` are never crowded out."""
        turns = self._turns("answer_key = ? ORDER BY created_at DESC", (answer_key,), _MAX_CANDIDATES)
        if session_id is not None and len(turns) == _MAX_CANDIDATES:
            known = {turn.turn_id for turn in turns}
            where = "answer_key = ? AND session_id = ? ORDER BY created_at DESC"
            of_session = self._turns(where, (answer_key, session_id), _MAX_OF_SESSION)
            turns += [turn for turn in of_session if turn.turn_id not in known]
        return turns

    def by_session(self, principal: str, session_id: str) -> list[KnownTurn]:
        """Newest turns of a principal's session."""
        where = "session_id = ? AND principal = ? ORDER BY created_at DESC"
        return self._turns(where, (session_id, principal), _MAX_OF_SESSION)

    def by_hint(self, hint_key: str) -> list[KnownTurn]:
        """Newest turns with a hint."""
        return self._turns("session_hint = ? ORDER BY created_at DESC", (hint_key,), _MAX_OF_SESSION)

    def children_of(self, turn_id: str) -> list[KnownTurn]:
        """Newest children of a turn."""
        return self._turns("parent_turn_id = ? ORDER BY created_at DESC", (turn_id,), _MAX_OF_SESSION)

    def by_response(self, response_id: str) -> list[KnownTurn]:
        """Turns with a response id (one, unless something minted it twice)."""
        return self._turns("response_id = ? ORDER BY created_at DESC", (response_id,), _MAX_OF_SESSION)

    def by_rollout(self, principal: str, rollout_id: str) -> list[KnownTurn]:
        """Turns of a principal's rollout, newest first."""
        where = "rollout_id = ? AND principal = ? ORDER BY created_at DESC"
        return self._turns(where, (rollout_id, principal), _MAX_OF_ROLLOUT)

    def by_turn(self, turn_id: str) -> KnownTurn | None:
        """One turn."""
        return next(iter(self._turns("turn_id = ?", (turn_id,), 1)), None)

    def unfinished(self, limit: int) -> list[KnownTurn]:
        """Main turns that this gateway served, that have no child and were not ended: the oldest, in order."""
        where = (
            "own = 1 AND is_main = 1 AND ended = 0 AND NOT EXISTS"
            " (SELECT 1 FROM turns AS child WHERE child.parent_turn_id = turns.turn_id AND child.is_main = 1)"
            " ORDER BY created_at"
        )
        return self._turns(where, (), limit)

    def _turns(self, where: str, values: tuple[Any, ...], limit: int) -> list[KnownTurn]:
        rows = self._rows(f"SELECT entry FROM turns WHERE {where} LIMIT ?", (*values, limit))
        return [KnownTurn.from_event(TurnIndexEvent.model_validate_json(row[0])) for row in rows]

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._read_lock:
            return self._reader.execute(query, values).fetchall()

    @staticmethod
    def _connect(file: Path, cache_bytes: int) -> sqlite3.Connection:
        connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=30.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # The topic is the truth: after a power cut the last transactions are simply read again.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{max(64, cache_bytes // 2048)}")
        except BaseException:
            connection.close()
            raise
        return connection
