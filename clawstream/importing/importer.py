"""Writes imported conversations to the log: each of them whole or not at all, and never twice.

Turns, next states and a record in `imports` are written in one transaction. What the records say was imported is
passed over, so that a run that was killed goes on where it stopped, and a run after a finished one changes nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from clawstream import ids
from clawstream.bus.interface import Bus, Delivery, OutgoingRecord, TransactionalProducer
from clawstream.bus.ranges import read_once, topic_ranges
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode
from clawstream.errors import ContractError, DecodeError
from clawstream.forgetting.forget import read_forgotten
from clawstream.forgetting.forgotten import Forgotten
from clawstream.importing.conversations import LoggedConversation, LoggedTurn, is_evidence, turns_of
from clawstream.importing.scoring import ScoredTurn
from clawstream.topics import IMPORTS, NEXT_STATES, TURNS, full_name
from schemas.events import ImportedConversationEvent, NextStateEvent
from schemas.events.base import RecordReference
from schemas.events.forgotten import ForgottenKind
from schemas.events.next_state import NextStateKind

_SOURCE: Final = "cli/import"
_FLUSH_SECONDS: Final = 15.0
_MAX_TRANSACTION_BYTES: Final = 8 * 1024 * 1024


class Scorer(Protocol):
    """`clawstream.importing.scoring.TurnScorer`."""

    async def score(self, conversation: LoggedConversation, turns: Sequence[LoggedTurn]) -> list[ScoredTurn]:
        """The turns as events."""
        ...


@dataclass(slots=True)
class ImportReport:
    """What became of every conversation of the log."""

    conversations: int = 0
    """Imported by this run."""
    turns: int = 0
    """Turns that this run wrote."""
    next_states: int = 0
    """Next states that this run wrote, without those that say that nothing followed."""
    already: int = 0
    """Conversations that were imported before."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Reason to number of conversations that were not imported: `changed`, `no_answer`, `forgotten`, `unreadable`,
    `cannot_be_rendered`."""
    untrainable: Counter[str] = field(default_factory=Counter[str])
    """Reason to number of turns that are on the log and will not be trained."""
    problems: list[str] = field(default_factory=list[str])
    """What is wrong with conversations that were skipped: the first hundred."""


Source = Iterable[LoggedConversation | DecodeError]
"""Conversations in the order of the log; an error stands for one that could not be read."""

_MAX_PROBLEMS = 100


class Importer:
    """One run. Two runs at once fence each other."""

    def __init__(
        self, bus: Bus, namespace: str, scorer: Scorer, *, principal: str, concurrent: int, clock: Clock
    ) -> None:
        """`principal`: of conversations whose log names none. `concurrent`: conversations that are scored at a time."""
        self._bus = bus
        self._namespace = namespace
        self._scorer = scorer
        self._principal = principal
        self._concurrent = concurrent
        self._clock = clock
        self.report = ImportReport()

    async def run(self, source: Source, progress: Callable[[int], None] = lambda _: None) -> ImportReport:
        """Imports everything. `progress` is told how many conversations were dealt with.

        Raises BusError and EngineError; then run it again: what was written is passed over.
        """
        producer = await asyncio.to_thread(self._bus.transactional_producer, f"{self._namespace}.import")
        try:
            # After the producer: it ended what an earlier run left open.
            done = await asyncio.to_thread(self._imported)
            forgotten = await asyncio.to_thread(read_forgotten, self._bus, self._namespace)
            conversations = iter(source)
            while chunk := list(islice(conversations, self._concurrent)):
                wanted: list[LoggedConversation] = []
                for each in chunk:
                    if isinstance(each, DecodeError):
                        self._skip("unreadable", str(each))
                    elif self._is_wanted(each, done, forgotten):
                        done[self._session_id(each)] = each.content_sha256
                        wanted.append(each)
                scored = await asyncio.gather(*(self._scored(each) for each in wanted))
                ready = [(each, turns) for each, turns in zip(wanted, scored, strict=True) if turns]
                for batch in _batches(ready):
                    if producer.needs_replacement:
                        await asyncio.to_thread(producer.close)
                        producer = await asyncio.to_thread(
                            self._bus.transactional_producer, f"{self._namespace}.import"
                        )
                    await asyncio.to_thread(self._write, producer, batch)
                progress(len(chunk))
        finally:
            await asyncio.to_thread(producer.close)
        return self.report

    def _session_id(self, conversation: LoggedConversation) -> str:
        return conversation.session_id(conversation.principal or self._principal)

    def _imported(self) -> dict[str, str]:
        """Session to the checksum of what was imported."""
        found: dict[str, str] = {}
        for record in read_once(self._bus, topic_ranges(self._bus, [full_name(self._namespace, IMPORTS)])):
            if record.value is not None:
                event = decode_as(record, ImportedConversationEvent)
                found[event.session_id] = event.content_sha256
        return found

    def _is_wanted(self, conversation: LoggedConversation, done: Mapping[str, str], forgotten: Forgotten) -> bool:
        session_id = self._session_id(conversation)
        before = done.get(session_id)
        if before == conversation.content_sha256:
            self.report.already += 1
        elif before is not None:
            self._skip("changed", f"{conversation.where}: it was imported before with another content")
        elif forgotten.get(ForgottenKind.SESSION, session_id) is not None:
            self._skip("forgotten", f"{conversation.where}: its session was forgotten")
        else:
            return True
        return False

    async def _scored(self, conversation: LoggedConversation) -> list[ScoredTurn]:
        turns = list(turns_of(conversation))
        if not turns:
            self._skip("no_answer", f"{conversation.where}: nobody answers in it")
            return []
        try:
            return await self._scorer.score(conversation, turns)
        except ContractError as error:
            self._skip("cannot_be_rendered", f"{conversation.where}: {error}")
            return []

    def _skip(self, reason: str, problem: str) -> None:
        self.report.skipped[reason] += 1
        if len(self.report.problems) < _MAX_PROBLEMS:
            self.report.problems.append(problem)

    def _write(
        self, producer: TransactionalProducer, batch: Sequence[tuple[LoggedConversation, list[ScoredTurn]]]
    ) -> None:
        """One transaction: turns, then with their real places what refers to them."""
        places: dict[str, RecordReference] = {}

        def delivered(delivery: Delivery) -> None:
            turn_id = next(value for name, value in delivery.record.headers if name == "ce_id").decode()
            places[turn_id] = RecordReference(
                topic=delivery.record.topic, partition=delivery.partition, offset=delivery.offset
            )

        producer.begin()
        for _, turns in batch:
            for turn in turns:
                producer.produce(self._turn_record(turn), delivered)
        producer.flush(_FLUSH_SECONDS)
        next_states = 0
        for conversation, turns in batch:
            for turn in turns:
                event = _next_state(turn, places[turn.event.turn_id])
                next_states += event.kind is not NextStateKind.SESSION_END
                producer.produce(self._next_state_record(event))
            producer.produce(self._import_record(conversation, turns))
        producer.commit()
        self.report.conversations += len(batch)
        self.report.next_states += next_states
        for _, turns in batch:
            self.report.turns += len(turns)
            for turn in turns:
                if turn.event.untrainable_reason is not None:
                    self.report.untrainable[turn.event.untrainable_reason.value] += 1

    def _turn_record(self, turn: ScoredTurn) -> OutgoingRecord:
        return encode(
            turn.event,
            topic=full_name(self._namespace, TURNS),
            key=turn.event.session_id,
            event_id=turn.event.turn_id,
            source=_SOURCE,
        )

    def _next_state_record(self, event: NextStateEvent) -> OutgoingRecord:
        return encode(
            event,
            topic=full_name(self._namespace, NEXT_STATES),
            key=event.session_id,
            event_id=event.next_state_id,
            source=_SOURCE,
        )

    def _import_record(self, conversation: LoggedConversation, turns: Sequence[ScoredTurn]) -> OutgoingRecord:
        session_id = self._session_id(conversation)
        event = ImportedConversationEvent(
            session_id=session_id,
            principal=conversation.principal or self._principal,
            log_format=conversation.log_format,
            content_sha256=conversation.content_sha256,
            turns=len(turns),
            imported_at=self._clock.now(),
        )
        return encode(
            event,
            topic=full_name(self._namespace, IMPORTS),
            key=session_id,
            event_id=ids.derive("imported-conversation", session_id),
            source=_SOURCE,
        )


def _batches(
    ready: Sequence[tuple[LoggedConversation, list[ScoredTurn]]],
) -> Iterable[list[tuple[LoggedConversation, list[ScoredTurn]]]]:
    """Conversations that share a transaction: few enough that it ends long before its timeout."""
    batch: list[tuple[LoggedConversation, list[ScoredTurn]]] = []
    size = 0
    for conversation, turns in ready:
        own = sum(len(turn.event.model_dump_json()) for turn in turns)
        if batch and size + own > _MAX_TRANSACTION_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((conversation, turns))
        size += own
    if batch:
        yield batch


def _next_state(turn: ScoredTurn, place: RecordReference) -> NextStateEvent:
    """What followed, or that nothing did: every turn's evidence is complete, since nothing will be added to it."""
    event, following = turn.event, turn.logged.following
    common = {
        "turn_id": event.turn_id,
        "turn_ref": place,
        "session_id": event.session_id,
        "principal": event.principal,
        "turn_trainable": event.trainable,
    }
    if not is_evidence(following):
        return NextStateEvent.model_validate(
            {
                **common,
                "next_state_id": ids.next_state_id(event.turn_id, "session_end"),
                "kind": NextStateKind.SESSION_END,
                "observed_at": event.finished_at,
            }
        )
    first = next(each for each in following if each.role in ("user", "tool"))
    return NextStateEvent.model_validate(
        {
            **common,
            "next_state_id": ids.next_state_id(event.turn_id, "imported"),
            "kind": NextStateKind.TOOL_RESULT if first.role == "tool" else NextStateKind.REPLY,
            "request_messages": event.request_messages,
            "tools": event.tools,
            "response_message": event.response_message,
            "following_messages": [each.message for each in following],
            "observed_at": following[-1].at or event.finished_at,
        }
    )
