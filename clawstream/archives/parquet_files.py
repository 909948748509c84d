# pyright: basic
# Reason: pyarrow is untyped; this file is a thin adapter around it.
"""Records in Parquet: one row a record, every byte of it kept, read and written in bounded memory.

Columns: `offset`, `timestamp` (milliseconds since 1970 UTC), `key`, `value` (null is a tombstone) and `headers`, a list
of name and value. Row groups are small, so that a reader never holds more than one.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Final

from clawstream.bus.interface import Record
from clawstream.errors import MissingDependencyError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingDependencyError("archives need the package pyarrow: pip install 'clawstream[archives]'") from error

_ROW_GROUP_BYTES: Final = 8 * 1024 * 1024
_ROW_GROUP_ROWS: Final = 10_000
_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(
            "headers",
            pa.list_(pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.binary())])),
            nullable=False,
        ),
    ]
)


class RecordFile:
    """Writes one file. `close` makes it whole."""

    def __init__(self, file: Path) -> None:
        self._writer = pq.ParquetWriter(file, _SCHEMA, compression="zstd")
        self._rows: list[dict[str, object]] = []
        self._pending_bytes = 0
        self.rows = 0
        """Rows so far."""
        self.content_bytes = 0
        """Bytes of keys, values and headers so far, before compression."""

    def append(self, record: Record) -> None:
        """Adds a record."""
        size = (
            len(record.key or b"")
            + len(record.value or b"")
            + sum(len(name) + len(value or b"") for name, value in record.headers)
        )
        self._rows.append(
            {
                "offset": record.offset,
                "timestamp": record.timestamp_milliseconds,
                "key": record.key,
                "value": record.value,
                "headers": [{"name": name, "value": value} for name, value in record.headers],
            }
        )
        self.rows += 1
        self.content_bytes += size
        self._pending_bytes += size
        if self._pending_bytes >= _ROW_GROUP_BYTES or len(self._rows) >= _ROW_GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """Writes what is pending and the footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
            self._rows, self._pending_bytes = [], 0


def read_records(file: Path, topic: str, partition: int) -> Generator[Record]:
    """The records of one file, in order, as they were read. One row group is in memory at a time."""
    with pq.ParquetFile(file) as parquet:
        for group in range(parquet.num_row_groups):
            for row in parquet.read_row_group(group).to_pylist():
                yield Record(
                    topic=topic,
                    partition=partition,
                    offset=row["offset"],
                    key=row["key"],
                    value=row["value"],
                    headers=tuple((each["name"], each["value"]) for each in row["headers"]),
                    timestamp_milliseconds=row["timestamp"],
                )


class OffsetFile:
    """Writes where records of one partition went: `old_offset`, `new_offset`."""

    def __init__(self, file: Path) -> None:
        self._schema = pa.schema([pa.field("old_offset", pa.int64()), pa.field("new_offset", pa.int64())])
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._old: list[int] = []
        self._new: list[int] = []

    def append(self, old_offset: int, new_offset: int) -> None:
        """Adds a record's places."""
        self._old.append(old_offset)
        self._new.append(new_offset)
        if len(self._old) >= _ROW_GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """Writes what is pending and the footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._old:
            self._writer.write_table(pa.table({"old_offset": self._old, "new_offset": self._new}, schema=self._schema))
            self._old, self._new = [], []


def read_offsets(file: Path) -> dict[int, int]:
    """Old offset to new offset of one partition."""
    table = pq.read_table(file)
    return dict(zip(table["old_offset"].to_pylist(), table["new_offset"].to_pylist(), strict=True))
