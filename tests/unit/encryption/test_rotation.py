"""Another master key while everything runs: nothing becomes unreadable, nothing that was deleted comes back."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from queue import SimpleQueue

import pytest

from clawstream import topics
from clawstream.bus.fold import LogReader
from clawstream.bus.interface import OutgoingRecord, TransactionalProducer
from clawstream.bus.memory import MemoryBus
from clawstream.bus.write_together import write_together
from clawstream.clock import ManualClock
from clawstream.codec import encode
from clawstream.encryption import rotation
from clawstream.encryption.deletion import delete_keys, keys_of_session
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.rotation import KeysOnLog, Rotation, read_keys
from clawstream.encryption.session_keys import SessionKeys, key_prefix, wrapped
from clawstream.errors import SettingsError

NAMESPACE = "test"
OLD, NEW, FOREIGN = (MasterKey(letter * 32) for letter in (b"o", b"n", b"f"))
SESSIONS = [f"session-{number}" for number in range(7)]
Process = Callable[..., SessionKeys]
READ_SECONDS = 0.2


def rotate(bus: MemoryBus, *held: MasterKey, leaving: Collection[str] = ()) -> int:
    masters = MasterKeys(lambda: held or (OLD, NEW))
    rotation = Rotation(bus, NAMESPACE, masters, clock=ManualClock(), random_bytes=os.urandom, settle_seconds=0.0)
    return rotation.run(NEW, leaving=leaving).wrapped


@pytest.mark.parametrize("before", [(OLD,), ()])
def test_all_keys_are_wrapped_anew_and_stay_the_same_keys(
    bus: MemoryBus, process: Process, clock: ManualClock, before: tuple[MasterKey, ...]
) -> None:
    first = process(*before)
    made = dict(first.for_writing(session, "alice") for session in SESSIONS)
    assert read_keys(bus, NAMESPACE).counts() == {before[0].key_id if before else "": len(SESSIONS)}
    running = process(*before, NEW)
    assert set(made.values()) == {running.find(key_id) for key_id in made}
    assert rotate(bus, *before, NEW) == len(SESSIONS)
    assert read_keys(bus, NAMESPACE).counts() == {NEW.key_id: len(SESSIONS)}
    assert read_keys(bus, NAMESPACE).named == NEW.key_id
    clock.advance(1.0)
    for keys in (running, process(*before, NEW), process(NEW)):
        assert {key_id: keys.find(key_id) for key_id in made} == made
    later_id, later = running.for_writing("later", "alice")
    assert read_keys(bus, NAMESPACE).counts() == {NEW.key_id: len(SESSIONS) + 1}
    assert process(NEW).find(later_id) == later
    assert rotate(bus, *before, NEW) == 0, "once is enough"


def test_a_process_reads_a_key_that_was_added_to_its_file_since(
    bus: MemoryBus, clock: ManualClock, process: Process
) -> None:
    file = [OLD]
    running = SessionKeys(
        bus,
        NAMESPACE,
        MasterKeys(lambda: list(file)),
        source="tests",
        renews=True,
        clock=clock,
        random_bytes=os.urandom,
    )
    key_id, key = running.for_writing("session", "alice")
    file.append(NEW)
    rotate(bus)
    clock.advance(1.0)
    assert running.find(key_id) == key
    assert process(NEW).find(running.for_writing("later", "alice")[0]) is not None


def test_a_process_that_was_cut_off_makes_no_key_under_a_master_key_that_was_thrown_away(
    bus: MemoryBus, process: Process, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its connection was broken a refresh finds nothing, until the client has fetched again."""
    cut_off = process(OLD, NEW)
    cut_off.for_writing("session", "alice")
    rotate(bus)
    monkeypatch.setattr(LogReader, "poll", lambda *_: [])
    clock.advance(1.0)
    key_id, key = cut_off.for_writing("later", "alice")
    assert read_keys(bus, NAMESPACE).counts() == {NEW.key_id: 2}
    assert process(NEW).find(key_id) == key


class KilledError(Exception):
    """As kill -9 looks to the log."""


