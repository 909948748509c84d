"""One input in ten is poison, under load: the dead-letter topic has exactly those, and everything else goes on."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from clawstream import ids, topics
from clawstream.audit.kafka_log import KafkaLog
from clawstream.bus.interface import Delivery, OutgoingRecord
from clawstream.codec import encode, header
from clawstream.forgetting.forgotten import forgotten_key
from schemas.arrays import BlobReference, NumberArray
from schemas.events import ForgottenEvent, SampleEvent, TrainStepEvent
from schemas.events.forgotten import ForgottenKind
from tests.faults.chaos import Chaos
from tests.faults.load import SESSIONS, write_replies
from tests.faults.waiting import committed, positions, wait_until
from tests.fixtures.buses import read_all
from tests.fixtures.configuration import small_trainer_toml
from tests.fixtures.judged_history import write_samples
from tests.fixtures.judged_log import NOW, JudgedLog, next_state_of, turn_event
from tests.fixtures.service_process import ServiceProcess
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

FORGOTTEN_SESSION = "a-session-to-be-forgotten"
OVERSIZED_BYTES = 1_900_000
"""As much as the topic of next states takes; the dead letter has headers besides."""
CHUNK = 90
POISON_OF_CHUNK = 10

StartService = Callable[..., ServiceProcess]


def dead_letters(log: JudgedLog, topic: str) -> dict[tuple[int, int], tuple[str, bytes | None]]:
    """Partition and offset of each input to why it is there and what it was."""
    found: dict[tuple[int, int], tuple[str, bytes | None]] = {}
    for record in read_all(log.bus, log.topic(topic)):
        place = int(header(record.headers, "dlq.partition") or -1), int(header(record.headers, "dlq.offset") or -1)
        assert place not in found, "one input, one dead letter"
        found[place] = header(record.headers, "dlq.reason") or "", record.value
    return found


def forget(log: JudgedLog) -> None:
    """As `clawstream forget --session` asks for it."""
    request = ForgottenEvent(kind=ForgottenKind.SESSION, subject=FORGOTTEN_SESSION, requested_at=NOW)
    key = forgotten_key(request.kind, request.subject)
    log.write(
        [
            encode(
                request,
                topic=log.topic(topics.FORGOTTEN),
                key=key,
                event_id=ids.derive("forgotten", key),
                source="tests",
            )
        ]
    )


def poisonous_next_states(log: JudgedLog, draw: random.Random) -> list[Delivery]:
    """No JSON; JSON of another shape; another event; too large to be anything: in turn, into random sessions."""
    topic = log.topic(topics.NEXT_STATES)
    another = encode(turn_event(0), topic=topic, key="session-0", event_id="turn-0", source="tests")
    values: list[tuple[bytes, tuple[tuple[str, bytes], ...]]] = [
        (b"\xff not JSON", ()),
        (b'{"schema_version": 1, "turn_id": 7}', ()),
        (another.value or b"", another.headers),
        (draw.randbytes(OVERSIZED_BYTES), ()),
        (b"", ()),
    ]
    return log.write(
        [
            OutgoingRecord(topic, f"session-{draw.randrange(SESSIONS)}".encode(), value, headers=headers)
            for number in range(POISON_OF_CHUNK)
            for value, headers in [values[number % len(values)]]
        ]
    )


def forgotten_next_state(log: JudgedLog, number: int) -> list[Delivery]:
    turn = turn_event(number, session_id=FORGOTTEN_SESSION)
    (place,) = log.write_turns([turn])
    return log.write_next_states([next_state_of(turn, place, "thanks")])


@pytest.mark.parametrize("chunks", [3, pytest.param(25, marks=pytest.mark.chaos_full)])
def test_a_judge_puts_exactly_the_poison_aside(
    chunks: int, log: JudgedLog, broker: str, namespace: str, start_service: StartService, chaos: Chaos
) -> None:
    draw = random.Random(1)
    forget(log)
    toml = f'[kafka]\nbootstrap_servers = "{broker}"\nnamespace = "{namespace}"\n'
    toml += '[judge]\nspec = { backend = "rules", rules = [["thanks", 1], ["no", -1]] }\n'
    judge = start_service("judge", toml)
    good: list[Delivery] = []
    poison: list[Delivery] = []
    forgotten: list[Delivery] = []
    for number in range(chunks):
        good += write_replies(log, range(CHUNK * number, CHUNK * (number + 1)))
        poison += poisonous_next_states(log, draw)
        forgotten += forgotten_next_state(log, -1 - number)
    second_opinion = KafkaLog(broker, namespace)
    due = positions([*good, *poison, *forgotten])
    wait_until(lambda: committed(second_opinion, "judge") == due, "all is handled", judge)
    assert judge.stop() == 0, judge.text()
    second_opinion.close()

    found = dead_letters(log, topics.JUDGE_DLQ)
    assert {place: value for place, (_, value) in found.items()} == {
        (each.partition, each.offset): each.record.value for each in poison
    }
    assert {reason for reason, _ in found.values()} == {"undecodable"}
    report = chaos.audited(broker, namespace)
    assert report.handled["judge"] == {
        "output": len(good),
        "skip": len(forgotten),
        "dead letter": len(poison),
        "waiting": 0,
    }
    chaos.counts.faults_survived += len(poison) + len(forgotten)


@pytest.mark.chaos_full
def test_a_trainer_puts_samples_with_missing_blobs_aside(
    log: JudgedLog, broker: str, namespace: str, start_service: StartService, chaos: Chaos, tmp_path: Path
) -> None:
    model = save_tiny_model("qwen3", tmp_path / "model")
    numbers = [number for number in range(45) if number % 3]  # every third is neutral, and makes no sample
    missing = set(numbers[4::10])

    def changed(number: int, sample: SampleEvent) -> SampleEvent:
        if number not in missing:
            return sample
        blob = BlobReference(uri=(tmp_path / "no-such-blob").as_uri(), sha256=f"{number:064x}", size_bytes=12)
        return sample.model_copy(update={"response_ids": NumberArray(dtype="int32", shape=[3], blob=blob)})

    written = write_samples(log, broker, numbers, changed=changed)
    poison = [each for number, each in zip(numbers, written, strict=True) if number in missing]
    toml = small_trainer_toml(tmp_path / "data", broker, namespace, model)
    trainer = start_service("trainer", toml, {"OMP_NUM_THREADS": "1"})
    good = len(numbers) - len(missing)

    def trained() -> int:
        return sum(len(step.samples) for step in log.events(topics.TRAIN_STEPS, TrainStepEvent))

    wait_until(lambda: trained() == good, "all else is trained", trainer)
    assert trainer.stop() == 0, trainer.text()
    found = dead_letters(log, topics.TRAINER_DLQ)
    assert {place: value for place, (_, value) in found.items()} == {
        (each.partition, each.offset): each.record.value for each in poison
    }
    report = chaos.audited(broker, namespace)
    assert report.training["trained"] == good
    chaos.counts.faults_survived += len(poison)
