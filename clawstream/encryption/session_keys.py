"""The keys of sessions: a fold of the topic `session-keys`, and the making of new ones. Thread-safe.

A key is on the log, acknowledged, before the first record that it encrypts. So a reader that meets an id that it does
not know reads the topic to its present end: what is not there then was deleted.
"""

import base64
import binascii
import threading
import uuid
from collections.abc import Callable

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, OutgoingRecord, Producer, Record
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode
from clawstream.encryption.envelope import KEY_BYTES, NONCE_BYTES
from clawstream.encryption.master_key import MasterKey
from clawstream.errors import DecodeError, SettingsError
from clawstream.ids import IdSource, derive
from clawstream.topics import SESSION_KEYS, full_name
from schemas.events.session_key import SessionKeyEvent

_REFRESH_SECONDS = 0.5
_WRITE_SECONDS = 10.0
_PRINCIPAL_DIGITS = 8


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
        master: MasterKey | None,
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
        self._master = master
        self._source = source
        self._renews = renews
        self._clock = clock
        self._random_bytes = random_bytes
        self._new_id = new_id
        self._lock = threading.Lock()
        self._reader: LogReader | None = None
        self._producer: Producer | None = None
        self._refreshed_at = 0.0
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
                reader.bootstrap(self._apply)
                if key_id not in self._keys and key_id not in self._unusable:
                    self._absent.add(key_id)
            if key_id in self._unusable:
                raise SettingsError(self._unusable[key_id])
            return self._keys.get(key_id)

    def for_writing(self, session_id: str, principal: str) -> tuple[str, bytes]:
        """Id and key for what is written of a session now; made, and on the log, when there is none.

        Raises BusError when a new one cannot be written.
        """
        prefix = key_prefix(session_id, principal)
        with self._lock:
            self._refreshed()
            key_id = self._key_ids.get(prefix)
            if key_id is not None:
                return key_id, self._keys[key_id]
            key_id, data_key = f"{prefix}{self._new_id()}", self._random_bytes(KEY_BYTES)
            if prefix in self._deleted and not self._renews:
                return key_id, data_key
            self._write(key_id, data_key)
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
            self._reader, self._refreshed_at = reader, now
        elif now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            while records := self._reader.poll(0.0):
                for record in records:
                    self._apply(record)
        return self._reader

    def _apply(self, record: Record) -> None:
        if record.key is None:
            return
        key_id = record.key.decode(errors="replace")
        prefix = _prefix_of(key_id)
        if record.value is None:
            self._keys.pop(key_id, None)
            self._unusable.pop(key_id, None)
            self._deleted.add(prefix)
            if self._key_ids.get(prefix) == key_id:
                del self._key_ids[prefix]
            return
        try:
            self._remember(key_id, self._unwrapped(key_id, decode_as(record, SessionKeyEvent)))
        except (DecodeError, SettingsError) as error:
            self._unusable[key_id] = f"{record}: {error}"

    def _remember(self, key_id: str, data_key: bytes) -> None:
        self._keys[key_id] = data_key
        self._key_ids[_prefix_of(key_id)] = key_id

    def _unwrapped(self, key_id: str, event: SessionKeyEvent) -> bytes:
        try:
            data_key = base64.b64decode(event.data_key, validate=True)
        except binascii.Error as error:
            raise DecodeError(f"session key {key_id}: not base64") from error
        if event.master_key_id:
            if self._master is None or self._master.key_id != event.master_key_id:
                ours = "none" if self._master is None else self._master.key_id
                raise SettingsError(
                    f"session key {key_id} is wrapped by master key {event.master_key_id}, ours is {ours}; "
                    "see kafka.encryption.master_key_file"
                )
            data_key = self._master.unwrap(data_key, key_id=key_id)
        if len(data_key) != KEY_BYTES:
            raise DecodeError(f"session key {key_id}: {len(data_key)} bytes, not {KEY_BYTES}")
        return data_key

    def _write(self, key_id: str, data_key: bytes) -> None:
        if self._producer is None:
            self._producer = self._bus.producer()
        master = self._master
        stored = data_key
        if master is not None:
            stored = master.wrap(data_key, key_id=key_id, nonce=self._random_bytes(NONCE_BYTES))
        self._producer.produce(self._record(key_id, stored, "" if master is None else master.key_id))
        self._producer.flush(_WRITE_SECONDS)

    def _record(self, key_id: str, stored: bytes, master_key_id: str) -> OutgoingRecord:
        event = SessionKeyEvent(
            key_id=key_id,
            data_key=base64.b64encode(stored).decode(),
            master_key_id=master_key_id,
            created_at=self._clock.now(),
        )
        return encode(event, topic=self._topic, key=key_id, event_id=key_id, source=self._source)


def _prefix_of(key_id: str) -> str:
    return f"{key_id.rpartition('/')[0]}/"
