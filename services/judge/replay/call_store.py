"""The ledger of model calls in a local SQLite file: a fold over `llm-calls` that can be thrown away.

A call is answered from it when the very same request was answered before: by its id, or, since another spec gives
another id, by next state, purpose, vote and model. So a replay that only adds votes pays for the added ones alone.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clawstream.bus.interface import Bus, Record
from clawstream.bus.ranges import Progress, no_progress, partitions_of, ranges_since, read_ranges
from clawstream.codec import decode_as
from clawstream.errors import DecodeError
from clawstream.topics import LLM_CALLS, full_name
from schemas.events import LlmCallEvent

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    call_id TEXT PRIMARY KEY, next_state_id TEXT NOT NULL, spec_hash TEXT NOT NULL, purpose TEXT NOT NULL,
    vote INTEGER NOT NULL, model TEXT NOT NULL, request_sha256 TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, seconds REAL NOT NULL, called_at REAL NOT NULL, event BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS calls_by_request ON calls (next_state_id, purpose, vote, request_sha256);
CREATE INDEX IF NOT EXISTS calls_by_spec ON calls (spec_hash);
CREATE TABLE IF NOT EXISTS positions (
    topic TEXT, partition INTEGER, next_offset INTEGER, PRIMARY KEY (topic, partition)
);
"""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What the calls of one spec cost."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    """Of all answers one after another: each of one call counts the call's time."""


class CallStore:
    """Used by one thread at a time. May be closed and opened again; a killed process leaves it whole."""

    def __init__(self, file: Path) -> None:
        """Makes the file when there is none."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        """Releases the file."""
        self._database.close()

    def catch_up(
        self, bus: Bus, namespace: str, since_milliseconds: int | None, progress: Progress = no_progress
    ) -> int:
        """Reads what the log has gained since the last time, at first from `since_milliseconds` on.

        Returns how many entries that were. An entry that cannot be decoded is passed over. Raises BusError.
        """
        topic = full_name(namespace, LLM_CALLS)
        reader = bus.reader()
        count = 0
        try:
            ranges = ranges_since(reader, partitions_of(bus, topic), since_milliseconds)
            known = dict(
                self._database.execute("SELECT partition, next_offset FROM positions WHERE topic = ?", (topic,))
            )
            ranges = {
                partition: (min(max(start, known.get(partition.partition, start)), end), end)
                for partition, (start, end) in ranges.items()
            }
            self._database.execute("BEGIN")
            for record in read_ranges(reader, ranges, progress):
                count += self._take(record)
            # The position and what was read up to it are one transaction: a kill in between repeats the reading.
            self._database.executemany(
                "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
                [(topic, partition.partition, end) for partition, (_, end) in ranges.items()],
            )
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        finally:
            reader.close()
        return count

    def add(self, events: Sequence[LlmCallEvent]) -> None:
        """Takes calls in. The same id replaces: the ledger holds one answer for each."""
        self._database.executemany(
            "INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    event.call_id,
                    event.next_state_id,
                    event.judge_spec_hash,
                    event.purpose,
                    event.vote,
                    event.model,
                    event.request_sha256,
                    event.prompt_tokens,
                    event.completion_tokens,
                    event.seconds,
                    event.called_at.timestamp(),
                    event.model_dump_json(),
                )
                for event in events
            ],
        )

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        """The call with this id, if it answered this request."""
        return self._one("call_id = ? AND request_sha256 = ?", (call_id, request_sha256))

    def find_same(
        self, *, next_state_id: str, purpose: str, vote: int, model: str, request_sha256: str
    ) -> LlmCallEvent | None:
        """The oldest call of any spec that asked this model the very same."""
        return self._one(
            "next_state_id = ? AND purpose = ? AND vote = ? AND request_sha256 = ? AND model = ? "
            "ORDER BY called_at LIMIT 1",
            (next_state_id, purpose, vote, request_sha256, model),
        )

    def costs(self, spec_hash: str, since_seconds: float = 0.0) -> CallCosts:
        """Of the calls that were made for a spec, from that time (since 1970 UTC) on."""
        row = self._database.execute(
            "SELECT count(*), total(prompt_tokens), total(completion_tokens), total(seconds) FROM calls "
            "WHERE spec_hash = ? AND called_at >= ?",
            (spec_hash, since_seconds),
        ).fetchone()
        return CallCosts(int(row[0]), int(row[1]), int(row[2]), float(row[3]))

    def _take(self, record: Record) -> int:
        if record.value is None:
            return 0
        try:
            self.add([decode_as(record, LlmCallEvent)])
        except DecodeError:
            return 0
        return 1

    def _one(self, condition: str, values: tuple[str | int, ...]) -> LlmCallEvent | None:
        row = self._database.execute(f"SELECT event FROM calls WHERE {condition}", values).fetchone()
        return None if row is None else LlmCallEvent.model_validate_json(row[0])
