"""Sends dead letters back to the topic that they came from, each at most once.

One transaction writes inputs and the markers of their letters. All re-drives of a stage share a transactional id: one
that starts fences an earlier one that still runs, and then reads the markers, so no letter is sent back by both.
The input gets a new offset, behind everything that came since: its order is lost, and so is its age. It meets the very
same checks as at the first time, and may come here again, with a higher `redrive.count`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clawstream.bus.interface import Bus, OutgoingRecord
from clawstream.bus.overtaken import telling_who_overtook
from clawstream.bus.write_together import write_together
from clawstream.clock import Clock
from clawstream.dead_letters.letter import Letter, marker, original
from clawstream.dead_letters.reading import ValueReader, read_letters
from clawstream.dead_letters.selection import Selection
from clawstream.errors import OffsetNotRetained, RecordRejected
from clawstream.stages import Stage
from clawstream.topics import full_name

MAX_LETTERS_PER_TRANSACTION = 100
MAX_BYTES_PER_TRANSACTION = 16 * 1024 * 1024


@dataclass(slots=True)
class RedriveReport:
    """What became of the letters that were meant."""

    redriven: list[Letter] = field(default_factory=list[Letter])
    """Sent back now."""
    already: list[Letter] = field(default_factory=list[Letter])
    """Sent back earlier, and therefore not again."""
    refused: list[tuple[Letter, str]] = field(default_factory=list[tuple[Letter, str]])
    """Cannot be sent back, and why."""


class Redriver:
    """Sends letters of one stage back. For one run, on one thread."""

    def __init__(self, bus: Bus, namespace: str, stage: Stage, *, clock: Clock) -> None:
        self._bus = bus
        self._namespace = namespace
        self._stage = stage
        self._clock = clock
        self._report = RedriveReport()

    def preview(self, selection: Selection) -> RedriveReport:
        """What `run` would do, without writing anything. Raises BusError."""
        self._report.redriven = self._waiting(selection)
        return self._report

    def run(self, selection: Selection, progress: Callable[[int, int], None]) -> RedriveReport:
        """Sends back what is meant and waits. `progress` is told how many of how many are done.

        Raises Overtaken when another re-drive of the stage began meanwhile, BrokerUnavailable, TransactionAbortable and
        TransactionOutcomeUnknown: run it again then; what was sent back is known.
        """
        sender = _Sender(self._bus, f"{self._namespace}.dlq.{self._stage.name}")
        values = ValueReader(self._bus)
        try:
            # After the sender's initialisation: what an earlier re-drive had open is decided by now.
            waiting = deque(self._waiting(selection))
            total = len(waiting)
            while waiting:
                waiting.extendleft(reversed(self._send(sender, self._inputs(waiting, values))))
                progress(total - len(waiting), total)
        finally:
            values.close()
            sender.close()
        return self._report

    def _waiting(self, selection: Selection) -> list[Letter]:
        waiting: list[Letter] = []
        input_topic = full_name(self._namespace, self._stage.input_topic)
        for letter in selection.of(read_letters(self._bus, self._namespace, [self._stage])):
            if letter.redriven_at is not None:
                self._report.already.append(letter)
            elif letter.origin is None or letter.origin.topic != input_topic:
                self._report.refused.append((letter, f"its headers do not say where in {input_topic} it was"))
            else:
                waiting.append(letter)
        return waiting

    def _inputs(self, waiting: deque[Letter], values: ValueReader) -> list[tuple[Letter, OutgoingRecord]]:
        """Takes from `waiting` what one transaction may hold, with the records to be written."""
        batch: list[Letter] = []
        size_bytes = 0
        while waiting and len(batch) < MAX_LETTERS_PER_TRANSACTION and size_bytes < MAX_BYTES_PER_TRANSACTION:
            batch.append(waiting.popleft())
            size_bytes += batch[-1].value_bytes or 0
        inputs: list[tuple[Letter, OutgoingRecord]] = []
        for letter, found in [(letter, values.start(letter)) for letter in batch]:
            try:
                value = found.result().value
            except OffsetNotRetained as error:
                self._report.refused.append((letter, str(error)))
            else:
                inputs.append((letter, original(letter, value, now=self._clock.now())))
        return inputs

    def _send(self, sender: "_Sender", inputs: Sequence[tuple[Letter, OutgoingRecord]]) -> list[Letter]:
        """One transaction. When a record of it is refused nothing is written: the others are returned."""
        now = self._clock.now()
        try:
            sender.send([each for letter, record in inputs for each in (record, marker(letter, now=now))])
        except RecordRejected as error:
            self._report.refused += [(letter, str(error)) for letter, record in inputs if record is error.record]
            return [letter for letter, record in inputs if record is not error.record]
        self._report.redriven += [letter for letter, _ in inputs]
        return []


class _Sender:
    """A transactional producer that is replaced where that is needed."""

    def __init__(self, bus: Bus, transactional_id: str) -> None:
        self._bus = bus
        self._id = transactional_id
        self._producer = bus.transactional_producer(transactional_id)

    def send(self, records: Sequence[OutgoingRecord]) -> None:
        """All or nothing. After RecordRejected it may be used again. Raises Overtaken."""
        if not records:
            return
        try:
            with telling_who_overtook(
                f"{records[0].topic}: sending dead letters back",
                "another `clawstream dlq redrive` of this stage",
                then="What was sent back before is known: run it again, when the other one has ended",
            ):
                write_together(self._producer, records)
        except RecordRejected:
            self._replace()
            raise
        if self._producer.needs_replacement:
            self._replace()

    def close(self) -> None:
        self._producer.close()

    def _replace(self) -> None:
        """Its successor's initialisation aborts what is open."""
        self._producer.close()
        self._producer = self._bus.transactional_producer(self._id)
