"""The bus over Apache Kafka. Everything of confluent-kafka stays inside the `kafka_*` modules of this package."""

from collections.abc import Sequence

from clawstream.bus import kafka_properties
from clawstream.bus.interface import Admin, Consumer, Producer, RebalanceCallbacks, TransactionalProducer
from clawstream.bus.kafka_admin import KafkaAdmin
from clawstream.bus.kafka_consumer import KafkaConsumer
from clawstream.bus.kafka_producer import KafkaProducer
from clawstream.bus.kafka_properties import TRANSACTION_TIMEOUT_SECONDS
from clawstream.bus.kafka_transactional_producer import KafkaTransactionalProducer
from clawstream.settings import KafkaSettings


class KafkaBus:
    """Implements `Bus`. Makes clients; holds none."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        client_id: str,
        transaction_timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS,
    ) -> None:
        """`client_id` is the process's name. Raises SettingsError for client properties that must not be set."""
        self._settings = settings
        self._transaction_timeout_seconds = transaction_timeout_seconds
        self._base = kafka_properties.common(settings.bootstrap_servers, client_id, settings.client_properties)

    @property
    def bootstrap_servers(self) -> str:
        """Where the cluster is, for messages."""
        return self._settings.bootstrap_servers

    def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        instance: str,
        callbacks: RebalanceCallbacks,
    ) -> Consumer:
        return KafkaConsumer(
            kafka_properties.group_consumer(self._base, group=group, instance=instance),
            topics=topics,
            callbacks=callbacks,
            continue_after_missing_records=self._settings.missing_records == "continue",
        )

    def reader(self) -> Consumer:
        return KafkaConsumer(kafka_properties.reader(self._base))

    def follower(self) -> Consumer:
        return KafkaConsumer(kafka_properties.follower(self._base))

    def producer(self) -> Producer:
        return KafkaProducer(kafka_properties.producer(self._base))

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        return KafkaTransactionalProducer(
            kafka_properties.transactional_producer(
                self._base,
                transactional_id=transactional_id,
                timeout_seconds=self._transaction_timeout_seconds,
            ),
            transactional_id=transactional_id,
            transaction_timeout_seconds=self._transaction_timeout_seconds,
        )

    def admin(self) -> Admin:
        return KafkaAdmin(self._base)
