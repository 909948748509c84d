"""What the audit remembers of the log: an SQLite file that is removed afterwards, so that memory stays bounded."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ROWS_AT_ONCE = 2000

TABLES = {
    "turns": "partition INT, offset INT, id TEXT, session TEXT, parent TEXT",
    "next_states": (
        "partition INT, offset INT, time INT, id TEXT, turn TEXT, turn_partition INT, turn_offset INT, session TEXT, "
        "skip TEXT"
    ),
    "scores": (
        "partition INT, offset INT, time INT, id TEXT, next_state TEXT, input_partition INT, input_offset INT, "
        "spec TEXT, live INT, session TEXT, turn TEXT"
    ),
    "samples": (
        "partition INT, offset INT, time INT, id TEXT, turn TEXT, input_partition INT, input_offset INT, spec TEXT, "
        "session TEXT"
    ),
    "tombstones": "partition INT, offset INT, turn TEXT",
    "ends": (
        "stage TEXT, partition INT, offset INT, kind TEXT, spec TEXT, live INT, reason TEXT, "
        "topic TEXT, at_partition INT, at_offset INT"
    ),
    "steps": (
        "at INT, time INT, id TEXT, lineage TEXT, policy TEXT, step INT, base INT, version INT, batch_uri TEXT, "
        "batch_sha256 TEXT, samples INT"
    ),
    "step_offsets": "at INT, lineage TEXT, policy TEXT, step INT, partition INT, offset INT",
    "listed": (
        "at INT, lineage TEXT, policy TEXT, kind TEXT, reason TEXT, sample TEXT, turn TEXT, partition INT, offset INT"
    ),
    "versions": "at INT, policy TEXT, version INT, base INT, manifest TEXT, removed INT",
    "pointers": "at INT, policy TEXT, version INT, rollback INT",
    "served": "policy TEXT, version INT, topic TEXT, partition INT, offset INT, PRIMARY KEY (policy, version)",
    "committed": "stage TEXT, partition INT, before INT, after INT, PRIMARY KEY (stage, partition)",
    "bounds": "topic TEXT, partition INT, start INT, end INT, PRIMARY KEY (topic, partition)",
    "horizons": "stage TEXT, partition INT, time INT, PRIMARY KEY (stage, partition)",
    "malformed": "topic TEXT, partition INT, offset INT, problem TEXT",
}
"""Columns of each table. `at` is the offset on a topic of one partition; `time` is in milliseconds since 1970."""

_INDEXES = (
    "turns (partition, offset)",
    "turns (id)",
    "next_states (partition, offset)",
    "next_states (id)",
    "scores (partition, offset)",
    "scores (id)",
    "samples (partition, offset)",
    "samples (turn)",
    "tombstones (turn)",
    "listed (sample)",
    "ends (stage, partition, offset)",
    "listed (partition, offset)",
    "listed (lineage, turn)",
    "steps (lineage, step)",
    "versions (policy, version)",
)


class Memory:
    """Rows are added in any order; `ask` sees them all once `seal` was called."""

    def __init__(self, file: Path) -> None:
        """`file` must not exist."""
        self._database = sqlite3.connect(file)
        # A scratch file: after a crash of the audit it is worth nothing.
        self._database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE;")
        for name, columns in TABLES.items():
            self._database.execute(f"CREATE TABLE {name} ({columns})")
        self._rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def add(self, table: str, *row: Any) -> None:
        """A row, with all columns in their order."""
        rows = self._rows[table]
        rows.append(row)
        if len(rows) >= _ROWS_AT_ONCE:
            self._write(table)

    def seal(self) -> None:
        """Nothing is added any more."""
        for table in list(self._rows):
            self._write(table)
        self._samples_end_scores()
        for number, index in enumerate(_INDEXES):
            self._database.execute(f"CREATE INDEX index_{number} ON {index}")
        self._database.execute("ANALYZE")
        self._database.commit()

    def _samples_end_scores(self) -> None:
        self._database.execute("CREATE INDEX scores_by_input ON scores (input_partition, input_offset, spec)")
        self._database.execute(
            """INSERT INTO ends
               SELECT 'teacher', scores.partition, scores.offset, 'output', NULL, 1, NULL, 'samples.v1',
                      samples.partition, samples.offset
               FROM samples JOIN scores USING (input_partition, input_offset, spec)"""
        )

    def put(self, table: str, *row: Any) -> None:
        """A row, also after `seal`."""
        self._database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def ask(self, query: str, **values: Any) -> Iterable[tuple[Any, ...]]:
        """The rows of a query, one after the other."""
        return self._database.execute(query, values)

    def number(self, query: str, **values: Any) -> int:
        """The one number of a query; 0 for NULL."""
        return int(self._database.execute(query, values).fetchone()[0] or 0)

    def close(self) -> None:
        """Releases the file, which the caller removes."""
        self._database.close()

    def _write(self, table: str) -> None:
        rows, self._rows[table] = self._rows[table], []
        if rows:
            places = ", ".join("?" * len(rows[0]))
            self._database.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({places})", rows)
