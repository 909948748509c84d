"""A key topic from an archive: no master key counts again unheard, and none is needed that is gone."""

import os
from pathlib import Path

import pytest

from clawstream import topics
from clawstream.archives.export import export_topics
from clawstream.archives.restore import Restorer, RestoreReport
from clawstream.bus.interface import TopicSpecification
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.rotation import Rotation, read_keys
from clawstream.encryption.session_keys import SessionKeys
from clawstream.errors import ArchiveError
from tests.fixtures.buses import read_all

NAMESPACE = "test"
TOPIC = f"{NAMESPACE}.{topics.SESSION_KEYS}"
OLD, NEW = MasterKey(b"o" * 32), MasterKey(b"n" * 32)


def new_bus() -> MemoryBus:
    made = MemoryBus()
    made.admin().create_topics([TopicSpecification(TOPIC, 1)])
    return made


def process(bus: MemoryBus, *held: MasterKey) -> SessionKeys:
    masters = MasterKeys(lambda: held)
    return SessionKeys(
        bus, NAMESPACE, masters, source="tests", renews=True, clock=ManualClock(), random_bytes=os.urandom
    )


def rotate(bus: MemoryBus) -> None:
    masters = MasterKeys(lambda: (OLD, NEW))
    rotation = Rotation(bus, NAMESPACE, masters, clock=ManualClock(), random_bytes=os.urandom, settle_seconds=0.0)
    rotation.run(NEW)


@pytest.fixture
def made(tmp_path: Path) -> tuple[MemoryBus, Path, str, bytes]:
    """A log, an archive of its keys from when OLD counted, and one of them."""
    bus = new_bus()
    first = process(bus, OLD)
    first.check()
    key_id, key = first.for_writing("session", "alice")
    export_topics(bus, NAMESPACE, [topics.SESSION_KEYS], tmp_path / "archive", ManualClock())
    return bus, tmp_path / "archive", key_id, key


def restore(bus: MemoryBus, archive: Path, *held: MasterKey, append: bool) -> RestoreReport:
    return Restorer(
        bus,
        NAMESPACE,
        archive,
        offsets_directory=archive.with_name("offsets"),
        append=append,
        now_milliseconds=0,
        masters=MasterKeys(lambda: held),
    ).run()


def test_behind_a_rotation_the_new_master_key_goes_on_to_count(made: tuple[MemoryBus, Path, str, bytes]) -> None:
    bus, archive, key_id, key = made
    rotate(bus)
    report = restore(bus, archive, OLD, NEW, append=True)
    assert (report.passed_over, report.written) == (1, {topics.SESSION_KEYS: 1})
    assert f"brings master key {OLD.key_id} back" in report.keys_warning
    assert f"keys rotate --to {NEW.key_id}" in report.keys_warning
    assert read_keys(bus, NAMESPACE).named == NEW.key_id
    late = process(bus, OLD, NEW)
    late.check()
    assert late.find(key_id) == key
    assert process(bus, NEW).find(late.for_writing("later", "alice")[0]) is not None
    rotate(bus)
    assert set(read_keys(bus, NAMESPACE).counts()) == {NEW.key_id}


@pytest.mark.parametrize("held", [(NEW,), ()])
@pytest.mark.parametrize("is_empty", [True, False])
def test_without_the_master_key_that_it_needs_nothing_is_restored(
    made: tuple[MemoryBus, Path, str, bytes], is_empty: bool, held: tuple[MasterKey, ...]
) -> None:
    bus, archive, _, _ = made
    rotate(bus)
    target = new_bus() if is_empty else bus
    before = read_all(target, TOPIC)
    with pytest.raises(ArchiveError, match=f"need master key .*{OLD.key_id}.*this process has") as refused:
        restore(target, archive, *held, append=not is_empty)
    assert "master_key_file" in str(refused.value)
    assert read_all(target, TOPIC) == before


def test_on_an_empty_topic_the_archived_one_counts_and_a_newer_one_is_told_of(
    made: tuple[MemoryBus, Path, str, bytes],
) -> None:
    _, archive, key_id, key = made
    bus = new_bus()
    report = restore(bus, archive, OLD, NEW, append=False)
    assert report.passed_over == 0
    assert read_keys(bus, NAMESPACE).named == OLD.key_id
    assert f"keys rotate --to {NEW.key_id}" in report.keys_warning
    assert process(bus, OLD).find(key_id) == key
    assert restore(new_bus(), archive, OLD, append=False).keys_warning == "", "nothing has changed since"


def test_behind_its_own_time_nothing_is_to_be_done(made: tuple[MemoryBus, Path, str, bytes]) -> None:
    bus, archive, _, _ = made
    report = restore(bus, archive, OLD, append=True)
    assert (report.passed_over, report.keys_warning) == (1, "")
    assert read_keys(bus, NAMESPACE).named == OLD.key_id
