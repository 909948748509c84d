"""The thread that moves the outbox onto the log, in order, each entry exactly once.

One drain is one transaction (`batch_writer`), which ends with the outbox position. A transaction whose end is unknown
is decided by the log: a new producer is initialised, which ends the old transaction, and the position on the log says
whether it was committed.

Who is fenced may have lost its name to another process, and then ends. But a broker also fences a producer whose
transaction was open for longer than its timeout; and after an outage the initialisation of an earlier producer of ours,
which had been given up, may arrive late and fence the one that took its place. The position on the log tells these
apart: every process writes its outbox's identity there before it writes anything else.
"""

import threading
from collections.abc import Sequence

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, TransactionalProducer
from clawstream.clock import Clock
from clawstream.errors import BusError, FatalBusError, Fenced, NameTaken, OutboxError, RecordRejected
from clawstream.log import Logger
from clawstream.metrics import Metrics
from services.gateway.batch_writer import BatchWriter, PreparedBatch, UnknownPlace, made_record
from services.gateway.index_follower import IndexFollower
from services.gateway.outbox import Outbox, OutboxEntry
from services.gateway.outbox_entries import TurnEntry, decode_entry
from services.gateway.outbox_position import read_position
from services.gateway.turn_index import TurnIndex

_MAX_ENTRIES = 500
_MAX_BATCH_BYTES = 8 * 1024 * 1024
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
_WAIT_SECONDS = 0.5


