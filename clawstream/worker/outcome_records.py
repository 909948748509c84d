"""From outcomes to records, and what to do about a record that its topic refuses."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clawstream.bus.interface import OutgoingRecord
from clawstream.clock import Clock
from clawstream.codec import encode, header
from clawstream.dead_letters.letter import REDRIVE_COUNT
from clawstream.errors import FatalBusError, RecordRejected
from clawstream.ids import derive
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.worker.dead_letters import DeadLetterLimit, dead_letter_record, installed_version
from clawstream.worker.outcomes import DeadLetter, Outcome, Output, Skip
from clawstream.worker.tracker import Prefix, Ticket
from schemas.events import SkippedInputsEvent

_RESULTS: Final[Mapping[type[Outcome], str]] = {Output: "output", Skip: "skip", DeadLetter: "dead_letter"}


class OutcomeRecords:
    """Makes the records of a transaction."""

    def __init__(self, *, dead_letter_topic: str, skips: "SkipRecords | None", group: str, clock: Clock) -> None:
        """Without `skips`, skipped inputs leave no record."""
        self._dead_letter_topic = dead_letter_topic
        self._skips = skips
        self._group = group
        self._clock = clock
        self._version = installed_version()

    def of(self, prefixes: Sequence[Prefix]) -> list[tuple[OutgoingRecord, Ticket]]:
        """Every record to write, in order, with the input that it belongs to."""
        return [pair for prefix in prefixes for pair in self._of(prefix)]

    def _of(self, prefix: Prefix) -> Iterator[tuple[OutgoingRecord, Ticket]]:
        for ticket, outcome in prefix.results:
            if isinstance(outcome, Output):
                for record in outcome.records:
                    yield record, ticket
            elif isinstance(outcome, DeadLetter):
                record = dead_letter_record(
                    ticket.record,
                    outcome,
                    topic=self._dead_letter_topic,
                    group=self._group,
                    service_version=self._version,
                    now=self._clock.now(),
                )
                yield record, ticket
        skipped = [(ticket, outcome) for ticket, outcome in prefix.results if isinstance(outcome, Skip)]
        if self._skips is not None and skipped:
            yield self._skips.record(skipped), skipped[0][0]

    def instead_of_refused(
        self, error: RecordRejected, records: Sequence[tuple[OutgoingRecord, Ticket]]
    ) -> tuple[Ticket, DeadLetter]:
        """The input whose record was refused, and its new outcome.

        An output that does not fit makes a dead letter; a dead letter that does not fit loses its value.
        Raises FatalBusError when even that is refused.
        """
        refused, ticket = next((record, ticket) for record, ticket in records if record is error.record)
        if refused.topic != self._dead_letter_topic:
            return ticket, DeadLetter("oversize", error)
        if refused.value is not None:
            return ticket, DeadLetter("oversize", error, without_value=True)
        raise FatalBusError(f"{ticket.record}: not even its headers fit into {self._dead_letter_topic}") from error


@dataclass(frozen=True, slots=True)
class SkipRecords:
    """Makes the record that says which inputs of a partition were skipped."""

    topic: str
    """Full name."""
    stage: str
    """Who skips: a consumer group's inputs are skipped by one stage."""
    source: str
    """The process: `judge/judge-0`."""

    def record(self, skipped: Sequence[tuple[Ticket, Skip]]) -> OutgoingRecord:
        """For some inputs, at least one, of one partition, in the order of the log. Its own partition is theirs."""
        first = skipped[0][0].record
        offsets_by_reason: defaultdict[str, list[int]] = defaultdict(list)
        for ticket, skip in skipped:
            offsets_by_reason[skip.reason].append(ticket.record.offset)
        return encode(
            SkippedInputsEvent(
                stage=self.stage,
                topic=first.topic,
                partition=first.partition,
                offsets_by_reason=dict(offsets_by_reason),
            ),
            topic=self.topic,
            key=self.stage,
            event_id=derive("skipped-inputs", self.stage, first.topic, first.partition, first.offset),
            source=self.source,
            partition=first.partition,
        )


class OutcomeCounter:
    """Counts what was committed."""

    def __init__(self, *, metrics: Metrics, logger: Logger, limit: DeadLetterLimit) -> None:
        self._metrics = metrics
        self._log = logger
        self._limit = limit

    def count(self, committed: Sequence[tuple[Ticket, Outcome]]) -> None:
        """Raises TooManyDeadLetters, after all are counted."""
        numbers: Counter[tuple[str, str]] = Counter()
        for ticket, outcome in committed:
            if header(ticket.record.headers, REDRIVE_COUNT) is not None:
                self._metrics.increment("redriven_inputs_total", result=_RESULTS[type(outcome)])
            if isinstance(outcome, DeadLetter):
                numbers["dead_letter", outcome.reason] += 1
                self._metrics.increment("dead_letters_total", reason=outcome.reason)
                self._log.warning(
                    "dead letter", record=str(ticket.record), reason=outcome.reason, error=str(outcome.error)
                )
            elif isinstance(outcome, Skip):
                numbers["skip", outcome.reason] += 1
            else:
                numbers["output", ""] += 1
        for (result, reason), number in numbers.items():
            self._metrics.increment("worker_inputs_total", number, result=result, reason=reason)
        for _, outcome in committed:
            self._limit.add(isinstance(outcome, DeadLetter))
