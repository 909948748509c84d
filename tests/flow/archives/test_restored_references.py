"""A restored log can be used: what refers to records by offset leads to the same records, encrypted or not."""

from pathlib import Path

import pytest

from clawstream import topics
from clawstream.archives.export import export_topics
from clawstream.archives.references import NOWHERE
from clawstream.archives.restore import Restorer, RestoreReport
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import SystemClock
from clawstream.codec import decode_as
from clawstream.encryption.bus import open_bus
from clawstream.errors import ArchiveError, OffsetNotRetained
from clawstream.settings import EncryptionSettings, KafkaSettings
from clawstream.topics import full_name
from schemas.events import NextStateEvent, SampleEvent, TrainStepEvent, TurnEvent
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.remembered_log import RememberedLog

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
ARCHIVED = (topics.TRAIN_STEPS, topics.SAMPLES, topics.NEXT_STATES, topics.TURNS, topics.SESSION_KEYS)


def restore(
    settings: KafkaSettings, archive: Path, only: tuple[str, ...] = (), *, dangling: bool = False
) -> RestoreReport:
    return Restorer(
        kafka_bus(settings.bootstrap_servers, "restore"),
        settings.namespace,
        archive,
        offsets_directory=archive.with_name("offsets"),
        append=True,
        dangling_references=dangling,
        now_milliseconds=0,
    ).run(only)


@pytest.mark.parametrize("encrypts", [False, True])
def test_behind_what_a_log_holds_every_reference_leads_to_its_record(
    broker: str, namespace: str, tmp_path: Path, encrypts: bool
) -> None:
    encryption = EncryptionSettings(sessions=encrypts)
    first = KafkaSettings(bootstrap_servers=broker, namespace=namespace, encryption=encryption)
    second = first.model_copy(update={"namespace": f"{namespace}-copy"})
    old = RememberedLog(open_bus(first, client_id="old", renews_keys=True), first.namespace, tmp_path / "old")
    turns = [old.converse(number, "one" if number % 2 else "two", "alice") for number in range(4)]
    old.train(1, turns[:2], 0, 1)
    new = RememberedLog(open_bus(second, client_id="new", renews_keys=True), second.namespace, tmp_path / "new")
    there = [new.converse(number, "one" if number % 2 else "two", "bob") for number in range(10, 13)]
    archive = tmp_path / "archive"
    export_topics(kafka_bus(broker, "export"), first.namespace, ARCHIVED, archive, SystemClock())

    with pytest.raises(ArchiveError, match=r"next-states\.v1.*refers to records of turns\.v1.*restore turns\.v1"):
        restore(second, archive, (topics.NEXT_STATES,))
    assert len(read_all(new.bus, new.log.topic(topics.NEXT_STATES))) == len(there), "nothing was written"
    report = restore(second, archive)
    assert report.dangling <= 2, "the fixture's step names revisions of next states that may never have been"

    fetcher = RecordFetcher(open_bus(second, client_id="reader"), timeout_seconds=60.0)
    try:
        for topic, model in ((topics.NEXT_STATES, NextStateEvent), (topics.SAMPLES, SampleEvent)):
            events = [decode_as(record, model) for record in read_all(new.bus, full_name(second.namespace, topic))]
            assert {event.turn_id for event in events} == {turn.turn_id for turn in (*turns, *there)}
            for event in events:
                assert event.turn_ref.topic == full_name(second.namespace, topics.TURNS)
                turn = decode_as(fetcher.fetch(event.turn_ref).result(), TurnEvent)
                assert (turn.turn_id, turn.principal) == (event.turn_id, turn.principal)
        (step,) = [decode_as(each, TrainStepEvent) for each in read_all(new.bus, new.log.topic(topics.TRAIN_STEPS))]
        for trained in step.samples:
            assert decode_as(fetcher.fetch(trained.ref).result(), TurnEvent).turn_id == trained.turn_id
        for record in read_all(new.bus, new.log.topic(topics.SAMPLES)):
            sample = decode_as(record, SampleEvent)
            evidence = decode_as(fetcher.fetch(sample.next_state_ref).result(), NextStateEvent)
            assert evidence.turn_id == sample.turn_id
            assert sample.revision.next_state_offset == sample.next_state_ref.offset
        gone = events[0].turn_ref.model_copy(update={"offset": NOWHERE})
        with pytest.raises(OffsetNotRetained):
            fetcher.fetch(gone).result()
    finally:
        fetcher.close()
