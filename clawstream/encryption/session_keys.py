"""The keys of sessions: a fold of the topic `session-keys`, and the making of new ones. Thread-safe.

A key is on the log, acknowledged, before the first record that it encrypts. So a reader that meets an id that it does
not know reads the topic to its present end: what is not there then was deleted. A transaction that is open (keys are
deleted, or wrapped anew) hides what was written after it began: the end is that of all records, and it is waited for.
"""

import base64
import binascii
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Admin, Bus, OutgoingRecord, Producer, Record, TopicPartition
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode
from clawstream.encryption.envelope import KEY_BYTES, NONCE_BYTES
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.errors import BrokerUnavailable, DecodeError, SettingsError
from clawstream.ids import IdSource, derive
from clawstream.topics import SESSION_KEYS, full_name
from schemas.events.session_key import MasterKeyEvent, SessionKeyEvent

_REFRESH_SECONDS = 0.5
_CATCH_UP_SECONDS = 1.0
"""So old may be what a new key is made by. A rotation looks for such keys after twice as long."""
_WRITE_SECONDS = 10.0
_OPEN_TRANSACTION_SECONDS = 15.0
"""More than the broker leaves a transaction open of whoever deletes keys or wraps them anew, and was killed."""
_PRINCIPAL_DIGITS = 8
MASTER_KEY_RECORD = "master-key"
"""Key of the record that names the master key that counts."""


def session_prefix(session_id: str) -> str:
    """How the ids of a session's keys begin. Names the session to who knows its id, and says nothing else."""
    return f"{derive('session-key', session_id)}/"


def key_prefix(session_id: str, principal: str) -> str:
    """How the ids of a principal's keys in a session begin: clients name sessions, and two may choose one name.

    Events that do not say whose they are (the ledger's) have the empty principal.
    """
    return f"{session_prefix(session_id)}{derive('session-key', session_id, principal)[:_PRINCIPAL_DIGITS]}/"