class OutboxDrain:
    """Owns the transactional producer. `start`, then `stop`."""

    def __init__(
        self,
        *,
        bus: Bus,
        outbox: Outbox,
        index: TurnIndex,
        follower: IndexFollower,
        writer: BatchWriter,
        index_topic: str,
        outbox_topic: str,
        gateway: str,
        transactional_id: str,
        linger_seconds: float,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """`gateway` is the key of the position in `outbox_topic`.

        `linger_seconds`: how long a drain waits for company when there is little to do.
        """
        self._bus = bus
        self._outbox = outbox
        self._index = index
        self._follower = follower
        self._writer = writer
        self._index_topic = index_topic
        self._outbox_topic = outbox_topic
        self._gateway = gateway
        self._transactional_id = transactional_id
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._producer: TransactionalProducer | None = None
        self._index_ends: dict[int, int] = {}
        """Where the partitions of the index ended when the producer had decided all earlier transactions."""
        self._position = 0
        self._name_in_doubt = False
        """We were fenced: it is not known yet whether another process has our name."""
        self._stopping = threading.Event()
        self._drained = threading.Condition()
        self._oversized: set[int] = set()
        self.failure: Exception | None = None
        """Why the thread gave up, if it did: the process should end."""
        self._thread = threading.Thread(target=self._run, name="outbox-drain", daemon=True)

    def start(self) -> None:
        """Starts draining."""
        self._thread.start()

    def stop(self, drain_seconds: float) -> int:
        """Drains for at most so long, ends, and returns how many entries are left in the outbox."""
        self.wait_until_drained(drain_seconds)
        self._stopping.set()
        self._outbox.interrupt()
        if self._thread.is_alive():
            self._thread.join()
        return self._outbox.undrained_entries

    def wait_until_drained(self, timeout_seconds: float) -> bool:
        """Whether everything that is in the outbox now is on the log, waiting for it if need be."""
        target = self._outbox.accepted_sequence
        with self._drained:
            return self._drained.wait_for(
                lambda: self._position >= target or not self._thread.is_alive(), timeout_seconds
            ) and (self._position >= target)

    # ---- the thread

    def _run(self) -> None:
        retry_seconds = _FIRST_RETRY_SECONDS
        try:
            while not self._stopping.is_set():
                try:
                    self._drain_while_it_works()
                    retry_seconds = _FIRST_RETRY_SECONDS
                except RecordRejected as error:
                    self._abandon()
                    self._set_aside(error)
                except (NameTaken, FatalBusError):
                    raise
                except Fenced as error:
                    self._logger.warning("fenced; looking whether another process has our name", error=str(error))
                    self._abandon()
                    self._name_in_doubt = True
                    self._stopping.wait(retry_seconds)
                    retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)
                except BusError as error:
                    self._logger.warning(
                        "the outbox cannot be drained; chat goes on",
                        error=str(error),
                        entries=self._outbox.undrained_entries,
                        retry_seconds=retry_seconds,
                    )
                    self._abandon()
                    self._stopping.wait(retry_seconds)
                    retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)
        except Exception as error:
            # The boundary of this thread: the process is told, and ends.
            self.failure = error
            self._logger.error("the outbox is not drained any more", error=str(error), kind=type(error).__name__)
        finally:
            self._abandon()
            with self._drained:
                self._drained.notify_all()

    def _drain_while_it_works(self) -> None:
        producer = self._ready_producer()
        while not self._stopping.is_set():
            if not self._outbox.wait_for(self._position, _WAIT_SECONDS):
                continue
            if self._linger_seconds and self._outbox.undrained_entries < _MAX_ENTRIES:
                self._stopping.wait(self._linger_seconds)
            batch = self._outbox.read(self._position, max_entries=_MAX_ENTRIES, max_bytes=_MAX_BATCH_BYTES)
            started = self._clock.monotonic_seconds()
            prepared = self._prepared(batch)
            if prepared is None:
                continue
            places = self._writer.write(producer, prepared, index_partitions=len(self._index_ends))
            for turn_id, place in places.items():
                self._index.placed(turn_id, place)
            self._moved_to(prepared.next_sequence)
            self._metrics.observe("outbox_drain_seconds", self._clock.monotonic_seconds() - started)
            if producer.needs_replacement:
                self._abandon()
                producer = self._ready_producer()

    def _prepared(self, batch: Sequence[OutboxEntry]) -> PreparedBatch | None:
        """The batch, ready to be written; waits for the index if need be. None when there is nothing, or at the end."""
        told = False
        while batch and not self._stopping.is_set():
            try:
                return self._writer.prepare(batch, without=self._oversized, index_ends=self._index_ends)
            except UnknownPlace as error:
                if not told:
                    self._logger.info("waiting for a turn's place on the log", reason=str(error))
                    told = True
                self._follower.wait_until_read(self._index_ends, _WAIT_SECONDS)
        return None

    def _ready_producer(self) -> TransactionalProducer:
        """A new producer has decided all earlier transactions, so that the position on the log is the truth."""
        if self._producer is not None:
            return self._producer
        if self._name_in_doubt:
            self._check_that_the_name_is_ours()
        producer = self._bus.transactional_producer(self._transactional_id)
        try:
            if self._name_in_doubt:
                self._check_that_the_name_is_ours()  # Again: until now the other process could write.
            self._index_ends = self._ends_of_index()
            if not self._take_position_from_log():
                self._writer.write_position(producer, self._position)
        except BaseException:
            producer.close()
            raise
        self._name_in_doubt = False
        self._producer = producer
        return producer

    def _check_that_the_name_is_ours(self) -> None:
        """Raises NameTaken when another process has written its outbox's identity under our name."""
        on_log = read_position(self._bus, self._outbox_topic, self._gateway)
        if on_log is not None and on_log.outbox_id != self._outbox.outbox_id:
            raise NameTaken(
                f"transactional id {self._transactional_id}: outbox {on_log.outbox_id} took the name {self._gateway}; "
                "give every gateway a name of its own"
            )

    def _take_position_from_log(self) -> bool:
        """Whether the log knows this outbox."""
        on_log = read_position(self._bus, self._outbox_topic, self._gateway)
        position = self._outbox.first_sequence
        is_known = on_log is not None and on_log.outbox_id == self._outbox.outbox_id
        if on_log is not None and is_known:
            if on_log.next_sequence > self._outbox.next_sequence:
                raise OutboxError(
                    f"the log holds entries of this outbox up to {on_log.next_sequence}, the disk only up to "
                    f"{self._outbox.next_sequence}: an old copy of the outbox was restored; remove its folder"
                )
            position = max(position, on_log.next_sequence)
        self._moved_to(position)
        return is_known

    def _set_aside(self, error: RecordRejected) -> None:
        """A record larger than its topic allows can never be drained: it must not hold up what comes after it."""
        for entry in self._outbox.read(self._position, max_entries=_MAX_ENTRIES, max_bytes=_MAX_BATCH_BYTES):
            if entry.sequence not in self._oversized and made_record(entry, error.record):
                self._oversized.add(entry.sequence)
                self._forget(entry)
                self._logger.error("an outbox entry is dropped", sequence=entry.sequence, error=str(error))
                return
        raise OutboxError(f"the log refuses a record that no outbox entry made: {error}") from error

    def _forget(self, entry: OutboxEntry) -> None:
        """Nobody will ever read a dropped turn back from the log: the index would hold it for good."""
        decoded = decode_entry(entry.payload, where=f"outbox entry {entry.sequence}")
        is_turn = isinstance(decoded, TurnEntry)
        if isinstance(decoded, TurnEntry):
            self._index.discard(decoded.known.turn_id)
        self._metrics.increment("outbox_entries_dropped_total", kind="turn" if is_turn else "next_state")

    def _moved_to(self, position: int) -> None:
        with self._drained:
            self._position = position
            self._outbox.release(position)  # whoever waits for the drain may count on the space
            self._drained.notify_all()
        self._oversized = {sequence for sequence in self._oversized if sequence >= position}
        self._metrics.set("outbox_entries", self._outbox.undrained_entries)
        self._metrics.set("outbox_bytes", self._outbox.undrained_bytes)

    def _ends_of_index(self) -> dict[int, int]:
        reader = LogReader(self._bus, [self._index_topic])
        try:
            return {partition.partition: end for partition, end in reader.ends().items()}
        finally:
            reader.close()

    def _abandon(self) -> None:
        """Closes the producer. What it left open is aborted when its successor is initialised."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
