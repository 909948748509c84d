"""Partitions in memory as Kafka keeps them: transaction markers take offsets, open transactions hide what follows."""

from dataclasses import dataclass, field
from enum import StrEnum

from clawstream.bus.interface import Record


class TransactionState(StrEnum):
    """What became of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction of one producer. Compared by identity."""

    state: TransactionState = TransactionState.OPEN


@dataclass(slots=True)
class _Entry:
    record: Record | None
    """None is a marker: the end of a transaction."""
    transaction: Transaction | None


@dataclass(slots=True)
class PartitionLog:
    """One partition. The caller holds a lock."""

    entries: list[_Entry] = field(default_factory=list[_Entry])
    first_offset: int = 0
    """Offset of `entries[0]`: what was before it is not retained."""
    open_transactions: dict[Transaction, int] = field(default_factory=dict[Transaction, int])
    """Offset of the first record of each transaction that has not ended."""

    def append(self, record: Record, transaction: Transaction | None) -> None:
        """Appends at `end_offset`, which must be the record's own offset."""
        if transaction is not None:
            self.open_transactions.setdefault(transaction, self.end_offset)
        self.entries.append(_Entry(record, transaction))

    def append_marker(self, transaction: Transaction) -> None:
        """The end of a transaction takes an offset too."""
        del self.open_transactions[transaction]
        self.entries.append(_Entry(None, None))

    @property
    def end_offset(self) -> int:
        """The offset after the last entry (high watermark)."""
        return self.first_offset + len(self.entries)

    @property
    def last_stable_offset(self) -> int:
        """The first offset that a read_committed reader may not read yet."""
        return min(self.open_transactions.values(), default=self.end_offset)

    def read(self, offset: int, max_records: int) -> tuple[list[Record], int]:
        """Committed records from `offset` on, and the offset to read next (past markers and aborted records)."""
        stable = self.last_stable_offset
        records: list[Record] = []
        while offset < stable and len(records) < max_records:
            entry = self.entries[offset - self.first_offset]
            offset += 1
            visible = entry.transaction is None or entry.transaction.state is TransactionState.COMMITTED
            if entry.record is not None and visible:
                records.append(entry.record)
        return records, offset

    def offset_for_time(self, timestamp_milliseconds: int) -> int:
        """Offset of the first record that is so old or younger, else the end; committed or not, as Kafka has it."""
        for offset, entry in enumerate(self.entries, start=self.first_offset):
            if entry.record is not None and entry.record.timestamp_milliseconds >= timestamp_milliseconds:
                return offset
        return self.last_stable_offset

    def truncate_before(self, offset: int) -> None:
        """What retention does."""
        dropped = min(max(offset - self.first_offset, 0), len(self.entries))
        del self.entries[:dropped]
        self.first_offset += dropped
