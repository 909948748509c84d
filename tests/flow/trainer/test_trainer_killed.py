"""The trainer as a process on a real broker, killed with -9 at the worst moments.

What happened is read with kafka-python, which shares no code with the client that wrote it.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from clawstream import topics
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.settings import KafkaSettings
from clawstream.topics import full_name, topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable
from clawstream.weights.manifest import verify
from schemas.events import SampleEvent
from services.trainer.checkpoint import CheckpointStore
from services.trainer.ledger_file import LedgerFile
from services.trainer.progress import Progress
from tests.fixtures.configuration import small_trainer_toml
from tests.fixtures.samples import make_sample, sample_record
from tests.fixtures.second_opinion import committed_records
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 240.0


class TrainerProcess:
    """Starts, kills and starts again. Ends only its own processes."""

    def __init__(self, config: Path, log: Path) -> None:
        self._config = config
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer", "--config", str(self._config), "--process", "trainer"],
                stderr=log,
                stdout=log,
                env=environment,
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def tell_to_end(self) -> None:
        assert self._process is not None
        self._process.terminate()

    def exit_code(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_SECONDS)

    def stop(self) -> int:
        self.tell_to_end()
        return self.exit_code()

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._log.read_text(errors="replace")[-4000:]
                raise AssertionError(f"{what} did not happen (exit {self._process.poll()}):\n{log}")
            time.sleep(0.01)  # another process's files and topics: there is no event to await

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


def committed(broker: str, topic: str) -> list[tuple[bytes | None, dict[str, Any] | None]]:
    """Keys and values of everything committed, on a topic of one partition."""
    return [
        (record.key, orjson.loads(record.value) if record.value is not None else None)
        for record in committed_records(broker, topic, settled=True)
    ]


@pytest.fixture
def bus(broker: str, namespace: str) -> KafkaBus:
    settings = KafkaSettings(bootstrap_servers=broker, namespace=namespace)
    made = KafkaBus(settings, client_id="trainer-test")
    admin = made.admin()
    apply_topics(admin, namespace, 1, topic_definitions().values())
    admin.close()
    wait_until_readable(made, namespace, topic_definitions().values(), SystemClock(), timeout_seconds=60)
    return made


@pytest.fixture
def trainer(tmp_path: Path, broker: str, namespace: str) -> Iterator[TrainerProcess]:
    model = save_tiny_model("qwen3", tmp_path / "model")
    config = tmp_path / "clawstream.toml"
    config.write_text(
        small_trainer_toml(Path("data"), broker, namespace, model)
        + """\
[[processes]]
name = "trainer"
service = "trainer"
"""
    )
    process = TrainerProcess(config, tmp_path / "trainer.log")
    yield process
    process.close()


def put(bus: KafkaBus, namespace: str, events: list[SampleEvent]) -> None:
    producer = bus.producer()
    for event in events:
        producer.produce(sample_record(event, namespace))
    producer.flush(30)
    producer.close()


def test_kills_lose_no_sample_and_train_none_twice(
    bus: KafkaBus, trainer: TrainerProcess, broker: str, namespace: str, tmp_path: Path
) -> None:
    rewards = [1.0, -1.0, 1.0, 0.0]
    samples = [
        make_sample(f"turn-{number}", session_id=f"session-{number % 7}", reward=rewards[number % 4],
                    prompt_ids=[3 + number % 5, 7, 9], response_ids=[10 + number % 11, 12, 14, 5])
        for number in range(40)
    ]  # fmt: skip
    put(bus, namespace, samples)
    data = tmp_path / "data"
    moments = [
        ("the second batch is archived, so its step runs", "trainer/default/batches/*/step-00000002.safetensors"),
        ("the fourth checkpoint is complete", "trainer/default/checkpoints/step-00000004/manifest.json"),
        ("the fifth version is on the disk", "weights/default/00000005/manifest.json"),
    ]
    for what, pattern in moments:
        trainer.start()
        trainer.wait_for(what, lambda pattern=pattern: any(data.glob(pattern)))
        trainer.kill()

    def steps() -> list[dict[str, Any]]:
        return [value for _, value in committed(broker, full_name(namespace, topics.TRAIN_STEPS)) if value]

    trainer.start()
    trainer.wait_for("all steps", lambda: sum(len(step["samples"]) for step in steps()) == 30)
    assert trainer.stop() == 0

    listed = Counter(entry["sample_id"] for step in steps() for entry in [*step["samples"], *step["drops"]])
    assert listed == Counter(sample.sample_id for sample in samples)
    assert [step["step"] for step in steps()] == list(range(1, 11))
    assert len({step["lineage"] for step in steps()}) == 1
    weights = committed(broker, full_name(namespace, topics.WEIGHTS))
    published = [value for _, value in weights if value is not None and "artefact_uri" in value]
    assert [event["weight_version"] for event in published] == list(range(11))
    assert [value["weight_version"] for key, value in weights if key == b"default" and value] == list(range(11))
    assert [step["weight_version"] for step in steps()] == list(range(1, 11))

    removed = {int(key.split(b"/")[1]) for key, value in weights if key and value is None}
    assert removed == set(range(1, 8)), "the base model and the newest three stay"
    for event in published:
        directory = Path(event["artefact_uri"].removeprefix("file://"))
        if event["weight_version"] in removed:
            assert not directory.exists()
        else:
            assert verify(directory, event["manifest_sha256"]).weight_version == event["weight_version"]
    checkpoint = CheckpointStore(data / "trainer/default/checkpoints").latest_good()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.num_updates) == (10, 10)
    mark = Progress.from_document(checkpoint.progress).turns
    turns = LedgerFile(data / "trainer/default/turn-ledger.sqlite")
    turns.check(mark)
    trained = [turns.find_turn(sample.turn_id, mark.entries) for sample in samples]
    turns.close()
    assert [entry is not None and entry.revision is None for entry in trained] == [bool(s.reward) for s in samples]
