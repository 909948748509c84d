"""How far an outbox is on the log: the position is on the log too, written by the transaction that drained."""

from clawstream.bus.interface import Bus, OutgoingRecord, TopicPartition
from clawstream.bus.ranges import partitions_of, read_ranges
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode
from clawstream.ids import derive
from schemas.events import OutboxPositionEvent

_FIRST_WINDOW = 256
"""Records looked at from the end of the topic; ten times more each time that the gateway is not among them."""
_SILENCE_SECONDS = 10.0
"""How long the log may be silent in mid-reading. Whoever asks begins anew."""


def position_record(
    *, topic: str, gateway: str, source: str, outbox_id: str, next_sequence: int, clock: Clock
) -> OutgoingRecord:
    """The record that says that everything before `next_sequence` is on the log."""
    event = OutboxPositionEvent(
        gateway=gateway, outbox_id=outbox_id, next_sequence=next_sequence, written_at=clock.now()
    )
    event_id = derive("outbox-position", outbox_id, next_sequence)
    return encode(event, topic=topic, key=gateway, event_id=event_id, source=source)


def read_position(bus: Bus, topic: str, gateway: str) -> OutboxPositionEvent | None:
    """The newest position of a gateway, or None when it has none.

    Call it after `transactional_producer` returned: only then is every earlier transaction of this gateway decided.
    Raises BusError, or DecodeError for a position that cannot be read.
    """
    found = [
        position
        for partition in partitions_of(bus, topic)
        if (position := _newest(bus, partition, gateway)) is not None
    ]
    return max(found, key=lambda position: position.written_at, default=None)


def _newest(bus: Bus, partition: TopicPartition, gateway: str) -> OutboxPositionEvent | None:
    reader = bus.reader()
    try:
        first, end = reader.watermarks(partition)
        window = _FIRST_WINDOW
        while first < end:
            start = max(first, end - window)
            newest: OutboxPositionEvent | None = None
            for record in read_ranges(reader, {partition: (start, end)}, silence_seconds=_SILENCE_SECONDS):
                if record.key == gateway.encode() and record.value is not None:
                    newest = decode_as(record, OutboxPositionEvent)
            if newest is not None or start == first:
                return newest
            window *= 10
        return None
    finally:
        reader.close()