@pytest.mark.parametrize("at", range(5))
def test_a_rotation_that_is_killed_leaves_everything_readable_and_is_finished_by_the_next(
    bus: MemoryBus, process: Process, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(rotation, "_KEYS_PER_TRANSACTION", 2)
    made = dict(process(OLD).for_writing(session, "alice") for session in SESSIONS)
    writes = 0

    def dies(producer: TransactionalProducer, records: Iterable[OutgoingRecord]) -> None:
        nonlocal writes
        if writes == at:
            raise KilledError
        writes += 1
        write_together(producer, records)

    with monkeypatch.context() as killed:
        killed.setattr(rotation, "write_together", dies)
        with pytest.raises(KilledError):
            rotate(bus)
    both = process(OLD, NEW)
    assert {key_id: both.find(key_id) for key_id in made} == made
    assert rotate(bus) == len(SESSIONS) - min(2 * max(0, at - 1), len(SESSIONS))
    assert {key_id: process(NEW).find(key_id) for key_id in made} == made


def test_what_is_deleted_while_the_keys_are_wrapped_anew_does_not_come_back(
    bus: MemoryBus, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {session: process(OLD).for_writing(session, "alice") for session in SESSIONS}
    wrapped, deleted = Rotation._wrapped, False  # pyright: ignore[reportPrivateUsage]

    def forgets_first(self: Rotation, *arguments: object) -> object:
        nonlocal deleted
        if not deleted:
            deleted = True
            delete_keys(bus, NAMESPACE, keys_of_session(bus, NAMESPACE, SESSIONS[3]), "tests")
        return wrapped(self, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Rotation, "_wrapped", forgets_first)
    assert rotate(bus) == len(SESSIONS) - 1
    late = process(NEW)
    for session, (key_id, key) in made.items():
        assert late.find(key_id) == (None if session == SESSIONS[3] else key)


def test_of_two_rotations_at_once_both_come_to_their_end(
    bus: MemoryBus, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would fence the other again and again while it still reads."""
    made = dict(process(OLD).for_writing(session, "alice") for session in SESSIONS)

    def reads_for_long(*arguments: object) -> KeysOnLog:
        found = read_keys(*arguments)  # pyright: ignore[reportArgumentType]
        time.sleep(READ_SECONDS)
        return found

    monkeypatch.setattr(rotation, "read_keys", reads_for_long)
    masters = MasterKeys(lambda: (OLD, NEW))
    ended: SimpleQueue[int] = SimpleQueue()

    def run() -> None:
        rotating = Rotation(bus, NAMESPACE, masters, clock=ManualClock(), random_bytes=os.urandom, settle_seconds=0.01)
        ended.put(rotating.run(NEW).wrapped)

    for _ in range(2):
        threading.Thread(target=run, daemon=True).start()
        time.sleep(READ_SECONDS / 2)  # Out of step: the other one is in the middle of its reading.
    assert sum(ended.get(timeout=30.0) for _ in range(2)) == len(SESSIONS)
    assert {key_id: process(NEW).find(key_id) for key_id in made} == made


def test_without_the_old_key_nothing_is_changed(bus: MemoryBus, process: Process) -> None:
    process(OLD).for_writing("session", "alice")
    before = read_keys(bus, NAMESPACE)
    with pytest.raises(SettingsError, match=OLD.key_id):
        rotate(bus, NEW)
    assert read_keys(bus, NAMESPACE) == before


def test_a_master_key_that_is_lost_does_not_keep_others_from_writing_for_ever(bus: MemoryBus, process: Process) -> None:
    old_id, old = process(OLD).for_writing("session", "alice")
    # As a gateway with a key of its own did before keys were checked.
    lost_id = f"{key_prefix('other', 'bob')}1"
    event = wrapped(lost_id, bytes(32), FOREIGN, nonce=bytes(12), now=ManualClock().now())
    topic = f"{NAMESPACE}.{topics.SESSION_KEYS}"
    producer = bus.producer()
    producer.produce(encode(event, topic=topic, key=lost_id, event_id=lost_id, source="tests"))
    producer.flush(1.0)
    with pytest.raises(SettingsError, match=FOREIGN.key_id):
        process(OLD, NEW).check()
    with pytest.raises(SettingsError, match=FOREIGN.key_id):
        rotate(bus)
    assert rotate(bus, leaving=[FOREIGN.key_id]) == 1
    assert read_keys(bus, NAMESPACE).counts() == {NEW.key_id: 1, FOREIGN.key_id: 1}
    late = process(NEW)
    late.check()
    assert late.find(old_id) == old
    late.for_writing("later", "alice")
    with pytest.raises(SettingsError, match=FOREIGN.key_id):
        late.find(lost_id)


# ---- a wrong master key is noticed before anything is written


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("held", [(FOREIGN,), ()])
def test_another_master_key_than_the_log_knows_is_refused_at_once(
    bus: MemoryBus, process: Process, held: tuple[MasterKey, ...], is_named: bool
) -> None:
    first = process(OLD)
    if is_named:
        first.check()
    else:
        first.for_writing("session", "alice")
    wrong = process(*held)
    with pytest.raises(SettingsError, match=f"wrapped by master key {OLD.key_id}"):
        wrong.check()
    with pytest.raises(SettingsError, match=f"wrapped by master key {OLD.key_id}"):
        wrong.for_writing("other", "alice")
    assert read_keys(bus, NAMESPACE).counts() == ({} if is_named else {OLD.key_id: 1})
    process(OLD).check()
    process(FOREIGN, OLD).check()


def test_who_comes_first_names_the_master_key_and_who_only_reads_names_none(bus: MemoryBus, process: Process) -> None:
    process(NEW, renews=False).check()
    process().check()
    assert read_keys(bus, NAMESPACE).named is None
    process(OLD, NEW).check()
    process(NEW, OLD).check()
    assert read_keys(bus, NAMESPACE).named == OLD.key_id
