"""The librdkafka properties of every kind of client. No I/O.

What exactly-once rests on is set here and nowhere else; a user's `client_properties` cannot override it. Everything
else here is a default that they can.
"""

from collections.abc import Mapping
from typing import Final

from clawstream.errors import SettingsError

Properties = dict[str, str | int | bool]

SOCKET_TIMEOUT_SECONDS: Final = 10.0
"""How long a request may go unanswered. Bounds how late a lost EndTxn can still arrive."""
SLOW_END_OF_TRANSACTION_SECONDS: Final = 0.8 * SOCKET_TIMEOUT_SECONDS
"""librdkafka repeats an unanswered EndTxn silently; how long it took is the only sign. Below the socket timeout."""
TRANSACTION_TIMEOUT_SECONDS: Final = 20.0
"""Covers one flush and a broker's restart. Longer would block all readers behind a dead writer for longer."""
SESSION_TIMEOUT_SECONDS: Final = 15.0
"""How long the group keeps the place of a member that is silent."""
MAX_MESSAGE_BYTES: Final = 5 * 1024 * 1024
"""The largest limit of any topic; each topic's own `max.message.bytes` is the one that counts."""

_PROTECTED: Final = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "isolation.level",
        "message.max.bytes",
        "partition.assignment.strategy",
        "partitioner",
        "socket.timeout.ms",
        "transaction.timeout.ms",
        "transactional.id",
    }
)


def common(bootstrap_servers: str, client_id: str, client_properties: Mapping[str, str]) -> Properties:
    """What every client has. Raises SettingsError naming every property that must not be overridden."""
    forbidden = sorted(_PROTECTED & client_properties.keys())
    if forbidden:
        raise SettingsError(
            f"kafka.client_properties: {', '.join(forbidden)} cannot be changed: exactly-once rests on it; remove it"
        )
    return {
        "socket.timeout.ms": _milliseconds(SOCKET_TIMEOUT_SECONDS),
        "socket.keepalive.enable": True,
        # A restarted broker is found again within a second instead of ten.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1000,
        **client_properties,
        "bootstrap.servers": bootstrap_servers,
        "client.id": client_id,
    }


def _reading() -> Properties:
    return {
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A position that the log does not have is an error that we decide about, never a silent jump.
        "auto.offset.reset": "error",
        # The end of a partition is the only sign that trailing markers and aborted records were passed.
        "enable.partition.eof": True,
        # Little read ahead: what waits here is memory, and is thrown away on pause and rebalance.
        "queued.min.messages": 64,
        "queued.max.messages.kbytes": 8192,
        # After so much is read ahead: with the default of a second, one partition would give 64 records a second.
        "fetch.queue.backoff.ms": 10,
    }


def group_consumer(base: Properties, *, group: str, instance: str) -> Properties:
    """A static member, classic protocol: with KIP-848 a restarted static member waits for its old session's end."""
    return {
        **_reading(),
        "group.id": group,
        "group.instance.id": instance,
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": _milliseconds(SESSION_TIMEOUT_SECONDS),
        "heartbeat.interval.ms": 1000,
        "max.poll.interval.ms": 300_000,
        **base,
    }


def reader(base: Properties) -> Properties:
    """A consumer without a group. librdkafka wants a group id even so; nothing is ever committed under it."""
    return {
        **_reading(),
        "group.id": f"{base['client.id']}.reader",
        # A seek waits for the fetch that is under way: without new records that is this long.
        "fetch.wait.max.ms": 50,
        "queued.min.messages": 1000,
        **base,
    }


def follower(base: Properties) -> Properties:
    """As `reader`, for one that stays at the end. New records are sent at once however long the wait; but every empty
    answer costs the broker as much as a full one, and three idle readers at 50 ms took a tenth of a core."""
    return {**reader(base), "fetch.wait.max.ms": 500}


def producer(base: Properties) -> Properties:
    """Idempotent, all acknowledgements."""
    return {
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "compression.type": "zstd",
        "linger.ms": 5,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        **base,
    }


def transactional_producer(
    base: Properties, *, transactional_id: str, timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS
) -> Properties:
    """As `producer`, in transactions that the broker ends when they are open for longer than `timeout_seconds`."""
    return {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": _milliseconds(timeout_seconds),
        # While the markers of the last transaction are being written, the next one is told to try again. That takes
        # milliseconds; the default of 100 ms would be most of a transaction's time.
        "retry.backoff.ms": 10,
        **producer(base),
    }


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
