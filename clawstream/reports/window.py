"""Events of a span of time, read without a group: bounded, and without disturbing anybody."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.bus.ranges import partitions_of, read_ranges
from clawstream.codec import decode
from clawstream.errors import ForgottenContent
from schemas.events import Event

_SILENCE_SECONDS = 10.0
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
    """Every event of `topics` (full names) in the window that is not forgotten, one after another: nothing is kept.

    Raises BrokerUnavailable, BusError for a topic that does not exist, and DecodeError for a foreign record.
    """
    for partition in [partition for topic in topics for partition in partitions_of(bus, topic)]:
        for record in _records(bus, partition, window):
            if record.value is not None and window.holds(record):
                try:
                    yield decode(record)
                except ForgottenContent:
                    continue


def _records(bus: Bus, partition: TopicPartition, window: Window) -> Iterator[Record]:
    reader = bus.reader()
    try:
        first, stable_end = reader.watermarks(partition)
        position = max(first, reader.offset_for_time(partition, _milliseconds(window.since)))
        # Producers' clocks differ: a record of the window may stand after one beyond it, but not by an hour.
        later = _milliseconds(window.until + _CLOCKS_DIFFER)
        end = min(stable_end, reader.offset_for_time(partition, later))
        yield from read_ranges(reader, {partition: (position, end)}, silence_seconds=_SILENCE_SECONDS)
    finally:
        reader.close()


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
