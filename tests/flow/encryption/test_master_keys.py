"""Another master key while processes read and write, killed in the middle; and a gateway with a wrong one."""

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream import topics
from clawstream.bus.interface import TopicPartition
from clawstream.codec import decode_as, encode
from clawstream.encryption.bus import open_bus
from clawstream.encryption.deletion import delete_keys, keys_of_session
from clawstream.encryption.master_key import MasterKey
from clawstream.encryption.rotation import read_keys
from clawstream.encryption.session_keys import key_prefix, wrapped
from clawstream.errors import ForgottenContent
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, EncryptionSettings, KafkaSettings
from clawstream.topics import full_name
from schemas.events import TurnEvent
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.configuration import kafka_toml
from tests.fixtures.remembered_log import RememberedLog
from tests.fixtures.service_process import REPOSITORY, ServiceProcess
from tests.fixtures.stub_engine import StubEngine
from tests.fixtures.system import wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]
OLD, NEW = MasterKey(b"o" * 32), MasterKey(b"n" * 32)
IDLE_SESSIONS = 20_000
"""Of which nobody speaks: enough for a rotation to be killed before its end."""


def write_file(file: Path, *keys: MasterKey) -> None:
    file.write_text("".join(f"{base64.b64encode(key.key).decode()}\n" for key in keys))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "master.key"
    write_file(file, OLD)
    return file


@pytest.fixture
def settings(broker: str, namespace: str, file: Path) -> KafkaSettings:
    encryption = EncryptionSettings(sessions=True, master_key_file=file)
    return KafkaSettings(bootstrap_servers=broker, namespace=namespace, encryption=encryption)


def kafka_section(settings: KafkaSettings, file: Path) -> str:
    shared = kafka_toml(settings.bootstrap_servers, settings.namespace)
    return f'{shared}[kafka.encryption]\nsessions = true\nmaster_key_file = "{file}"\n'


@pytest.fixture
def config(settings: KafkaSettings, file: Path, tmp_path: Path) -> Path:
    config = tmp_path / "clawstream.toml"
    config.write_text(kafka_section(settings, file))
    return config


def keys_command(config: Path, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "clawstream", "keys", name, "--config", str(config)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def make_idle_sessions(settings: KafkaSettings) -> None:
    producer = kafka_bus(settings.bootstrap_servers, "tests").producer()
    for number in range(IDLE_SESSIONS):
        key_id = f"{key_prefix(f'idle-{number}', 'alice')}{number}"
        event = wrapped(
            key_id, number.to_bytes(32), OLD, nonce=number.to_bytes(12), now=datetime(2026, 1, 1, tzinfo=UTC)
        )
        topic = full_name(settings.namespace, topics.SESSION_KEYS)
        producer.produce(encode(event, topic=topic, key=key_id, event_id=key_id, source="tests"))
        if number % 1000 == 0:
            producer.poll()
    producer.flush(120.0)
    producer.close()


def end_of_keys(settings: KafkaSettings) -> int:
    reader = kafka_bus(settings.bootstrap_servers, "tests").reader()
    try:
        return reader.watermarks(TopicPartition(full_name(settings.namespace, topics.SESSION_KEYS), 0))[1]
    finally:
        reader.close()


def sessions_read(settings: KafkaSettings) -> list[str]:
    """As a process that starts now: of the turns that it can read."""
    records = read_all(open_bus(settings, client_id="late"), full_name(settings.namespace, topics.TURNS))
    readable = [record for record in records if not isinstance(record.unreadable, ForgottenContent)]
    return sorted(decode_as(record, TurnEvent).session_id for record in readable)


def test_a_rotation_that_is_killed_disturbs_nobody_and_is_finished_by_the_next(
    settings: KafkaSettings, config: Path, file: Path, tmp_path: Path
) -> None:
    running = open_bus(settings, client_id="tests", renews_keys=True)
    log = RememberedLog(running, settings.namespace, tmp_path, encrypts_blobs=True)
    running.check_keys()
    log.converse(1, "before", "alice")
    make_idle_sessions(settings)
    plain = kafka_bus(settings.bootstrap_servers, "tests")
    delete_keys(plain, settings.namespace, keys_of_session(plain, settings.namespace, "idle-0"), "tests")
    write_file(file, OLD, NEW)

    end = end_of_keys(settings)
    killed = keys_command(config, "rotate")
    wait_for(lambda: end_of_keys(settings) > end + 1000 or killed.poll() is not None, "it wraps keys anew")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    log.converse(2, "after-the-kill", "alice")
    log.converse(3, "before", "alice")
    assert sessions_read(settings) == ["after-the-kill", "before", "before"]
    half = read_keys(plain, settings.namespace)
    assert half.named == NEW.key_id
    assert half.counts()[OLD.key_id] > 0, "it was killed before its end"
    assert half.counts()[NEW.key_id] > 0

    again = keys_command(config, "rotate")
    log.converse(4, "meanwhile", "alice")
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    log.converse(5, "later", "alice")
    whole = read_keys(plain, settings.namespace)
    assert set(whole.counts()) == {NEW.key_id}
    assert len(whole.keys) >= IDLE_SESSIONS - 1 + 4
    assert not keys_of_session(plain, settings.namespace, "idle-0"), "what was deleted stays deleted"

    write_file(file, NEW)
    assert sessions_read(settings) == ["after-the-kill", "before", "before", "later", "meanwhile"]
    status = keys_command(config, "status")
    said, _ = status.communicate(timeout=120)
    assert NEW.key_id in said
    assert OLD.key_id not in said, "it may be thrown away"


async def test_a_gateway_with_another_master_key_ends_before_it_writes_anything(
    settings: KafkaSettings,
    file: Path,
    tmp_path: Path,
    tiny_model_directory: Path,
    start_service: Callable[..., ServiceProcess],
) -> None:
    first = open_bus(settings, client_id="tests", renews_keys=True)
    RememberedLog(first, settings.namespace, tmp_path)  # Makes the topics.
    first.check_keys()
    write_file(file, NEW)
    before = end_of_keys(settings)
    async with StubEngine() as engine:
        gateway = start_service(
            "gateway",
            f"""\
data_directory = "{tmp_path / "data"}"
{kafka_section(settings, file)}[gateway]
model_path = "{tiny_model_directory}"
port = 0
max_context_tokens = 4096
engines = [{{ name = "one", url = "{engine.base_url}" }}]
""",
        )
        assert gateway.process.wait(180) == EXIT_CODE_WRONG_SETTINGS, gateway.text()
    assert OLD.key_id in gateway.text()
    assert NEW.key_id in gateway.text()
    assert end_of_keys(settings) == before
