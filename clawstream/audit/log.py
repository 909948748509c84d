"""What the audit sees of a log: records up to fixed ends, and how far each stage's group had committed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

Partition = tuple[str, int]
"""A topic without namespace, and the number of one of its partitions."""
Committed = Mapping[str, Mapping[int, int]]
"""Stage to partition of its input to the offset that its group committed: everything before it is handled."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A committed record."""

    topic: str
    """Without namespace."""
    partition: int
    offset: int
    timestamp_milliseconds: int
    key: bytes | None
    value: bytes | None
    """None is a tombstone."""
    headers: tuple[tuple[str, bytes], ...] = ()

    def header(self, name: str) -> str | None:
        """The last value of a header as text, or None."""
        for found, value in reversed(self.headers):
            if found == name:
                return value.decode(errors="replace")
        return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment of the log. Positions were committed before the ends were looked up: what they promise is there."""

    committed: Committed
    starts: Mapping[Partition, int]
    """First offset that is retained."""
    ends: Mapping[Partition, int]
    """End for readers of committed records, with no transaction open before it."""
    taken_at_milliseconds: int
    """Since 1970 UTC."""


class AuditedLog(Protocol):
    """One namespace of a log."""

    namespace: str

    def snapshot(self) -> Snapshot:
        """Raises BusError, and OpenTransaction when one stays open."""
        ...

    def records(self, snapshot: Snapshot) -> Iterator[LogRecord]:
        """Every committed record between starts and ends; within a partition in order. Raises BusError."""
        ...

    def committed(self) -> Committed:
        """As of now. Raises BusError."""
        ...
