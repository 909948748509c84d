"""What an admin does with answers that a real controller gives only under load."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic

from clawstream.bus import kafka_admin
from clawstream.bus.interface import TopicSpecification
from clawstream.bus.kafka_admin import KafkaAdmin
from clawstream.errors import BusError

FENCED = "Unable to replicate the partition 1 time(s): All brokers are currently fenced."
TOO_MANY = "Unable to replicate the partition 3 time(s): The target replication factor of 3 cannot be reached."


class Controller:
    """Refuses each topic as often as it is told to, and then has it."""

    def __init__(self, refusals: dict[str, list[str]]) -> None:
        self.refusals = refusals
        self.asked: list[list[str]] = []
        self.made: set[str] = set()

    def create_topics(self, topics: Sequence[NewTopic], *, request_timeout: float) -> dict[str, Future[None]]:
        self.asked.append([each.topic for each in topics])
        return {each.topic: self._answer(each.topic) for each in topics}

    def _answer(self, name: str) -> Future[None]:
        future: Future[None] = Future()
        left = self.refusals.get(name, [])
        if left:
            future.set_exception(KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR, left.pop(0))))
        else:
            self.made.add(name)
            future.set_result(None)
        return future

    def list_topics(self, *, timeout: float) -> Any:
        return SimpleNamespace(topics={name: SimpleNamespace(error=None, partitions={0: None}) for name in self.made})

    def describe_configs(self, resources: Sequence[Any], *, request_timeout: float) -> dict[Any, Future[Any]]:
        found: dict[Any, Future[Any]] = {}
        for resource in resources:
            found[resource] = Future()
            found[resource].set_result({})
        return found


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Callable[[Controller], KafkaAdmin]:
    def make(controller: Controller) -> KafkaAdmin:
        monkeypatch.setattr(kafka_admin, "AdminClient", lambda properties: controller)
        return KafkaAdmin({})

    return make


def test_a_controller_that_fenced_its_brokers_is_asked_again_for_what_is_missing(
    admin: Callable[[Controller], KafkaAdmin],
) -> None:
    controller = Controller({"b": [FENCED, FENCED]})
    admin(controller).create_topics([TopicSpecification("a", 1, {}), TopicSpecification("b", 1, {})])
    assert controller.asked == [["a", "b"], ["b"], ["b"]]
    assert controller.made == {"a", "b"}


def test_too_many_replicas_are_refused_at_once(admin: Callable[[Controller], KafkaAdmin]) -> None:
    controller = Controller({"a": [TOO_MANY]})
    with pytest.raises(BusError, match=r"creating topic a: .*replication factor of 3"):
        admin(controller).create_topics([TopicSpecification("a", 1, {})])
    assert controller.asked == [["a"]]
