"""Records of the key topic that cannot be decoded: named with their place, and never a reason to guess or to stop."""

import base64
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.cli import app
from clawstream.cli import keys as keys_command
from clawstream.clock import ManualClock
from clawstream.codec import encode
from clawstream.encryption.deletion import delete_keys, keys_of_session
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.rotation import Rotation, read_keys
from clawstream.encryption.session_keys import MASTER_KEY_RECORD, SessionKeys, wrapped
from clawstream.errors import SettingsError
from schemas.events import SessionKeyEvent
from tests.fixtures.buses import read_all

NAMESPACE = "test"
TOPIC = f"{NAMESPACE}.{topics.SESSION_KEYS}"
OLD, NEW = MasterKey(b"o" * 32), MasterKey(b"n" * 32)
Process = Callable[..., SessionKeys]


def put(bus: MemoryBus, key: bytes, value: bytes, event_type: str = SessionKeyEvent.event_type) -> str:
    """Returns where the record is."""
    producer = bus.producer()
    producer.produce(OutgoingRecord(TOPIC, key, value, (("ce_type", event_type.encode()),)))
    producer.flush(1.0)
    return str(read_all(bus, TOPIC)[-1])


def put_unfit(bus: MemoryBus, key_id: str, master: MasterKey) -> str:
    """A key that looks well, and is not what its master key wrapped."""
    event = wrapped(key_id, bytes(32), master, nonce=bytes(12), now=ManualClock().now())
    event = event.model_copy(update={"data_key": base64.b64encode(bytes(60)).decode()})
    producer = bus.producer()
    producer.produce(encode(event, topic=TOPIC, key=key_id, event_id=key_id, source="tests"))
    producer.flush(1.0)
    return str(read_all(bus, TOPIC)[-1])


def rotation(bus: MemoryBus, *held: MasterKey) -> Rotation:
    masters = MasterKeys(lambda: held)
    return Rotation(bus, NAMESPACE, masters, clock=ManualClock(), random_bytes=os.urandom, settle_seconds=0.0)


# ---- the record that names the master key that counts


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"since": "2026-01-01T00:00:00Z"}'])
@pytest.mark.parametrize("was_named", [True, False])
def test_no_key_is_made_while_it_is_not_known_which_master_key_counts(
    bus: MemoryBus, process: Process, clock: ManualClock, was_named: bool, value: bytes
) -> None:
    running = process(OLD)
    if was_named:
        running.check()
    key_id, key = running.for_writing("before", "alice")
    other_id, _ = running.for_writing("deleted", "alice")
    place = put(bus, MASTER_KEY_RECORD.encode(), value, "clawstream.master-key")
    delete_keys(bus, NAMESPACE, keys_of_session(bus, NAMESPACE, "deleted"), "tests")
    clock.advance(2.0)
    count = len(read_all(bus, TOPIC))
    for each in (running, process(OLD), process(OLD, NEW, renews=False), process()):
        if each is not running:
            with pytest.raises(SettingsError, match="keys rotate") as refused:
                each.check()
            assert place in str(refused.value)
        with pytest.raises(SettingsError, match="no key is made"):
            each.for_writing("later", "alice")
    assert len(read_all(bus, TOPIC)) == count, "nothing was written"
    assert running.for_writing("before", "alice") == (key_id, key), "what has a key keeps it"
    assert process(OLD).find(key_id) == running.find(key_id) == key, "readers need no name"
    assert running.find(other_id) is None, "what came behind the damaged record was not missed"


def test_a_rotation_names_the_master_key_anew(bus: MemoryBus, process: Process, clock: ManualClock) -> None:
    running = process(OLD)
    key_id, key = running.for_writing("before", "alice")
    place = put(bus, MASTER_KEY_RECORD.encode(), b"{", "clawstream.master-key")
    assert read_keys(bus, NAMESPACE).unknown_name.startswith(place)
    report = rotation(bus, OLD, NEW).run(NEW)
    assert (report.wrapped, report.damaged) == (1, {})
    assert read_keys(bus, NAMESPACE).named == NEW.key_id
    clock.advance(2.0)
    late = process(NEW)
    late.check()
    assert late.find(key_id) == key
    assert late.find(process(OLD, NEW).for_writing("later", "alice")[0]) is not None


# ---- records of sessions' keys


def damage(bus: MemoryBus, process: Process) -> tuple[dict[str, bytes], list[str]]:
    """(good keys, places of damaged ones)."""
    process(OLD).check()
    good = dict(process(OLD).for_writing(f"session-{number}", "alice") for number in range(3))
    places = [
        put(bus, b"a/b/1", b"{"),
        put(bus, b"a/b/2", b'{"key_id": "a/b/2"}'),
        put(bus, b"\xff\xfe/3", read_all(bus, TOPIC)[1].value or b""),
        put_unfit(bus, "a/b/4", OLD),
        put_unfit(bus, "a/b/5", NEW),
    ]
    return good, places


def test_damaged_keys_do_not_keep_the_others_from_being_wrapped_anew(bus: MemoryBus, process: Process) -> None:
    good, places = damage(bus, process)
    report = rotation(bus, OLD, NEW).run(NEW)
    assert report.wrapped == len(good)
    assert len(report.damaged) == len(places)
    told = "\n".join(report.damaged.values())
    assert all(place in told for place in places)
    late = process(NEW)
    assert {key_id: late.find(key_id) for key_id in good} == good
    again = rotation(bus, OLD, NEW).run(NEW)
    assert (again.wrapped, again.damaged) == (0, report.damaged)


def test_without_the_old_key_still_nothing_is_changed(bus: MemoryBus, process: Process) -> None:
    damage(bus, process)
    before = read_all(bus, TOPIC)
    with pytest.raises(SettingsError, match=OLD.key_id):
        rotation(bus, NEW).run(NEW)
    assert read_all(bus, TOPIC) == before


@pytest.fixture
def command(bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`clawstream keys ...` with both master keys in the file."""
    file = tmp_path / "master.key"
    file.write_text("".join(f"{base64.b64encode(key.key).decode()}\n" for key in (OLD, NEW)))
    config = tmp_path / "clawstream.toml"
    config.write_text(f'[kafka]\nnamespace = "{NAMESPACE}"\n[kafka.encryption]\nmaster_key_file = "{file}"\n')
    monkeypatch.setattr(keys_command, "_bus", lambda _: bus)
    monkeypatch.setattr(keys_command, "Rotation", partial(Rotation, settle_seconds=0.0))
    return lambda *arguments: CliRunner().invoke(app, ["keys", *arguments, "--config", str(config)])


def test_the_commands_go_on_name_every_damaged_record_and_fail(
    bus: MemoryBus, process: Process, command: Callable[..., Result]
) -> None:
    good, places = damage(bus, process)
    shown = command("status")
    assert shown.exit_code == 1
    assert all(place in shown.output for place in places)
    assert any(OLD.key_id in line and "yes" in line for line in shown.output.splitlines()), "the table is there"
    rotated = command("rotate")
    assert rotated.exit_code == 1
    assert f"master key {NEW.key_id} counts; {len(good)} keys of sessions were wrapped anew" in rotated.output
    assert all(place in rotated.output for place in places)


def test_the_commands_name_a_damaged_name_and_mend_it(bus: MemoryBus, command: Callable[..., Result]) -> None:
    place = put(bus, MASTER_KEY_RECORD.encode(), b"{", "clawstream.master-key")
    shown = command("status")
    assert shown.exit_code == 1
    assert place in shown.output
    assert "keys rotate" in shown.output
    assert command("rotate").exit_code == 0
    assert command("status").exit_code == 0
