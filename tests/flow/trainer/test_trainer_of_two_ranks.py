"""A trainer of two ranks under the supervisor, on a real broker: it learns what one rank learns, and survives a kill.

Two ranks share a model (tensor parallelism) or a batch (data parallelism), one of them is killed with -9 in the middle,
and everything must come out as if nothing had happened. The reference is one rank, in this process, on the batches that
the trainer archived. Half of the samples ask the trainer's own teacher, which stays what it was.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from clawstream import topics
from clawstream.blobs import BlobReader
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, KafkaSettings
from clawstream.supervisor import control
from clawstream.supervisor.report import ProcessState, read_report
from clawstream.supervisor.settings import SystemSettings, load_system_settings
from clawstream.topics import full_name, topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable
from clawstream.weights.manifest import verify
from schemas.events import SampleEvent
from services.trainer.algorithms.combine import Combine
from services.trainer.batch_archive import read_batch
from services.trainer.checkpoint import CheckpointStore
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.sample import TeacherTargets, TrainingSample
from tests.fixtures.samples import make_sample, sample_record
from tests.fixtures.system import wait_for
from tests.flow.trainer.test_trainer_killed import committed
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 240.0
BATCH_SIZE = 4
TOKENS_PER_MICRO_BATCH = 20
LEARNING_RATE = 1e-4
TENSOR_PARALLEL_SIZE = {"tensor": 2, "data": 1}
"""Name of the policy to how its two ranks are used."""


class Run:
    """A supervisor with one trainer. Ends only its own processes."""

    def __init__(self, directory: Path, policy: str, broker: str, namespace: str, model: Path) -> None:
        directory.mkdir()
        self.policy = policy
        self.namespace = namespace
        self.broker = broker
        self.data = directory / "data"
        self.file = directory / "clawstream.toml"
        self.file.write_text(
            f"""\
