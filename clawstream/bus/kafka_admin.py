# pyright: basic, reportPrivateImportUsage=false
# The futures of confluent-kafka are untyped, and its admin types are re-exported without being declared so.
"""Topic administration over librdkafka."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar, cast

from confluent_kafka import ConsumerGroupTopicPartitions, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as LibrdkafkaTopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from clawstream.bus.interface import TopicDescription, TopicPartition, TopicSpecification
from clawstream.bus.kafka_errors import kafka_error, translate
from clawstream.bus.kafka_properties import Properties
from clawstream.errors import BrokerUnavailable, BusError, TopicDefinitionError

_REQUEST_SECONDS: Final = 30.0
_METADATA_SECONDS: Final = 5.0
_VISIBLE_SECONDS: Final = 60.0
"""All our topics at once are 139 partitions, each with files to make: on a busy machine that takes longer than 10 s."""
_PROPAGATION_SECONDS: Final = 0.02
_FENCED_SECONDS: Final = 0.2
_ALL_FENCED: Final = "currently fenced"
"""From the controller's text. The code, INVALID_REPLICATION_FACTOR, is also that of a real mistake."""
Result = TypeVar("Result")


class KafkaAdmin:
    """Implements `Admin`."""

    def __init__(self, properties: Properties) -> None:
        # Errors reach the caller; librdkafka would print each failed attempt to connect as well.
        self._client = AdminClient({**properties, "log_level": 2})
        self._servers = properties.get("bootstrap.servers", "")

    def create_topics(self, topics: Sequence[TopicSpecification]) -> None:
        if not topics:
            return
        new = [
            NewTopic(
                each.name,
                num_partitions=each.partitions,
                replication_factor=each.replication_factor,
                config=dict(each.config),
            )
            for each in topics
        ]
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while new:
            futures = self._call(
                "creating topics", partial(self._client.create_topics, new, request_timeout=_REQUEST_SECONDS)
            )
            may_wait = time.monotonic() < deadline
            new = [each for each in new if not self._is_created(each.topic, futures[each.topic], may_wait=may_wait)]
            if new:
                time.sleep(_FENCED_SECONDS)
        self._wait(lambda: set(self.describe_topics([each.name for each in topics])) == {each.name for each in topics})

    def _is_created(self, name: str, future: "Future[Any]", *, may_wait: bool) -> bool:
        """False while the controller has fenced all brokers: one that was starved for seconds, or just started, is back
        soon. Raises what else went wrong."""
        try:
            self._result(future, f"creating topic {name}")
        except BusError as error:
            if may_wait and _ALL_FENCED in str(error):
                return False
            raise
        return True

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicDescription]:
        metadata = self._metadata()
        existing = [name for name in names if name in metadata.topics and metadata.topics[name].error is None]
        if not existing:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in existing]
        futures = self._call(
            "describing topics", lambda: self._client.describe_configs(resources, request_timeout=_REQUEST_SECONDS)
        )
        descriptions: dict[str, TopicDescription] = {}
        for resource, future in futures.items():
            name = resource.name
            entries = cast("dict[str, ConfigEntry]", self._result(future, f"describing topic {name}"))
            config = {key: str(entry.value) for key, entry in entries.items() if entry.value is not None}
            descriptions[name] = TopicDescription(name, len(metadata.topics[name].partitions), config)
        return descriptions

    def alter_topic_config(self, name: str, config: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        futures = self._call(
            f"changing topic {name}",
            lambda: self._client.incremental_alter_configs([resource], request_timeout=_REQUEST_SECONDS),
        )
        for future in futures.values():
            self._result(future, f"changing the configuration of topic {name}")
        self._wait(lambda: config.items() <= self.describe_topics([name])[name].config.items())

    def partitions(self, topic: str) -> list[TopicPartition]:
        metadata = self._metadata()
        found = metadata.topics.get(topic)
        if found is None or found.error is not None:
            raise BusError(f"topic {topic} does not exist; run `clawstream topics apply`")
        return [TopicPartition(topic, number) for number in sorted(found.partitions)]

    def high_watermarks(self, topic: str) -> dict[TopicPartition, int]:
        doing = f"asking for the ends of topic {topic}"
        wanted = {
            LibrdkafkaTopicPartition(topic, partition.partition): cast("OffsetSpec", OffsetSpec.latest())
            for partition in self.partitions(topic)
        }
        futures = self._call(
            doing,
            lambda: self._client.list_offsets(
                wanted, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_REQUEST_SECONDS
            ),
        )
        return {
            TopicPartition(place.topic, place.partition): self._result(future, doing).offset
            for place, future in futures.items()
        }

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        request = [ConsumerGroupTopicPartitions(group)]
        futures = self._call(
            f"reading offsets of group {group}",
            lambda: self._client.list_consumer_group_offsets(
                request, require_stable=False, request_timeout=_REQUEST_SECONDS
            ),
        )
        result = self._result(futures[group], f"reading offsets of group {group}")
        return {
            TopicPartition(each.topic, each.partition): each.offset
            for each in cast("ConsumerGroupTopicPartitions", result).topic_partitions or []
            if each.offset >= 0
        }

    def set_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        positions = [
            LibrdkafkaTopicPartition(partition.topic, partition.partition, offset)
            for partition, offset in offsets.items()
        ]
        doing = f"setting offsets of group {group}"
        futures = self._call(
            doing,
            lambda: self._client.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group, positions)], request_timeout=_REQUEST_SECONDS
            ),
        )
        result = cast("ConsumerGroupTopicPartitions", self._result(futures[group], doing))
        for each in result.topic_partitions or []:
            if each.error is not None:
                raise translate(each.error, f"{doing}: {each.topic}[{each.partition}]")

    def close(self) -> None:
        self._client.poll(0)

    def _wait(self, is_visible: Callable[[], bool]) -> None:
        """The controller answers before the brokers know. Callers expect to see what they did."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not is_visible():
            if time.monotonic() >= deadline:
                raise BrokerUnavailable(f"a change of topics is not visible after {_VISIBLE_SECONDS:.0f} seconds")
            time.sleep(_PROPAGATION_SECONDS)

    def _metadata(self) -> Any:
        return self._call(
            f"listing topics of {self._servers}", lambda: self._client.list_topics(timeout=_METADATA_SECONDS)
        )

    def _call(self, doing: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except KafkaException as exception:
            raise translate(kafka_error(exception), doing) from exception

    def _result(self, future: "Future[Any]", doing: str) -> Any:
        try:
            return future.result()
        except KafkaException as exception:
            error = kafka_error(exception)
            if error.code() in {KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.INVALID_CONFIG}:
                raise TopicDefinitionError(f"{doing}: {error.str()}") from exception
            raise translate(error, doing) from exception
