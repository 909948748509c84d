"""Keys of sessions over a bus in memory: made once, found by others, gone for everybody when deleted."""

import base64
from collections.abc import Callable

import pytest

from clawstream import topics
from clawstream.bus.fold import LogReader
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.encryption import session_keys
from clawstream.encryption.deletion import delete_keys, keys_of_principal, keys_of_session
from clawstream.encryption.master_key import MasterKey
from clawstream.encryption.session_keys import SessionKeys
from clawstream.errors import BrokerUnavailable, SettingsError
from schemas.events import SessionKeyEvent
from tests.fixtures.buses import read_all

NAMESPACE = "test"
TOPIC = f"{NAMESPACE}.{topics.SESSION_KEYS}"
MASTER = MasterKey(b"m" * 32)
Process = Callable[..., SessionKeys]


def delete_all(bus: MemoryBus, session_id: str) -> None:
    delete_keys(bus, NAMESPACE, keys_of_session(bus, NAMESPACE, session_id), "tests")


@pytest.mark.parametrize("master", [None, MASTER])
def test_a_key_is_made_once_and_found_by_processes_that_were_there_before_and_come_later(
    bus: MemoryBus, process: Process, master: MasterKey | None
) -> None:
    before, writer = process(master), process(master)
    assert before.find("unknown") is None, "reads the topic"
    key_id, key = writer.for_writing("session", "alice")
    assert writer.for_writing("session", "alice") == (key_id, key)
    assert before.find(key_id) == process(master).find(key_id) == key
    assert process(master).for_writing("session", "alice") == (key_id, key)
    assert len(read_all(bus, TOPIC)) == 1


def test_sessions_and_principals_have_keys_of_their_own(process: Process) -> None:
    keys = process()
    pairs = [("one", "alice"), ("two", "alice"), ("one", "bob"), ("one", "")]
    made = [keys.for_writing(*pair) for pair in pairs]
    assert len({key_id for key_id, _ in made}) == len({key for _, key in made}) == len(pairs)


def test_two_writers_that_meet_a_session_at_once_lose_nothing(bus: MemoryBus, process: Process) -> None:
    first, second = process(), process()
    assert first.find("x") is second.find("x") is None
    made = [first.for_writing("session", "alice"), second.for_writing("session", "alice")]
    assert made[0] != made[1]
    late = process()
    assert [late.find(key_id) for key_id, _ in made] == [key for _, key in made]
    delete_all(bus, "session")
    assert [process().find(key_id) for key_id, _ in made] == [None, None]


def test_a_deleted_key_leaves_every_process_and_never_comes_back(
    bus: MemoryBus, process: Process, clock: ManualClock
) -> None:
    gateway, judge = process(), process(renews=False)
    key_id, key = gateway.for_writing("session", "alice")
    other_id, other = gateway.for_writing("other", "alice")
    assert judge.find(key_id) == key
    delete_all(bus, "session")
    clock.advance(1.0)
    assert gateway.find(key_id) is judge.find(key_id) is process().find(key_id) is None
    assert gateway.find(other_id) == judge.find(other_id) == other


def test_who_records_conversations_renews_a_key_and_the_others_write_what_nobody_can_read(
    bus: MemoryBus, process: Process, clock: ManualClock
) -> None:
    gateway, judge = process(), process(renews=False)
    old_id, _ = gateway.for_writing("session", "alice")
    judge.find(old_id)
    delete_all(bus, "session")
    clock.advance(1.0)
    lost_id, _ = judge.for_writing("session", "alice")
    assert process().find(lost_id) is None
    new_id, new_key = gateway.for_writing("session", "alice")
    assert new_id != old_id
    assert process().find(new_id) == new_key
    assert judge.find(new_id) == new_key
    assert judge.for_writing("session", "alice") == (new_id, new_key)


def test_a_principals_keys_are_deleted_without_those_of_who_chose_the_same_session_name(
    bus: MemoryBus, process: Process
) -> None:
    keys = process()
    alice, bob = keys.for_writing("default", "alice")[0], keys.for_writing("default", "bob")[0]
    calls, elsewhere = keys.for_writing("default", "")[0], keys.for_writing("elsewhere", "alice")[0]
    found = keys_of_principal(bus, NAMESPACE, "alice", ["default"])
    assert sorted(found) == sorted([alice.encode(), calls.encode()])
    assert sorted(keys_of_session(bus, NAMESPACE, "default")) == sorted(each.encode() for each in (alice, bob, calls))
    assert keys_of_session(bus, NAMESPACE, "elsewhere") == [elsewhere.encode()]


def test_no_key_is_on_the_log_as_it_is_when_a_master_key_wraps_it(bus: MemoryBus, process: Process) -> None:
    _, key = process(MASTER).for_writing("session", "alice")
    (record,) = read_all(bus, TOPIC)
    event = SessionKeyEvent.model_validate_json(record.value or b"")
    assert event.master_key_id == MASTER.key_id
    assert key not in base64.b64decode(event.data_key)


@pytest.mark.parametrize("master", [None, MasterKey(b"x" * 32)])
def test_another_master_key_is_wrong_settings_and_not_forgotten_content(
    process: Process, master: MasterKey | None
) -> None:
    plain_id, plain = process(None).for_writing("other", "alice")
    key_id, _ = process(MASTER).for_writing("session", "alice")
    with pytest.raises(SettingsError, match=f"wrapped by master key {MASTER.key_id}.*master_key_file"):
        process(master).find(key_id)
    assert process(master).find(plain_id) == plain, "plain keys need none"


def test_a_reader_that_could_not_read_the_keys_holds_no_client(
    bus: MemoryBus, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id, key = process().for_writing("session", "alice")
    closed: list[LogReader] = []
    keys = process()

    def unavailable(*_: object, **__: object) -> int:
        raise BrokerUnavailable("no broker")

    with monkeypatch.context() as away:
        away.setattr(LogReader, "bootstrap", unavailable)
        away.setattr(LogReader, "close", lambda reader: closed.append(reader))
        with pytest.raises(BrokerUnavailable):
            keys.find(key_id)
    assert len(closed) == 1
    assert keys.find(key_id) == key, "and it tries again"


def test_a_key_behind_an_open_transaction_is_not_taken_for_deleted(
    bus: MemoryBus, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rotation leaves it that is killed: nothing after its beginning can be read until the broker ends it."""
    writer, reader = process(), process()
    assert reader.find("unknown") is None
    killed = bus.transactional_producer("killed")
    killed.begin()
    killed.produce(OutgoingRecord(TOPIC, b"other", None))
    key_id, key = writer.for_writing("session", "alice")
    with monkeypatch.context() as impatient, pytest.raises(BrokerUnavailable, match="a transaction is open"):
        impatient.setattr(session_keys, "_OPEN_TRANSACTION_SECONDS", 0.0)
        reader.find(key_id)
    killed.abort()
    assert reader.find(key_id) == key
    assert process().find(key_id) == key
