"""`clawstream report` on a real log, as a person calls it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawstream.bus.kafka import KafkaBus
from clawstream.cli import app
from clawstream.clock import SystemClock
from clawstream.codec import encode
from clawstream.settings import KafkaSettings
from clawstream.topics import SCORES, TRAIN_STEPS, TURNS, full_name, topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable
from schemas.events import Event, ScoreEvent, TrainStepEvent
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import TrainedSample
from tests.fixtures.judged_log import NOW, turn_event

pytestmark = pytest.mark.kafka
REFERENCE = RecordReference(topic="x", partition=0, offset=0)


@pytest.fixture
def bus(broker: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=broker), client_id="report-test")


@pytest.fixture
def config(broker: str, bus: KafkaBus, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """A configuration whose namespace has all topics."""
    admin = bus.admin()
    apply_topics(admin, namespace, 1, topic_definitions().values())
    wait_until_readable(bus, namespace, topic_definitions().values(), SystemClock(), timeout_seconds=60)
    file = tmp_path / "clawstream.toml"
    file.write_text(f'[kafka]\nbootstrap_servers = "{broker}"\nnamespace = "{namespace}"\n')
    yield file
    admin.close()


def in_a_transaction(bus: KafkaBus, topic: str, *events: tuple[str, Event]) -> None:
    """As the gateway and the judge write: what a reader meets beside records are control records."""
    producer = bus.transactional_producer(f"{topic}-writer")
    producer.begin()
    for key, event in events:
        producer.produce(encode(event, topic=topic, key=key, event_id=key, source="test"))
    producer.flush(30)
    producer.commit()
    producer.close()


def score(turn: str, verdict: int, *, explicit: bool) -> ScoreEvent:
    return ScoreEvent(
        score_id=f"{turn}-{explicit}",
        next_state_id=turn,
        next_state_ref=REFERENCE,
        turn_id=turn,
        turn_ref=REFERENCE,
        session_id="session",
        principal="alice",
        judge_spec_hash="spec",
        explicit=explicit,
        status="scored",  # pyright: ignore[reportArgumentType] - as it is written
        verdict=verdict,
        reward=verdict,
        judged_at=NOW,
    )


def report(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_drift_and_judge_from_the_log(bus: KafkaBus, namespace: str, config: Path) -> None:
    turns = [turn_event(number, principal="alice" if number < 8 else "bob") for number in range(10)]
    in_a_transaction(bus, full_name(namespace, TURNS), *((turn.session_id, turn) for turn in turns))
    samples = [
        TrainedSample(
            sample_id=turn.turn_id,
            turn_id=turn.turn_id,
            revision=SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0),
            ref=REFERENCE,
            age=0,
            reward=1.0,
            response_tokens=3,
            principal="bob",
            sampling_temperature=0.7,
        )
        for turn in turns[8:]
    ]
    step = TrainStepEvent(
        train_step_id="step-1",
        lineage="run",
        policy="default",
        step=1,
        base_version=0,
        weight_version=1,
        closed_by="count",
        samples=samples,
        drops=[],
        started_at=NOW,
        finished_at=NOW,
    )
    in_a_transaction(bus, full_name(namespace, TRAIN_STEPS), ("default", step))
    scores = [score("turn-0", 1, explicit=False), score("turn-0", -1, explicit=True)]
    in_a_transaction(bus, full_name(namespace, SCORES), *((each.session_id, each) for each in scores))

    drift = json.loads(report("drift", "--config", str(config), "--json"))
    assert (drift["served"], drift["trained"]) == (10, 2)
    users = drift["dimensions"][0]
    assert (users["name"], users["distance"]) == ("user", pytest.approx(0.8))
    assert "By user: 80.0% apart" in report("drift", "--config", str(config))
    assert json.loads(report("drift", "--config", str(config), "--until", "1m", "--json"))["served"] == 0

    judge = json.loads(report("judge", "--config", str(config), "--json"))
    assert (judge["overall"]["pairs"], judge["overall"]["false_praise"]) == (1, 1)
    assert "Verdicts" in report("judge", "--config", str(config))