class SessionKeys:
    """Reads nothing before a key is needed for the first time: who meets no encrypted record pays nothing."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        masters: MasterKeys,
        *,
        source: str,
        renews: bool,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        new_id: IdSource = uuid.uuid4,
    ) -> None:
        """`renews`: whether a session whose key was deleted gets a new one, as it must where people go on talking.

        Others then write under a key that nobody keeps: what they were about to derive from forgotten content is lost.
        """
        self._bus = bus
        self._topic = full_name(namespace, SESSION_KEYS)
        self._masters = masters
        self._named: str | None = None
        """The id of the master key that the log names."""
        self._unknown_name: str | None = None
        """Why it is not known which one the log names; None when it is, or when it names none."""
        self._newest_wrapped_by: str | None = None
        """The id of the master key that wraps the last key on the log, as far as it was read."""
        self._source = source
        self._renews = renews
        self._clock = clock
        self._random_bytes = random_bytes
        self._new_id = new_id
        self._lock = threading.Lock()
        self._reader: LogReader | None = None
        self._producer: Producer | None = None
        self._admin: Admin | None = None
        self._refreshed_at = 0.0
        self._caught_up_at = 0.0
        """When the topic was last read to its end of that moment."""
        self._keys: dict[str, bytes] = {}
        self._key_ids: dict[str, str] = {}
        """Prefix to the id of the session's newest key."""
        self._deleted: set[str] = set()
        """Prefixes of sessions of which a key was deleted."""
        self._absent: set[str] = set()
        """Ids that are not on the topic: they never come back."""
        self._unusable: dict[str, str] = {}
        """Ids of keys that another master key wraps, or that are damaged, and what is wrong."""

    def find(self, key_id: str) -> bytes | None:
        """The key; None when it was deleted.

        Raises SettingsError for one that our master key does not unwrap, and BusError.
        """
        with self._lock:
            reader = self._refreshed()
            if key_id not in self._keys and key_id not in self._unusable and key_id not in self._absent:
                self._read_to_the_end(reader)
                if key_id not in self._keys and key_id not in self._unusable:
                    self._absent.add(key_id)
            if key_id not in self._keys and key_id in self._unusable:
                raise SettingsError(self._unusable[key_id])
            return self._keys.get(key_id)

    def check(self) -> None:
        """Whether what we write could be read by others, before anything is written.

        A process that renews keys names its master key on the log if none was named. Raises SettingsError, BusError.
        """
        with self._lock:
            reader = self._refreshed()
            reader.bootstrap(self._apply)
            master = self._wrapping()
            if self._named is None and master is not None and self._renews:
                self._send(master_key_record(self._topic, master, now=self._clock.now(), source=self._source))

    def for_writing(self, session_id: str, principal: str) -> tuple[str, bytes]:
        """Id and key for what is written of a session now; made, and on the log, when there is none.

        Raises BusError when a new one cannot be written, SettingsError when our master key is not the one that counts.
        """
        prefix = key_prefix(session_id, principal)
        with self._lock:
            reader = self._refreshed()
            if prefix not in self._key_ids:
                self._catch_up(reader)
            key_id = self._key_ids.get(prefix)
            if key_id is not None:
                return key_id, self._keys[key_id]
            key_id, data_key = f"{prefix}{self._new_id()}", self._random_bytes(KEY_BYTES)
            if prefix in self._deleted and not self._renews:
                return key_id, data_key
            self._send(self._record(key_id, data_key, self._wrapping()))
            self._remember(key_id, data_key)
            return key_id, data_key

    def _refreshed(self) -> LogReader:
        """Reads the topic whole the first time, and later what came since: a deleted key leaves the memory too."""
        now = self._clock.monotonic_seconds()
        if self._reader is None:
            reader = LogReader(self._bus, [self._topic])
            try:
                reader.bootstrap(self._apply)
            except BaseException:
                reader.close()
                raise
            self._reader, self._refreshed_at, self._caught_up_at = reader, now, now
        elif now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            while records := self._reader.poll(0.0):
                for record in records:
                    self._apply(record)
        return self._reader

    def _catch_up(self, reader: LogReader) -> None:
        """Before a key is made: a refresh takes what has arrived here, which is nothing after a connection that broke,
        and a master key that was thrown away since must wrap nothing any more. Raises BrokerUnavailable.
        """
        now = self._clock.monotonic_seconds()
        if now - self._caught_up_at < _CATCH_UP_SECONDS:
            return
        if not self._reaches(reader, reader.ends(), within_seconds=_WRITE_SECONDS):
            raise BrokerUnavailable(f"{self._topic}: its end could not be read within {_WRITE_SECONDS:.0f} seconds")
        self._caught_up_at = now

    def _read_to_the_end(self, reader: LogReader) -> None:
        """Raises BrokerUnavailable when a transaction stays open: then it is not known yet what is there."""
        if self._admin is None:
            self._admin = self._bus.admin()
        ends = self._admin.high_watermarks(self._topic)
        if not self._reaches(reader, ends, within_seconds=_OPEN_TRANSACTION_SECONDS):
            raise BrokerUnavailable(f"{self._topic}: a transaction is open, and hides what was written since")

    def _reaches(self, reader: LogReader, ends: Mapping[TopicPartition, int], *, within_seconds: float) -> bool:
        """Takes in what stands before these ends. Whether all of it came in time."""
        give_up_at = self._clock.monotonic_seconds() + within_seconds
        reader.read_to(ends, self._apply, stopped=lambda: self._clock.monotonic_seconds() >= give_up_at)
        return reader.has_reached(ends)

    def _apply(self, record: Record) -> None:
        if record.key is None:
            return
        key_id = record.key.decode(errors="replace")
        if key_id == MASTER_KEY_RECORD:
            self._named = self._unknown_name = None
            try:
                self._named = None if record.value is None else decode_as(record, MasterKeyEvent).master_key_id
            except DecodeError as error:
                # Raised where a key is made, and not here: what comes after it, as a deleted key, must not be missed.
                self._unknown_name = str(error)
            return
        prefix = _prefix_of(key_id)
        if record.value is None:
            self._keys.pop(key_id, None)
            self._unusable.pop(key_id, None)
            self._deleted.add(prefix)
            if self._key_ids.get(prefix) == key_id:
                del self._key_ids[prefix]
            return
        try:
            event = decode_as(record, SessionKeyEvent)
        except DecodeError as error:
            self._unusable[key_id] = str(error)
            return
        try:
            self._remember(key_id, self._unwrapped(key_id, event))
        except (DecodeError, SettingsError) as error:
            self._unusable[key_id] = f"{record}: {error}"

    def _remember(self, key_id: str, data_key: bytes) -> None:
        self._keys[key_id] = data_key
        self._unusable.pop(key_id, None)
        self._key_ids[_prefix_of(key_id)] = key_id

    def _unwrapped(self, key_id: str, event: SessionKeyEvent) -> bytes:
        self._newest_wrapped_by = event.master_key_id
        return unwrapped(key_id, event, self._masters)

    def _wrapping(self) -> MasterKey | None:
        """The master key that wraps what is made now.

        Raises SettingsError when we do not have it, and when it cannot be known which one that is.
        """
        if self._unknown_name is not None:
            raise SettingsError(
                f"{self._unknown_name}. This record names the master key that counts: until it can be read no key is "
                "made, for nobody might be able to use it. `clawstream keys rotate` names the key anew"
            )
        key_id = self._named or self._newest_wrapped_by
        if not key_id:
            return self._masters.first
        master = self._masters.get(key_id)
        if master is None:
            raise SettingsError(
                f"{self._topic}: sessions' keys are wrapped by master key {key_id}, and this process has "
                f"{self._masters.ids}; see kafka.encryption.master_key_file"
            )
        return master

    def _send(self, record: OutgoingRecord) -> None:
        if self._producer is None:
            self._producer = self._bus.producer()
        self._producer.produce(record)
        self._producer.flush(_WRITE_SECONDS)

    def _record(self, key_id: str, data_key: bytes, master: MasterKey | None) -> OutgoingRecord:
        event = wrapped(key_id, data_key, master, nonce=self._random_bytes(NONCE_BYTES), now=self._clock.now())
        return encode(event, topic=self._topic, key=key_id, event_id=key_id, source=self._source)


