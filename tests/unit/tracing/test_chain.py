"""What an id names, and how a chain is drawn and checked, without a broker."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.bus.ranges import no_progress
from clawstream.codec import encode
from clawstream.errors import LineageError
from clawstream.tracing.archive import BatchState, check_batch
from clawstream.tracing.chain import resolve, trace
from clawstream.tracing.history import TrainingHistory, read_training_history
from clawstream.tracing.tree import chain_tree
from schemas.events import TrainStepEvent, WeightVersionEvent
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DroppedSample, DropReason, TrainedSample
from tests.fixtures.judged_log import JudgedLog, turn_event

ANSWER_ID = "3fe53288-c8d8-48e0-8175-8dfe4d6b0e56"
NOW = datetime(2026, 3, 1, 9, 15, tzinfo=UTC)
REVISION = SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0)


def step(
    number: int, lineage: str = "first", *, version: int | None, policy: str = "default", **values: object
) -> TrainStepEvent:
    turn_id = f"turn-{number}"
    partition = topics.partition_for(turn_event(number).session_id, 12)
    reference = RecordReference(topic="test.samples.v1", partition=partition, offset=99)  # compaction took it
    return TrainStepEvent.model_validate(
        {
            "train_step_id": f"{lineage}-{number}",
            "lineage": lineage,
            "policy": policy,
            "step": number,
            "base_version": 0,
            "weight_version": version,
            "closed_by": "count",
            "samples": [
                TrainedSample(
                    sample_id=f"sample-{number}",
                    turn_id=turn_id,
                    revision=REVISION,
                    ref=reference,
                    age=0,
                    reward=1.0,
                    response_tokens=3,
                )
            ],
            "drops": [
                DroppedSample(
                    sample_id=f"late-{number}", turn_id=turn_id, ref=reference, reason=DropReason.ALREADY_TRAINED
                )
            ],
            "started_at": NOW,
            "finished_at": NOW,
            **values,
        }
    )


def version(number: int, lineage: str = "first") -> WeightVersionEvent:
    return WeightVersionEvent(
        policy="default",
        weight_version=number,
        lineage=lineage,
        artefact_uri="file:///weights",
        manifest_sha256="0" * 64,
        published_at=NOW,
    )


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "test")
    made.create_topics()
    steps = [step(1, version=1), step(2, version=None), step(3, version=2), step(4, version=2)]
    steps.append(step(5, "lost", version=2))
    made.write(
        [
            encode(each, topic=made.topic(topics.TRAIN_STEPS), key="default", event_id=each.train_step_id, source="t")
            for each in steps
        ]
        + [
            encode(each, topic=made.topic(topics.WEIGHTS), key=f"default/{number}", event_id=str(number), source="t")
            for number, each in enumerate([version(0), version(1), version(2)])
        ]
        + [OutgoingRecord(made.topic(topics.WEIGHTS), b"default/1", None)]
    )
    return made


def history(log: JudgedLog) -> TrainingHistory:
    return read_training_history(log.bus, "test")


def test_what_an_id_names(log: JudgedLog) -> None:
    known = history(log)

    def named(identity: str) -> tuple[str, tuple[str, ...]] | None:
        target = resolve(identity, known, "default")
        return None if target is None else (target.kind, target.turn_ids)

    assert named("2") == named("v2") == named("default/2") == ("version", ("turn-3", "turn-4"))
    assert named("1") == ("version", ("turn-1",)), "a removed artefact is still a version"
    assert named("other/2") == ("version", ())
    assert named("first-2") == named("first/step/2") == ("step", ("turn-2",))
    assert named("sample-3") == named("late-3") == ("sample", ("turn-3",))
    assert named("turn-4") == ("turn", ("turn-4",))
    assert named("nobody") is None
    assert known.removed == {("default", 1)}


def test_a_turn_is_told_though_compaction_took_its_sample(log: JudgedLog) -> None:
    log.write_turns([turn_event(number) for number in (1, 2, 3)])
    log.write_turns([turn_event(9, version_spans=[{"weight_version": 2, "start": 0, "end": 3}])])
    found = trace(log.bus, "test", "turn-3", policy="default", limit=5, progress=lambda _: no_progress)
    (turn,) = found["turns"]
    assert turn["turn"]["answer"] == "Answer 3."
    assert [each["step"] for each in turn["trained"]] == [3]
    assert [each["reason"] for each in turn["dropped"]] == ["already_trained"]
    assert found["versions"][0]["served_turns"] == {"count": 1, "turn_ids": ["turn-9"]}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(chain_tree(found))
    assert "trained in step 3 of first (made version 2)" in capture.get()
    with pytest.raises(LineageError, match="no version 8"):
        trace(log.bus, "test", "8", policy="default", limit=5, progress=lambda _: no_progress)
    with pytest.raises(LineageError, match=f"^'{ANSWER_ID}': no turn"):
        trace(log.bus, "test", f"chatcmpl-{ANSWER_ID}", policy="default", limit=5, progress=lambda _: no_progress)
    with pytest.raises(LineageError, match="nobody"):
        trace(log.bus, "test", "nobody", policy="default", limit=5, progress=lambda _: no_progress)


def test_a_batch_is_whole_missing_or_changed(tmp_path: Path) -> None:
    def archived(sample_ids: list[str]) -> bytes:
        metadata = {"clawstream": orjson.dumps({"sample_ids": sample_ids}).decode()}
        header = orjson.dumps({"__metadata__": metadata})
        return len(header).to_bytes(8, "little") + header

    file = tmp_path / "step 1.safetensors"

    def state(content: bytes, claimed: bytes) -> BatchState:
        file.write_bytes(content)
        sha256 = hashlib.sha256(claimed).hexdigest()
        return check_batch(step(1, version=1, batch_uri=file.as_uri(), batch_sha256=sha256)).state

    right, other = archived(["sample-1"]), archived(["sample-2"])
    assert state(right, right) is BatchState.WHOLE
    assert state(other, right) is BatchState.CHANGED
    assert state(other, other) is BatchState.CHANGED, "the bytes are those, the samples are not"
    file.unlink()
    assert check_batch(step(1, version=1, batch_uri=file.as_uri(), batch_sha256="0" * 64)).state is BatchState.MISSING
    assert check_batch(step(1, version=1)).state is BatchState.NONE
