"""From a version back to its turns and on to those that it served; and the same batches once more, bit for bit."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawstream import ids, topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.codec import decode, encode
from clawstream.topics import partition_for
from schemas.events import SampleEvent, ScoreEvent, TrainStepEvent, TurnEvent, WeightVersionEvent
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from tests.fixtures.buses import read_all
from tests.fixtures.judged_log import NOW, JudgedLog, next_state_of, turn_event
from tests.fixtures.service_process import REPOSITORY
from tests.flow.replay.conftest import CommandLine
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 300.0
TURNS = 6
BATCH_SIZE = 3


@pytest.fixture
def toml(broker: str, namespace: str, tmp_path: Path) -> str:
    model = save_tiny_model("qwen3", tmp_path / "model")
    return f"""\
data_directory = "data"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
[trainer]
model = "{model}"
threads = 1
batch_size = {BATCH_SIZE}
max_batch_age_seconds = 3600.0
weights_keep = 9
learning_rate = {{ peak = 0.001, shape = "cosine", decay_updates = 4 }}
"""


class Chain:
    """Turns with everything that judge and teacher would have made of them."""

    def __init__(self, log: JudgedLog) -> None:
        self.log = log
        self.turns = [turn_event(number) for number in range(TURNS)]
        self.next_states = [
            next_state_of(turn, reference, "thanks")
            for turn, reference in zip(self.turns, log.write_turns(self.turns), strict=True)
        ]
        places = log.write_next_states(self.next_states)
        self.scores = [
            score_of(next_state, RecordReference(topic=each.record.topic, partition=each.partition, offset=each.offset))
            for next_state, each in zip(self.next_states, places, strict=True)
        ]
        self._write(topics.SCORES, [(score, score.session_id, score.score_id) for score in self.scores])
        self.samples = [sample_of(turn, score) for turn, score in zip(self.turns, self.scores, strict=True)]
        self._write(topics.SAMPLES, [(sample, sample.turn_id, sample.sample_id) for sample in self.samples])

    def _write(self, topic: str, events: list[tuple[Any, str, str]]) -> None:
        records: list[OutgoingRecord] = [
            encode(
                event,
                topic=self.log.topic(topic),
                key=key,
                event_id=event_id,
                source="tests",
                partition=partition_for(event.session_id, 12),
            )
            for event, key, event_id in events
        ]
        self.log.write(records)


def score_of(next_state: Any, reference: RecordReference) -> ScoreEvent:
    verdict = 1 if int(next_state.turn_id.removeprefix("turn-")) % 2 else -1
    return ScoreEvent(
        score_id=ids.score_id(next_state.next_state_id, "spec"),
        next_state_id=next_state.next_state_id,
        next_state_ref=reference,
        turn_id=next_state.turn_id,
        turn_ref=next_state.turn_ref,
        session_id=next_state.session_id,
        principal="alice",
        judge_spec_hash="spec",
        status="scored",  # pyright: ignore[reportArgumentType] - pydantic reads the word
        verdict=verdict,
        reward=verdict,
        votes=[{"vote": 0, "verdict": verdict, "call_id": "call-0"}],  # pyright: ignore[reportArgumentType] - as above
        hints=[{"text": "Say less.", "source": "user"}],  # pyright: ignore[reportArgumentType] - as above
        judged_at=NOW,
    )


def sample_of(turn: TurnEvent, score: ScoreEvent) -> SampleEvent:
    return SampleEvent(
        sample_id=ids.sample_id(turn.turn_id, score.score_id),
        turn_id=turn.turn_id,
        session_id=turn.session_id,
        principal="alice",
        policy=turn.policy,
        revision=SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=score.next_state_ref.offset),
        turn_ref=score.turn_ref,
        next_state_ref=score.next_state_ref,
        score_id=score.score_id,
        judge_spec_hash="spec",
        prompt_ids=turn.prompt_ids,
        response_ids=turn.response_ids,
        behaviour_logprobs=turn.response_logprobs,
        sampling_temperature=turn.sampling.temperature,
        version_spans=turn.version_spans,
        reward=score.reward,
        tokenizer_fingerprint=turn.tokenizer_fingerprint,
        created_at=NOW,
    )


@pytest.fixture
def chain(log: JudgedLog) -> Chain:
    return Chain(log)


@pytest.fixture
def steps(chain: Chain, clawstream: CommandLine, tmp_path: Path) -> Iterator[list[TrainStepEvent]]:
    """The trainer's real steps on those samples."""
    output = (tmp_path / "trainer.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "services.trainer", "--config", str(clawstream.folder / "clawstream.toml")],
        stdout=output,
        stderr=output,
        env={**clawstream.environment, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        cwd=clawstream.folder,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(chain.log.events(topics.TRAIN_STEPS, TrainStepEvent)) < TURNS // BATCH_SIZE:
            assert process.poll() is None, (tmp_path / "trainer.log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "trainer.log").read_text()
            time.sleep(0.1)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
        yield chain.log.events(topics.TRAIN_STEPS, TrainStepEvent)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        output.close()


def test_a_version_reaches_its_turns_and_retraining_gives_its_bits(
    chain: Chain, steps: list[TrainStepEvent], clawstream: CommandLine, tmp_path: Path
) -> None:
    served = [
        turn_event(100 + number, version_spans=[{"weight_version": version, "start": 0, "end": 3}])
        for number, version in enumerate([1, 2, 2, 1])
    ]
    chain.log.write_turns(served)
    assert [event.weight_version for event in weight_versions(chain.log)] == [0, 1, 2]

    # A version: its step, the turns of the batch, and whom it answered.
    found = clawstream.json("trace", "2")
    trained = [sample.turn_id for sample in steps[1].samples]
    assert found["kind"] == "version"
    assert [turn["turn_id"] for turn in found["turns"]] == trained
    assert [step["train_step_id"] for step in found["steps"]] == [steps[1].train_step_id]
    assert found["steps"][0]["batch"]["state"] == "whole"
    assert found["versions"][0]["served_turns"] == {"count": 2, "turn_ids": ["turn-101", "turn-102"]}

    # A turn: the whole chain, both ways.
    turn_id = steps[0].samples[0].turn_id
    number = int(turn_id.removeprefix("turn-"))
    found = clawstream.json("trace", turn_id)
    (turn,) = found["turns"]
    assert turn["turn"]["answer"] == f"Answer {number}."
    assert [each["following"][0]["text"] for each in turn["next_states"]] == ["thanks"]
    assert turn["scores"][0]["votes"] == [{"vote": 0, "verdict": chain.scores[number].verdict, "call_id": "call-0"}]
    assert [each["sample_id"] for each in turn["samples"]] == [chain.samples[number].sample_id]
    assert [(each["step"], each["weight_version"]) for each in turn["trained"]] == [(1, 1)]
    assert [version["served_turns"]["count"] for version in found["versions"]] == [2]
    tree = clawstream("trace", turn_id)
    for words in ("Say less.", "made version 1", "served 2 turns", "batch whole"):
        assert words in tree
    # A sample, a step by name, and what only the other topics know.
    assert clawstream.json("trace", chain.samples[number].sample_id)["turns"][0]["turn_id"] == turn_id
    step = clawstream.json("trace", f"{steps[0].lineage}/step/1")
    assert [each["turn_id"] for each in step["turns"]] == [each.turn_id for each in steps[0].samples]
    by_score = clawstream.json("trace", chain.scores[number].score_id)
    assert (by_score["kind"], by_score["turns"][0]["turn_id"]) == ("record", turn_id)
    untrained = clawstream.json("trace", "turn-101")
    assert (untrained["kind"], untrained["turns"][0]["trained"], untrained["versions"]) == ("turn", [], [])
    assert "no turn, next state" in clawstream("trace", "nobody-has-this-id", code=1)

    # Retraining: twice the same, and the bits that were published.
    said = [clawstream.json("retrain", "-d", str(tmp_path / name), "--every-step") for name in ("one", "two")]
    assert said[0]["lineage"] == said[1]["lineage"] != steps[0].lineage
    assert [each["old_weight_version"] for each in said[0]["steps"]] == [1, 2]
    for version in (1, 2):
        published = (tmp_path / f"data/weights/default/{version:08d}/model.safetensors").read_bytes()
        for name in ("one", "two"):
            again = (tmp_path / name / f"default/{version:08d}/model.safetensors").read_bytes()
            assert again == published
    other = clawstream.json("retrain", "-d", str(tmp_path / "hot"), "--set", "learning_rate.peak=0.01")
    assert other["lineage"] != said[0]["lineage"]
    assert other["weights_sha256"] != said[0]["weights_sha256"]
    second = clawstream.json("retrain", "-d", str(tmp_path / "late"), "--start", "1", "--steps", "2")
    assert [each["repeats"] for each in second["steps"]] == [2]
    assert second["weights_sha256"] != said[0]["weights_sha256"], "its optimizer begins afresh"
    assert "is there already" in clawstream("retrain", "-d", str(tmp_path / "one"), code=2)
    assert "not on the log" in clawstream("retrain", "-d", str(tmp_path / "no"), "--steps", "1-5", code=1)

    # A batch that is not what its step says is never trained, and a trace says so.
    (batch,) = tmp_path.glob("data/trainer/default/batches/*/step-00000001.safetensors")
    *whole, last = batch.read_bytes()
    batch.write_bytes(bytes([*whole, last ^ 1]))
    assert "checksum" in clawstream("retrain", "-d", str(tmp_path / "bad"), code=1)
    assert clawstream.json("trace", "1")["steps"][0]["batch"]["state"] == "changed"


def weight_versions(log: JudgedLog) -> list[WeightVersionEvent]:
    events = [decode(record) for record in read_all(log.bus, log.topic(topics.WEIGHTS)) if record.value is not None]
    return [event for event in events if isinstance(event, WeightVersionEvent)]
