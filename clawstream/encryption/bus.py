"""A bus whose clients encrypt content as it is written and decrypt it as it is read: nothing else knows of it.

Records of which the key was deleted come as they lie on the log, marked `unreadable`. Tombstones, records without
content, and copies of encrypted ones (dead letters, what is sent back, restored archives) pass through untouched.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import orjson

from clawstream.bus.forwarding import ForwardingConsumer, ForwardingTransactionalProducer
from clawstream.bus.interface import (
    Admin,
    Bus,
    Consumer,
    Delivery,
    DeliveryCallback,
    GroupMetadata,
    OutgoingRecord,
    Producer,
    RebalanceCallbacks,
    Record,
    TopicPartition,
    TransactionalProducer,
)
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.codec import header
from clawstream.encryption.envelope import KEY_HEADER, NONCE_BYTES, associated_data, decrypt, encrypt
from clawstream.encryption.master_key import MasterKeys, load_master_keys
from clawstream.encryption.session_keys import SessionKeys
from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    DecodeError,
    FatalBusError,
    ForgottenContent,
    RecordRejected,
    TransactionAbortable,
)
from clawstream.settings import KafkaSettings
from schemas.events import EVENT_MODELS

_KEY_SECONDS: Final = 60.0
"""How long a reader waits for a broker that tells a key. Records that it holds must not be lost, so then it ends."""
_RETRY_SECONDS: Final = 0.5
_COPIED: Final = (KEY_HEADER, "dlq.topic")


def open_bus(kafka: KafkaSettings, *, client_id: str, renews_keys: bool = False) -> "EncryptedBus":
    """The bus of a process: Kafka's, with content encrypted where the settings say so, and decrypted wherever it is.

    `renews_keys`: of who records conversations (see `SessionKeys`). Raises SettingsError.
    """
    return encrypting(KafkaBus(kafka, client_id=client_id), kafka, client_id=client_id, renews_keys=renews_keys)


def encrypting(bus: Bus, kafka: KafkaSettings, *, client_id: str, renews_keys: bool) -> "EncryptedBus":
    """`open_bus` around any bus."""
    keys = SessionKeys(
        bus,
        kafka.namespace,
        MasterKeys(lambda: load_master_keys(kafka.encryption, os.environ)),
        source=client_id,
        renews=renews_keys,
        clock=SystemClock(),
        random_bytes=os.urandom,
    )
    return EncryptedBus(bus, keys, encrypts=kafka.encryption.sessions)


class EncryptedBus:
    """Implements `Bus` around another."""

    def __init__(
        self,
        inner: Bus,
        keys: SessionKeys,
        *,
        encrypts: bool,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """What is encrypted is decrypted whatever `encrypts` says."""
        self._inner = inner
        self._keys = keys
        self._encryption = Encryption(keys, random_bytes) if encrypts else None

    def check_keys(self) -> None:
        """Whether what this process is about to encrypt could be read by others. Reads the key topic.

        Raises SettingsError for another master key than the log names, and BusError.
        """
        if self._encryption is not None:
            self._keys.check()

    def group_consumer(
        self, topics: Sequence[str], *, group: str, instance: str, callbacks: RebalanceCallbacks
    ) -> Consumer:
        consumer = self._inner.group_consumer(topics, group=group, instance=instance, callbacks=callbacks)
        return _DecryptingConsumer(consumer, self._keys)

    def reader(self) -> Consumer:
        return _DecryptingConsumer(self._inner.reader(), self._keys)

    def follower(self) -> Consumer:
        return _DecryptingConsumer(self._inner.follower(), self._keys)

    def producer(self) -> Producer:
        producer = self._inner.producer()
        return producer if self._encryption is None else _EncryptingProducer(producer, self._encryption)

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        producer = self._inner.transactional_producer(transactional_id)
        return producer if self._encryption is None else _EncryptingTransactionalProducer(producer, self._encryption)

    def admin(self) -> Admin:
        return self._inner.admin()


@dataclass(frozen=True, slots=True)
class _EncryptedRecord(OutgoingRecord):
    """Remembers what it was made of, for whoever asks which of his records was refused."""

    plain: OutgoingRecord | None = None


class Encryption:
    """Encrypts what is about to be written."""

    def __init__(self, keys: SessionKeys, random_bytes: Callable[[int], bytes]) -> None:
        self._keys = keys
        self._random_bytes = random_bytes

    def of(self, record: OutgoingRecord) -> OutgoingRecord:
        """`record` with its content encrypted, if it has content that is not encrypted yet. Raises BusError."""
        if record.value is None or any(name in _COPIED for name, _ in record.headers):
            return record
        model = EVENT_MODELS.get(header(record.headers, "ce_type") or "")
        if model is None or not model.content_fields:
            return record
        document = cast("dict[str, Any]", orjson.loads(record.value))
        key_id, key = self._keys.for_writing(document["session_id"], document.get("principal", ""))
        bound = associated_data(record.headers, record.key, key_id)
        return _EncryptedRecord(
            topic=record.topic,
            key=record.key,
            value=encrypt(document, model.content_fields, key, bound=bound, nonce=self._random_bytes(NONCE_BYTES)),
            headers=(*record.headers, (KEY_HEADER, key_id.encode())),
            partition=record.partition,
            timestamp_milliseconds=record.timestamp_milliseconds,
            plain=record,
        )


def decrypted(record: Record, keys: SessionKeys) -> Record:
    """`record` as it was before it was encrypted, or marked unreadable. Raises BusError and SettingsError."""
    if record.value is None:
        return record
    key_id = header(record.headers, KEY_HEADER)
    if key_id is None:
        return record
    key = keys.find(key_id)
    if key is None:
        return replace(record, unreadable=ForgottenContent(f"{record}: its content is forgotten: {key_id} was deleted"))
    bound = associated_data(record.headers, record.key, key_id)
    try:
        value = decrypt(record.value, key, bound=bound, where=str(record))
    except DecodeError as error:
        return replace(record, unreadable=error)
    return replace(record, value=value, encrypted_value=record.value)


class _DecryptingConsumer(ForwardingConsumer):
    def __init__(self, inner: Consumer, keys: SessionKeys) -> None:
        super().__init__(inner)
        self._keys = keys

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        return [self._decrypted(record) for record in super().consume(max_records, timeout_seconds)]

    def _decrypted(self, record: Record) -> Record:
        give_up_at = time.monotonic() + _KEY_SECONDS
        while True:
            try:
                return decrypted(record, self._keys)
            except BrokerUnavailable as error:
                if time.monotonic() >= give_up_at:
                    raise FatalBusError(f"{record}: no broker tells its key: {error}") from error
                time.sleep(_RETRY_SECONDS)


class _EncryptingProducer:
    def __init__(self, inner: Producer, encryption: Encryption) -> None:
        self._inner = inner
        self._encryption = encryption

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        encrypted = self._encryption.of(record)
        _naming_plain_records(lambda: self._inner.produce(encrypted, _plain_delivery(on_delivery)))

    def poll(self, timeout_seconds: float = 0.0) -> None:
        self._inner.poll(timeout_seconds)

    def flush(self, timeout_seconds: float) -> None:
        _naming_plain_records(lambda: self._inner.flush(timeout_seconds))

    def close(self) -> None:
        self._inner.close()


class _EncryptingTransactionalProducer(ForwardingTransactionalProducer):
    def __init__(self, inner: TransactionalProducer, encryption: Encryption) -> None:
        super().__init__(inner)
        self._encryption = encryption

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        try:
            encrypted = self._encryption.of(record)
        except FatalBusError:
            raise
        except BusError as error:
            raise TransactionAbortable(f"no key for a record of {record.topic}: {error}") from error
        _naming_plain_records(lambda: self._inner.produce(encrypted, _plain_delivery(on_delivery)))

    def flush(self, timeout_seconds: float) -> None:
        _naming_plain_records(lambda: self._inner.flush(timeout_seconds))

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        _naming_plain_records(lambda: self._inner.send_offsets(offsets, group))

    def commit(self) -> None:
        _naming_plain_records(self._inner.commit)


def _plain_delivery(callback: DeliveryCallback | None) -> DeliveryCallback | None:
    if callback is None:
        return None

    def delivered(delivery: Delivery) -> None:
        plain = delivery.record.plain if isinstance(delivery.record, _EncryptedRecord) else None
        callback(delivery if plain is None else replace(delivery, record=plain))

    return delivered


def _naming_plain_records(call: Callable[[], None]) -> None:
    """A refused record is named as the caller knows it: he looks for it among his own."""
    try:
        call()
    except RecordRejected as error:
        if isinstance(error.record, _EncryptedRecord) and error.record.plain is not None:
            error.record = error.record.plain
        raise
