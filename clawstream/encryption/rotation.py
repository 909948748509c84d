"""Changing the master key while everything runs: the log names the new one, and all keys of sessions are wrapped by it.

Processes that have both master keys notice nothing: within half a second they wrap what they make by the one that the
log names, and what is wrapped anew is the same key. A run that was killed is finished by the next one.

A key that is deleted meanwhile must not come back: the rotation has read it, and would write it again behind its
tombstone. So both write in transactions of one id, and the rotation reads after its producer was initialised: whoever
deletes fences it, and it begins anew.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from clawstream.bus.interface import Bus, OutgoingRecord
from clawstream.bus.ranges import latest_of_topic
from clawstream.bus.write_together import write_together
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode
from clawstream.encryption.deletion import keys_transactional_id
from clawstream.encryption.envelope import NONCE_BYTES
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.session_keys import MASTER_KEY_RECORD, master_key_record, unwrapped, wrapped
from clawstream.errors import DecodeError, Fenced, SettingsError
from clawstream.ids import derive
from clawstream.topics import SESSION_KEYS, full_name
from schemas.events.session_key import MasterKeyEvent, SessionKeyEvent

_KEYS_PER_TRANSACTION: Final = 500
_SETTLE_SECONDS: Final = 2.0
"""So long processes that have not read of the new master key may still make keys under the old one."""
_SOURCE: Final = "cli/keys"


@dataclass(frozen=True, slots=True)
class KeysOnLog:
    """The sessions' keys as they stand."""

    named: str | None
    """The id of the master key that counts; None when none was ever named."""
    keys: Mapping[str, SessionKeyEvent] = field(repr=False)
    unknown_name: str = ""
    """What is wrong with the record that names the master key, and where it is; empty when nothing is."""
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """The id of each key whose record cannot be decoded, to what is wrong and where it is."""
    places: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The id of each key to `topic[partition]@offset` of its record."""

    def counts(self) -> dict[str, int]:
        """The id of each master key, empty for none, to how many keys it wraps."""
        wrapping = [event.master_key_id for event in self.keys.values()]
        return {key_id: wrapping.count(key_id) for key_id in sorted(set(wrapping))}

    def damaged(self, masters: MasterKeys) -> dict[str, str]:
        """Each key that nobody can use, to what is wrong and where it is: also those that only look well.

        What is wrapped by a master key that we do not have is not among them.
        """
        found = dict(self.unreadable)
        for key_id, event in self.keys.items():
            try:
                unwrapped(key_id, event, masters)
            except DecodeError as error:
                found[key_id] = f"{self.places[key_id]}: {error}"
            except SettingsError:
                continue
        return found


def read_keys(bus: Bus, namespace: str) -> KeysOnLog:
    """All that is there now; a record that cannot be decoded is part of the picture. Raises BusError."""
    records = latest_of_topic(bus, full_name(namespace, SESSION_KEYS))
    naming = records.pop(MASTER_KEY_RECORD.encode(), None)
    named, unknown_name = None, ""
    if naming is not None:
        try:
            named = decode_as(naming, MasterKeyEvent).master_key_id
        except DecodeError as error:
            unknown_name = str(error)
    keys: dict[str, SessionKeyEvent] = {}
    unreadable: dict[str, str] = {}
    places: dict[str, str] = {}
    for key, record in records.items():
        key_id = key.decode(errors="replace")
        places[key_id] = str(record)
        try:
            event = decode_as(record, SessionKeyEvent)
            if event.key_id.encode() != key:
                raise DecodeError(f"{record}: holds key {event.key_id}, and is that of {key_id}")
        except DecodeError as error:
            unreadable[key_id] = str(error)
        else:
            keys[key_id] = event
    return KeysOnLog(named, keys, unknown_name, unreadable, places)


@dataclass(frozen=True, slots=True)
class RotationReport:
    """What a rotation did."""

    wrapped: int
    """Keys that were wrapped anew."""
    damaged: Mapping[str, str]
    """The id of each key that nobody can use, to what is wrong and where its record is. They stay as they are."""


class Rotation:
    """Makes one master key count."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        masters: MasterKeys,
        *,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        progress: Callable[[str], None] = lambda _: None,
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """`progress` is told what is being done, in a few words."""
        self._bus = bus
        self._namespace = namespace
        self._topic = full_name(namespace, SESSION_KEYS)
        self._masters = masters
        self._clock = clock
        self._random_bytes = random_bytes
        self._progress = progress
        self._settle_seconds = settle_seconds

    def run(self, target: MasterKey, *, leaving: Collection[str] = ()) -> RotationReport:
        """Names `target` and wraps every key by it, but those that are damaged.

        `leaving`: ids of master keys that are lost. What they wrap stays as it is, readable to nobody.

        Raises SettingsError when a master key that wraps some of them is missing: then nothing has changed. Raises
        BusError; then run it again. Who is fenced waits twice as long every time: of two rotations at once one comes
        to its end while the other waits, however long reading the keys takes.
        """
        first = self._unless_fenced(target, leaving)
        time.sleep(self._settle_seconds)
        second = self._unless_fenced(target, leaving)
        return RotationReport(first.wrapped + second.wrapped, second.damaged)

    def _unless_fenced(self, target: MasterKey, leaving: Collection[str]) -> RotationReport:
        wait_seconds = self._settle_seconds
        while True:
            try:
                return self._pass(target, leaving)
            except Fenced:
                self._progress("keys are being deleted, or rotated by another run; waiting, then beginning anew")
                time.sleep(wait_seconds)
                wait_seconds *= 2

    def _pass(self, target: MasterKey, leaving: Collection[str]) -> RotationReport:
        producer = self._bus.transactional_producer(keys_transactional_id(self._namespace))
        try:
            self._progress("reading the keys")
            on_log = read_keys(self._bus, self._namespace)  # After the producer: from here on nobody deletes unseen.
            stays, damaged = {target.key_id, *leaving}, on_log.damaged(self._masters)
            stale = {
                key_id: event
                for key_id, event in on_log.keys.items()
                if event.master_key_id not in stays and key_id not in damaged
            }
            plain = {key_id: unwrapped(key_id, event, self._masters) for key_id, event in stale.items()}
            if on_log.named != target.key_id:
                named = master_key_record(self._topic, target, now=self._clock.now(), source=_SOURCE)
                write_together(producer, [named])
            waiting = iter(plain.items())
            while chunk := list(islice(waiting, _KEYS_PER_TRANSACTION)):
                write_together(producer, [self._wrapped(*each, stale[each[0]], target) for each in chunk])
            return RotationReport(len(plain), damaged)
        finally:
            producer.close()

    def _wrapped(self, key_id: str, data_key: bytes, before: SessionKeyEvent, target: MasterKey) -> OutgoingRecord:
        nonce = self._random_bytes(NONCE_BYTES)
        event = wrapped(key_id, data_key, target, nonce=nonce, now=before.created_at)
        event_id = derive("session-key", key_id, target.key_id)
        return encode(event, topic=self._topic, key=key_id, event_id=event_id, source=_SOURCE)