def wrapped(key_id: str, data_key: bytes, master: MasterKey | None, *, nonce: bytes, now: datetime) -> SessionKeyEvent:
    """A key as it stands on the log."""
    stored = data_key if master is None else master.wrap(data_key, key_id=key_id, nonce=nonce)
    return SessionKeyEvent(
        key_id=key_id,
        data_key=base64.b64encode(stored).decode(),
        master_key_id="" if master is None else master.key_id,
        created_at=now,
    )


def unwrapped(key_id: str, event: SessionKeyEvent, masters: MasterKeys) -> bytes:
    """The key itself. Raises SettingsError when it is wrapped by a master key that we do not have.

    Raises DecodeError for what is damaged.
    """
    try:
        data_key = base64.b64decode(event.data_key, validate=True)
    except binascii.Error as error:
        raise DecodeError(f"session key {key_id}: not base64") from error
    if event.master_key_id:
        master = masters.get(event.master_key_id)
        if master is None:
            raise SettingsError(
                f"session key {key_id} is wrapped by master key {event.master_key_id}, ours is {masters.ids}; "
                "see kafka.encryption.master_key_file"
            )
        try:
            data_key = master.unwrap(data_key, key_id=key_id)
        except SettingsError as error:  # An id is a checksum of its key, so this is the right one.
            raise DecodeError(f"session key {key_id}: damaged: its master key {master.key_id} does not fit") from error
    if len(data_key) != KEY_BYTES:
        raise DecodeError(f"session key {key_id}: {len(data_key)} bytes, not {KEY_BYTES}")
    return data_key


def master_key_record(topic: str, master: MasterKey, *, now: datetime, source: str) -> OutgoingRecord:
    """Says that `master` counts from now on."""
    return encode(
        MasterKeyEvent(master_key_id=master.key_id, since=now),
        topic=topic,
        key=MASTER_KEY_RECORD,
        event_id=derive("master-key", master.key_id, int(now.timestamp() * 1e6)),
        source=source,
    )


def _prefix_of(key_id: str) -> str:
    return f"{key_id.rpartition('/')[0]}/"
