"""Removes published versions that no engine may still load. The tombstone goes first: a gate never meets a torn one.

What engines serve and load is read from `weights-applied`, what they are to serve from the pointer on `weights`: after
a rollback it names an old version, whether or not an engine has said so yet.
"""

from collections.abc import Collection

from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.clock import Clock
from clawstream.codec import decode
from clawstream.errors import BrokerUnavailable, BusError, DecodeError
from clawstream.log import Logger
from clawstream.weights.pointer import PointerFold
from clawstream.weights.retention import deletable
from schemas.events import WeightsAppliedEvent
from services.trainer.announcer import Announcer
from services.trainer.events import EventRecords
from services.trainer.ports import Store

_MAX_RECORDS = 1000
_WAIT_SECONDS = 0.2
_MAX_SILENT_POLLS = 50


class ArtefactRetention:
    """Follows `weights-applied` and the pointer, and sweeps after each publication. Used by one thread at a time."""

    def __init__(
        self,
        bus: Bus,
        applied_topic: str,
        *,
        policy: str,
        keep: int,
        needed: Collection[int] = (),
        store: Store,
        announcer: Announcer,
        records: EventRecords,
        clock: Clock,
        logger: Logger,
    ) -> None:
        """`needed` versions stay for ever."""
        self._bus = bus
        self._partitions = [TopicPartition(applied_topic, 0), TopicPartition(records.weights_topic, 0)]
        self._policy = policy
        self._keep = keep
        self._needed = frozenset(needed)
        self._store = store
        self._announcer = announcer
        self._records = records
        self._clock = clock
        self._logger = logger
        self._reader: Consumer | None = None
        self._engines: dict[str, WeightsAppliedEvent] = {}
        self._pointer = PointerFold(policy)

    def sweep(self, *, newest_version: int, base_version: int | None) -> None:
        """Removes what may go. A log that cannot be read, or heartbeats that say too little, keep everything."""
        try:
            self._follow()
        except BusError as error:
            self._logger.warning("no version is removed: weights-applied or weights cannot be read", error=str(error))
            return
        now = self._clock.now()
        alive = [event for event in self._engines.values() if event.expires_at > now]
        in_flight = {0, newest_version, *self._needed}
        in_flight.update(version for version in (base_version, self._pointer.version) if version is not None)
        in_flight.update(event.target_version for event in alive if event.target_version is not None)
        # An engine that does not answer was brought to a version before, and is sent to the pointer's when it is back.
        serving = {event.engine: event.weight_version for event in alive if event.state != "unreachable"}
        for version in deletable(self._store.versions(), serving, self._keep, in_flight):
            self._announcer.write([self._records.removed(version)], lambda: False)
            try:
                self._store.delete(version)
            except OSError as error:  # Only space is lost, and the next sweep tries again.
                self._logger.error("an old version cannot be removed", version=version, error=str(error))
            else:
                self._logger.info("removed an old version", version=version)

    def _follow(self) -> None:
        if self._reader is None:
            self._reader = self._bus.reader()
            self._reader.assign({partition: self._reader.watermarks(partition)[0] for partition in self._partitions})
        reader = self._reader
        ends = {partition: reader.watermarks(partition)[1] for partition in self._partitions}
        silent_polls = 0
        while behind := [partition for partition, end in ends.items() if (reader.position(partition) or 0) < end]:
            records = reader.consume(_MAX_RECORDS, _WAIT_SECONDS)
            silent_polls = 0 if records else silent_polls + 1
            if silent_polls > _MAX_SILENT_POLLS:
                raise BrokerUnavailable(f"{behind[0]} could not be read up to {ends[behind[0]]}")
            for record in records:
                self._apply(record)

    def _apply(self, record: Record) -> None:
        try:
            event = decode(record) if record.value is not None else None
        except DecodeError as error:
            self._logger.error("a record was skipped while looking for versions in use", error=str(error))
            return
        if isinstance(event, WeightsAppliedEvent) and event.policy == self._policy:
            self._engines[event.engine] = event
        elif record.topic == self._records.weights_topic:
            self._pointer.apply((record.key or b"").decode(errors="replace"), event)

    def close(self) -> None:
        """Releases the client."""
        if self._reader is not None:
            self._reader.close()