policy = "{policy}"
data_directory = "data"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[trainer]
model = {json.dumps(str(model))}
threads = 1
tensor_parallel_size = {TENSOR_PARALLEL_SIZE[policy]}
batch_size = {BATCH_SIZE}
max_batch_age_seconds = 3600.0
max_age_versions = 100
max_sample_tokens = 20
tokens_per_micro_batch = {TOKENS_PER_MICRO_BATCH}
learning_rate = {{ peak = {LEARNING_RATE} }}
algorithm = {{ factory = "services.trainer.algorithms.combine:Combine" }}
own_teacher = {{}}
weights_keep = 100
[[processes]]
name = "trainer-{policy}"
service = "trainer"
ranks = 2
depends_on = []
"""
        )
        self.settings: SystemSettings = load_system_settings(self.file, os.environ)

    def start(self) -> None:
        supervisor = control.start_detached(self.settings, self.file, {**os.environ, "OMP_NUM_THREADS": "1"})
        ready = PATIENCE_SECONDS
        control.wait_until_ready(self.settings, supervisor, timeout_seconds=ready, progress=lambda report: None)

    def stop(self) -> None:
        control.stop(self.settings, SystemClock(), at_once=False, timeout_seconds=120)

    def process(self) -> Any:
        report = read_report(self.settings.supervisor_directory)
        return report.processes[0] if report is not None and report.processes else None

    def steps(self) -> list[dict[str, Any]]:
        found = committed(self.broker, full_name(self.namespace, topics.TRAIN_STEPS))
        return [value for key, value in found if value and key == self.policy.encode()]

    def wait_for_steps(self, number: int) -> None:
        wait_for(lambda: len(self.steps()) >= number, f"{number} steps of {self.policy}", PATIENCE_SECONDS)

    def published(self) -> dict[int, Path]:
        """Version to directory, each as the log says it is."""
        events = [
            value
            for key, value in committed(self.broker, full_name(self.namespace, topics.WEIGHTS))
            if value and key and key.startswith(f"{self.policy}/".encode())
        ]
        for event in events:
            directory = Path(event["artefact_uri"].removeprefix("file://"))
            assert verify(directory, event["manifest_sha256"]).weight_version == event["weight_version"]
        return {event["weight_version"]: Path(event["artefact_uri"].removeprefix("file://")) for event in events}

    def last_rank(self) -> psutil.Process:
        """The process of the rank that knows nothing of Kafka."""
        ranks = [
            child
            for child in psutil.Process(self.process().pid).children(recursive=True)
            if child.environ().get("RANK") == "1" and "services.trainer" in child.cmdline()
        ]
        assert len(ranks) == 1
        return ranks[0]


@pytest.fixture
def bus(broker: str, namespace: str) -> KafkaBus:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=broker, namespace=namespace), client_id="ranks-test")
    admin = bus.admin()
    apply_topics(admin, namespace, 1, topic_definitions().values())
    admin.close()
    wait_until_readable(bus, namespace, topic_definitions().values(), SystemClock(), timeout_seconds=60)
    return bus


@pytest.fixture
def run(request: pytest.FixtureRequest, bus: KafkaBus, broker: str, namespace: str, tmp_path: Path) -> Iterator[Run]:
    """Not started. Ended after the test."""
    run = Run(tmp_path / "run", request.param, broker, namespace, save_tiny_model("qwen3", tmp_path / "model"))
    yield run
    run.stop()


def samples(policy: str, start: int, stop: int) -> list[SampleEvent]:
    """One session: one partition, so that their order is known."""
    return [
        make_sample(
            f"{policy}-turn-{number}",
            session_id="one",
            policy=policy,
            reward=1.0 if number % 3 else -1.0,
            prompt_ids=[3 + number % 5, 7, 9][: 1 + number % 3],
            response_ids=[10 + number % 11, 12, 14, 5],
            hinted_prompt_ids=[4, 4, 3 + number % 5] if number % 2 else None,
        )
        for number in range(start, stop)
    ]


def question(questions: dict[str, SampleEvent], sample: TrainingSample) -> TrainingSample:
    """What the trainer was asked about a sample that it archived with the answer."""
    request = questions[sample.sample_id].teacher_request
    assert request is not None
    hinted = BlobReader().resolve(request.prompt_ids).astype(np.int32)
    return replace(sample, teacher=TeacherTargets.asked(hinted, sample.response_ids.size))


def put(bus: KafkaBus, namespace: str, events: list[SampleEvent]) -> None:
    producer = bus.producer()
    for event in events:
        producer.produce(sample_record(event, namespace))
    producer.flush(30)
    producer.close()


@pytest.mark.parametrize("run", list(TENSOR_PARALLEL_SIZE), indirect=True)
def test_two_ranks_learn_what_one_learns_and_survive_the_death_of_one(
    run: Run, bus: KafkaBus, namespace: str, tmp_path: Path
) -> None:
    put(bus, namespace, samples(run.policy, 0, 8))
    run.start()
    run.wait_for_steps(2)
    starts = run.process().starts
    run.last_rank().send_signal(signal.SIGKILL)
    wait_for(
        lambda: run.process().starts > starts and run.process().state is ProcessState.READY,
        "all ranks run again",
        PATIENCE_SECONDS,
    )
    put(bus, namespace, samples(run.policy, 8, 16))
    run.wait_for_steps(4)
    run.stop()
    steps, published = run.steps(), run.published()

    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert len({step["lineage"] for step in steps}) == 1
    trained = [[sample["turn_id"] for sample in step["samples"]] for step in steps]
    turns = [event.turn_id for event in samples(run.policy, 0, 16)]
    assert trained == [turns[start : start + BATCH_SIZE] for start in range(0, 16, BATCH_SIZE)]
    assert list(published) == [0, 1, 2, 3, 4]
    checkpoint = CheckpointStore(run.data / "trainer" / run.policy / "checkpoints").latest_good()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.num_updates) == (4, 4)

    reference = PolicyTrainer(
        ParallelLayout.start(),
        Combine(),
        tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
        teacher=OwnTeacherOptions(),
    )
    reference.load(tmp_path / "model")
    questions = {event.sample_id: event for event in samples(run.policy, 0, 16) if event.teacher_request is not None}
    for step in steps:
        batch = read_batch(Path(step["batch_uri"].removeprefix("file://")), step["batch_sha256"])
        asked = [sample for sample in batch if sample.sample_id in questions]
        assert [sample.teacher is not None for sample in batch] == [sample in asked for sample in batch]
        assert {each["sample_id"] for each in step["samples"] if each["has_teacher"]} == {s.sample_id for s in asked}
        for sample, answer in zip(asked, reference.taught([question(questions, each) for each in asked]), strict=True):
            assert sample.teacher is not None
            assert answer.teacher is not None
            np.testing.assert_allclose(sample.teacher.log_probs, answer.teacher.log_probs, atol=1e-5)
        result = reference.train_step(batch, LEARNING_RATE)
        for name in ("loss", "gradient_norm", "entropy_mean", "shift_mean_abs", "computed_tokens"):
            assert step["metrics"][name] == pytest.approx(result.metrics[name], rel=1e-5, abs=1e-5), name
    snapshot = reference.snapshot()
    assert snapshot is not None
    base, found = (load_file(published[version] / "model.safetensors") for version in (0, 4))
    learned = {name: tensor - base[name] for name, tensor in snapshot.weights.items()}
    assert max(float(change.abs().max()) for change in learned.values()) > 2 * LEARNING_RATE
    for name, tensor in snapshot.weights.items():
        difference = (found[name] - tensor).abs()
        assert difference.max() < 1e-5, name
        assert difference.mean() < 1e-3 * learned[name].abs().mean(), name


@pytest.mark.parametrize("run", ["tensor"], indirect=True)
def test_a_mistake_that_only_the_first_rank_can_name_is_not_started_again(run: Run, tmp_path: Path) -> None:
    """The other one cannot read the model either, but does not know whose fault that is, and may end first."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    document = run.file.read_text()
    supervisor = control.start_detached(run.settings, run.file, dict(os.environ))
    wait_for(lambda: not supervisor.is_alive(), "nothing is left to run", PATIENCE_SECONDS)
    process = run.process()
    assert (process.state, process.starts) == (ProcessState.FAILED, 1), document + process.log_file.read_text()
    assert f"exit code {EXIT_CODE_WRONG_SETTINGS}" in process.detail
