"""The local broker over real Kafka: durable over stop and kill, honest about what is missing."""

import socket
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from clawstream.broker import LocalBroker
from clawstream.errors import SupervisorError
from tests.fixtures.broker import missing, short_lived_broker

pytestmark = pytest.mark.kafka


@pytest.fixture
def own_broker(tmp_path: Path, local_broker: LocalBroker):
    """A broker that the test may kill. The shared one is named so that a lack of Java is reported once."""
    instance = short_lived_broker(tmp_path / "broker")
    yield instance
    instance.stop()


def create_topic(bootstrap_servers: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(name, num_partitions=1)])[name].result(timeout=30)


def write(bootstrap_servers: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def read_all(bootstrap_servers: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes | None] = []
    while len(values) < count:
        message = consumer.poll(30)
        assert message is not None, f"only {values} of {count} records"
        assert message.error() is None
        values.append(message.value())
    consumer.close()
    return values


def test_acknowledged_records_survive_stop_and_kill(own_broker: LocalBroker) -> None:
    address = own_broker.start()
    create_topic(address, "durable")
    write(address, "durable", b"before stop")
    assert own_broker.restart() == address, "a restart keeps the address"
    write(address, "durable", b"before kill")
    own_broker.kill()
    assert own_broker.running() is None
    assert own_broker.start() == address
    assert read_all(address, "durable", 2) == [b"before stop", b"before kill"]


def test_another_process_finds_and_stops_the_broker(own_broker: LocalBroker) -> None:
    address = own_broker.start()
    stranger = LocalBroker(own_broker.directory)
    identity = stranger.running()
    assert identity is not None
    assert stranger.start() == address, "starting a running broker is harmless"
    assert stranger.running() == identity
    assert stranger.stop()
    assert not identity.is_alive()
    assert not stranger.stop(), "nothing is left to stop"


def test_controller_port_taken_at_restart(own_broker: LocalBroker) -> None:
    address = own_broker.start()
    create_topic(address, "kept")
    own_broker.stop()
    recorded = own_broker.directory / "broker.json"
    controller_port = int(recorded.read_text().split('"controller_port":')[1].rstrip("}"))
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", controller_port))
        squatter.listen()
        assert own_broker.start() == address
        assert "kept" in AdminClient({"bootstrap.servers": address}).list_topics(timeout=60).topics


def test_topics_are_not_created_by_accident(broker: str, namespace: str) -> None:
    producer = Producer({"bootstrap.servers": broker, "message.timeout.ms": 3000, "log_level": 0})
    failures: list[str] = []
    producer.produce(f"{namespace}.typo", b"x", on_delivery=lambda error, _message: failures.append(str(error)))
    producer.flush(30)
    assert len(failures) == 1
    assert failures[0] != "None"
    assert f"{namespace}.typo" not in AdminClient({"bootstrap.servers": broker}).list_topics(timeout=60).topics


def test_taken_port_names_its_owner(local_broker: LocalBroker, tmp_path: Path) -> None:
    identity = local_broker.running()
    assert identity is not None
    second = LocalBroker(tmp_path / "second", port=local_broker.port)
    with pytest.raises(SupervisorError, match=rf"port {local_broker.port} is taken by pid {identity.pid} \(java\)"):
        second.start()


def test_a_broker_that_cannot_start_says_why(own_broker: LocalBroker) -> None:
    own_broker.start()
    own_broker.stop()
    (own_broker.directory / "data" / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=other\n")
    with pytest.raises(SupervisorError, match=r"(?s)ended:\n.*Stored node id 7 doesn't match"):
        own_broker.start()


def test_lack_is_a_skip_locally_and_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Java"):
        missing("no Java")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Java"):
        missing("no Java")


def test_any_cluster_id_can_be_formatted(tmp_path: Path, local_broker: LocalBroker) -> None:
    """One id in 64 begins with a dash in base64 and must not be read as an option."""
    dashed = uuid.UUID(bytes=b"\xfb" + bytes(15))
    instance = short_lived_broker(tmp_path / "broker", new_id=lambda: dashed)
    try:
        instance.start()
        assert AdminClient({"bootstrap.servers": instance.bootstrap_servers}).list_topics(timeout=60).cluster_id == (
            "-wAAAAAAAAAAAAAAAAAAAA"
        )
    finally:
        instance.stop()
