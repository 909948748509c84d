"""Deleting the keys of sessions. Needs no master key: a tombstone asks for none."""

from collections.abc import Iterable

from clawstream.bus.interface import Bus, OutgoingRecord
from clawstream.bus.overtaken import telling_who_overtook
from clawstream.bus.ranges import latest_of_topic
from clawstream.bus.write_together import write_together
from clawstream.encryption.session_keys import key_prefix, session_prefix
from clawstream.topics import SESSION_KEYS, full_name


def keys_of_session(bus: Bus, namespace: str, session_id: str) -> list[bytes]:
    """Ids of all keys that this session has now, whoever speaks in it. Raises BusError."""
    prefix = session_prefix(session_id).encode()
    return [key for key in _live_keys(bus, namespace) if key.startswith(prefix)]


def keys_of_principal(bus: Bus, namespace: str, principal: str, session_ids: Iterable[str]) -> list[bytes]:
    """Ids of the keys that a principal has in these sessions, and of those of their paid calls. Raises BusError."""
    prefixes = {key_prefix(session_id, name).encode() for session_id in session_ids for name in (principal, "")}
    if not prefixes:
        return []
    return [key for key in _live_keys(bus, namespace) if b"%b/" % key.rpartition(b"/")[0] in prefixes]


def _live_keys(bus: Bus, namespace: str) -> Iterable[bytes]:
    return latest_of_topic(bus, full_name(namespace, SESSION_KEYS))


def delete_keys(bus: Bus, namespace: str, key_ids: Iterable[bytes], source: str) -> None:
    """A tombstone for each, committed when this returns: what they encrypt can be read by nobody who starts now.

    In one transaction of the id that `Rotation` writes by: a rotation that has read a key before it was deleted is
    fenced, and cannot bring it back. Raises BusError, and Overtaken when a rotation came in between: then do it again.
    """
    topic = full_name(namespace, SESSION_KEYS)
    producer = bus.transactional_producer(keys_transactional_id(namespace))
    try:
        with telling_who_overtook(
            f"{topic}: deleting the keys of what is to be forgotten",
            "`clawstream keys rotate`, or another `clawstream forget`,",
            then="Until they are deleted what they encrypt can still be read: run `clawstream forget` again, when the "
            "other command has ended",
        ):
            write_together(
                producer, (OutgoingRecord(topic, key_id, None, (("ce_source", source.encode()),)) for key_id in key_ids)
            )
    finally:
        producer.close()


def keys_transactional_id(namespace: str) -> str:
    """Of everybody who replaces or deletes keys that are on the log: one at a time."""
    return f"{namespace}.session-keys"
