"""Events of a span of time, read without a group: bounded, and without disturbing anybody."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.codec import decode
from clawstream.errors import BrokerUnavailable
from schemas.events import Event

_MAX_RECORDS = 500
_WAIT_SECONDS = 0.5
_MAX_SILENT_POLLS = 20
_CLOCKS_DIFFER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time."""

    since: datetime
    """The first moment."""
    until: datetime
    """After the last moment."""

    def holds(self, record: Record) -> bool:
        """Whether a record was made then."""
        return _milliseconds(self.since) <= record.timestamp_milliseconds < _milliseconds(self.until)

    def __str__(self) -> str:
        return f"{self.since:%Y-%m-%d %H:%M} to {self.until:%Y-%m-%d %H:%M}"


def events_within(bus: Bus, topics: Sequence[str], window: Window) -> Iterator[Event]:
    """Every event of `topics` (full names) in the window, one after another: nothing is kept.

    Raises BrokerUnavailable, BusError for a topic that does not exist, and DecodeError for a foreign record.
    """
    admin = bus.admin()
    try:
        partitions = [partition for topic in topics for partition in admin.partitions(topic)]
    finally:
        admin.close()
    for partition in partitions:
        for record in _records(bus, partition, window):
            if record.value is not None and window.holds(record):
                yield decode(record)


def _records(bus: Bus, partition: TopicPartition, window: Window) -> Iterator[Record]:
    reader = bus.reader()
    try:
        first, stable_end = reader.watermarks(partition)
        position = max(first, reader.offset_for_time(partition, _milliseconds(window.since)))
        # Producers' clocks differ: a record of the window may stand after one beyond it, but not by an hour.
        later = _milliseconds(window.until + _CLOCKS_DIFFER)
        end = min(stable_end, reader.offset_for_time(partition, later))
        reader.assign({partition: position})
        silent_polls = 0
        while position < end:
            records = reader.consume(_MAX_RECORDS, _WAIT_SECONDS)
            yield from records
            position = reader.position(partition) or position
            silent_polls = 0 if records else silent_polls + 1
            if silent_polls > _MAX_SILENT_POLLS:
                raise BrokerUnavailable(f"{partition} could not be read from {position} up to {end}")
    finally:
        reader.close()


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
