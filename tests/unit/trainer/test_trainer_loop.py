"""The loop on a log in memory: what it writes, and what a crash at any point does to it."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from clawstream import ids, topics
from clawstream.bus.interface import OutgoingRecord, TopicPartition
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.codec import decode, encode, header
from clawstream.errors import BrokerUnavailable, StepInterrupted, TransactionOutcomeUnknown
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from clawstream.topics import partition_for, topic_definitions
from clawstream.topics_admin import apply_topics
from clawstream.weights.on_log import release, roll_back
from schemas.arrays import float32_array
from schemas.events import SampleEvent, TrainStepEvent, WeightPointerEvent, WeightsAppliedEvent, WeightVersionEvent
from schemas.events.base import VersionSpan
from schemas.events.train_step import DropReason
from schemas.events.weights import EngineState
from services.trainer.assembly import Surroundings, Trainer, trainer_history
from services.trainer.guards.bounds import Breach
from services.trainer.ledger_file import LedgerFile
from services.trainer.loop import TrainerLoop
from services.trainer.progress import Progress
from services.trainer.progress_report import ProgressReport
from services.trainer.resume import first_progress
from services.trainer.sample import StepResult, UnchangedReason
from services.trainer.settings import TrainerSettings
from tests.fixtures.buses import read_all
from tests.fixtures.samples import PARTITIONS, make_sample, sample_record
from tests.fixtures.weights import write
from tests.unit.trainer.fake_compute import (
    Crash,
    Disk,
    FakeArchive,
    FakePolicy,
    FakeStore,
    Faults,
    unchanged,
)

NAMESPACE = "clawstream"
SAMPLES = f"{NAMESPACE}.{topics.SAMPLES}"
WEIGHTS = f"{NAMESPACE}.{topics.WEIGHTS}"
TRAIN_STEPS = f"{NAMESPACE}.{topics.TRAIN_STEPS}"
POINTS = [
    "before archive",
    "after archive",
    "before train",
    "after train",
    "snapshot",
    "before turns",
    "after turns",
    "before checkpoint",
    "after checkpoint",
    "before publish",
    "after publish",
    "before commit",
    "after commit",
    "before delete",
    "after delete",
]


class World:
    """A log, a disk and a clock; trainers come and go."""

    def __init__(self, **options: Any) -> None:
        self.bus = MemoryBus()
        apply_topics(self.bus.admin(), NAMESPACE, 1, topic_definitions().values())
        self.disk = Disk()
        self.faults = Faults()
        self.bus.set_fault(lambda operation, when: self.faults.at(f"{when} {operation}"))
        self.clock = ManualClock()
        values = {"batch_size": 2, "max_batch_age_seconds": 60.0, "weights_keep": 1, **options}
        self.settings = TrainerSettings(name="trainer", model=Path("model"), **values)
        self.metrics = Metrics()
        self.report = ProgressReport(need=2, interval_seconds=0.0, metrics=self.metrics, logger=get_logger())
        self.policy = FakePolicy(self.faults)
        self.lineages = 0

    def start(self) -> TrainerLoop:
        """A trainer that starts from whatever the disk and the log hold."""
        around = Surroundings(
            self.bus,
            self.clock,
            self.metrics,
            get_logger(),
            self.report,
            threading.Event(),
        )
        newest = max(self.disk.checkpoints, default=None)
        snapshot, document = self.disk.checkpoints[newest] if newest is not None else (None, None)
        answer = self.policy.answer
        self.policy = FakePolicy(self.faults, snapshot)
        self.policy.answer = answer
        store = FakeStore(self.disk, self.faults)
        self.archive = FakeArchive(self.faults)
        trainer = Trainer(self.settings, around, policy=self.policy, store=store, archive=self.archive)
        if document is not None:
            progress = Progress.from_document(document)
            self.disk.turns.check(progress.turns)
        else:
            self.lineages += 1
            history = trainer_history(self.settings, around.bus)
            progress = first_progress(history, store.versions(), lineage=f"lineage-{self.lineages}", start_version=0)
        loop = trainer.begin(progress, is_new=document is None)
        settings = loop._settings  # pyright: ignore[reportPrivateUsage] - an idle poll need not wait here
        loop._settings = dataclasses.replace(settings, poll_seconds=0.001)  # pyright: ignore[reportPrivateUsage]
        return loop

    def put(self, *events: SampleEvent) -> None:
        write(self.bus, *(sample_record(event, NAMESPACE) for event in events))

    def heartbeat(self, version: int | None, state: EngineState = EngineState.READY, target: int | None = None) -> None:
        event = WeightsAppliedEvent(
            policy="default",
            engine="engine-0",
            state=state,
            weight_version=version,
            target_version=target,
            gate_owner="gateway-0",
            observed_at=self.clock.now(),
            expires_at=self.clock.now() + timedelta(days=1),
        )
        topic = f"{NAMESPACE}.{topics.WEIGHTS_APPLIED}"
        write(self.bus, encode(event, topic=topic, key="engine-0", event_id="beat", source="gateway/gateway-0"))

    def steps(self) -> list[TrainStepEvent]:
        found = [decode(record) for record in read_all(self.bus, TRAIN_STEPS)]
        return [event for event in found if isinstance(event, TrainStepEvent)]

    def versions(self) -> list[WeightVersionEvent]:
        found = [decode(record) for record in read_all(self.bus, WEIGHTS) if record.value is not None]
        return [event for event in found if isinstance(event, WeightVersionEvent)]

    def pointers(self) -> list[int]:
        found = [decode(record) for record in read_all(self.bus, WEIGHTS) if record.value is not None]
        return [event.weight_version for event in found if isinstance(event, WeightPointerEvent)]

    def tombstones(self) -> list[str]:
        return [(record.key or b"").decode() for record in read_all(self.bus, WEIGHTS) if record.value is None]


def settle(loop: TrainerLoop, world: World, *, quiet_polls: int = 3) -> None:
    """Lets the loop run until nothing is left to read or to train, time included."""
    quiet = 0
    while quiet < quiet_polls:
        world.clock.advance(world.settings.max_batch_age_seconds / 2)
        quiet = 0 if loop.advance() else quiet + 1
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage] - what `run` does at its end


def settle_through_crashes(world: World) -> int:
    """Starts trainers until one gets through; returns how many died."""
    crashes = 0
    while True:
        loop = None
        try:
            loop = world.start()
            settle(loop, world)
        except Crash:
            crashes += 1
            finisher = loop._finisher._thread if loop is not None else None  # pyright: ignore[reportPrivateUsage]
            if finisher is not None:
                finisher.join()  # a process dies with all its threads: none of the dead one's may write any more
        else:
            return crashes


def listed(steps: Sequence[TrainStepEvent]) -> Counter[str]:
    """Every sample that any step names, trained or dropped."""
    return Counter(
        [sample.sample_id for step in steps for sample in step.samples]
        + [dropped.sample_id for step in steps for dropped in step.drops]
    )


def test_first_start_publishes_the_base_model_as_version_0() -> None:
    world = World()
    world.start()
    assert [event.weight_version for event in world.versions()] == [0]
    assert (world.versions()[0].base_version, world.versions()[0].train_step_id) == (None, None)
    assert world.pointers() == [0]
    world.start()
    assert [event.weight_version for event in world.versions()] == [0]


def test_a_batch_becomes_a_version_and_an_event_that_names_everything() -> None:
    world = World()
    good = [make_sample(f"turn-{number}", session_id=f"s{number}") for number in range(2)]
    neutral = make_sample("neutral", reward=0.0)
    world.put(neutral, *good)
    loop = world.start()
    settle(loop, world)
    (step,) = world.steps()
    assert {sample.sample_id for sample in step.samples} == {event.sample_id for event in good}
    assert [(dropped.turn_id, dropped.reason) for dropped in step.drops] == [("neutral", DropReason.ZERO_ADVANTAGE)]
    assert (step.step, step.base_version, step.weight_version, step.closed_by) == (1, 0, 1, "count")
    assert step.metrics["loss"] == 0.5
    assert "broken" not in step.metrics, "a measurement that is not finite cannot be written as JSON"
    assert (step.metrics["effective_samples"], step.metrics["signal_share"]) == (2, pytest.approx(2 / 3))
    assert [(sample.principal, sample.sampling_temperature) for sample in step.samples] == [("alice", 1.0)] * 2
    assert (step.guards, step.knobs) == ([], {})
    assert step.batch_uri == f"file:///batches/{step.lineage}/1.safetensors"
    assert sum(step.next_offsets.values()) == 3
    version = world.versions()[-1]
    assert (version.weight_version, version.base_version, version.train_step_id) == (1, 0, step.train_step_id)
    assert world.pointers() == [0, 1]
    status = world.report.status()
    assert (status["step"], status["weight_version"], status["have"]) == (1, 1, 0)
    assert status["drops"] == {"zero_advantage": 1}


@pytest.mark.parametrize("reason", list(UnchangedReason))
def test_degenerate_batches_publish_nothing_and_move_the_offsets(reason: UnchangedReason) -> None:
    world = World()
    samples = [make_sample(f"turn-{number}") for number in range(2)]
    world.put(*samples)
    world.policy.answer = unchanged(reason, [samples[0].sample_id] if reason is UnchangedReason.NON_FINITE else [])
    settle(world.start(), world)
    (step,) = world.steps()
    assert (step.weight_version, step.unchanged_reason) == (None, reason)
    assert sum(step.next_offsets.values()) == 2
    assert listed([step]) == Counter(event.sample_id for event in samples)
    assert len(step.drops) == (1 if reason is UnchangedReason.NON_FINITE else 0)
    assert [event.weight_version for event in world.versions()] == [0]
    world.policy.answer = None
    settle(world.start(), world)
    assert len(world.steps()) == 1, "the batch is not tried again"
    world.put(*(make_sample(f"later-{number}") for number in range(2)))
    settle(world.start(), world)
    assert world.steps()[-1].weight_version == 1


def test_only_neutral_samples_make_a_step_that_lists_them() -> None:
    world = World()
    world.put(*(make_sample(f"turn-{number}", reward=0.0) for number in range(5)))
    settle(world.start(), world)
    (step,) = world.steps()
    assert (step.samples, len(step.drops), step.unchanged_reason) == ([], 5, "no_samples")
    assert sum(step.next_offsets.values()) == 5
    assert step.batch_uri == ""


def test_samples_of_others_are_dropped_with_their_reason() -> None:
    world = World(tokenizer_fingerprint="f")
    bad = {
        "policy": (make_sample("policy", policy="other"), DropReason.OTHER_POLICY, "other"),
        "print": (make_sample("print", fingerprint="g"), DropReason.OTHER_TOKENIZER, "g"),
        "vocab": (make_sample("vocab", prompt_ids=[1000]), DropReason.OTHER_TOKENIZER, "prompt_ids 1000..1000"),
        "hint": (
            make_sample("hint", reward=None, teacher=[-1.0] * 4),
            DropReason.NO_COMPONENT,
            "a teacher's log-probs",
        ),
    }
    world.put(*(event for event, _, _ in bad.values()), make_sample("good"))
    settle(world.start(), world)
    (step,) = world.steps()
    assert [sample.turn_id for sample in step.samples] == ["good"]
    found = {dropped.turn_id: (dropped.reason, dropped.detail) for dropped in step.drops}
    for turn, (_, reason, detail) in bad.items():
        assert found[turn][0] is reason
        assert detail in found[turn][1]


def dead_letters(world: World) -> dict[str, str]:
    """Turn to message."""
    found: dict[str, str] = {}
    for record in read_all(world.bus, f"{NAMESPACE}.{topics.TRAINER_DLQ}"):
        message = header(record.headers, "dlq.error.message")
        assert message is not None
        found[(record.key or b"").decode()] = message
    return found


def broken_samples() -> dict[str, tuple[SampleEvent, str]]:
    """By turn: samples that decode and cannot be trained on, and what is to be said of them."""
    nan, fine = float("nan"), [-1.0] * 4
    gap = [VersionSpan(weight_version=0, start=0, end=2), VersionSpan(weight_version=0, start=3, end=4)]
    flat = make_sample("flat")
    flat = flat.model_copy(update={"response_ids": flat.response_ids.model_copy(update={"shape": [2, 2]})})
    return {
        "long": (make_sample("long", prompt_ids=[1] * 17), "21 tokens, but max_sample_tokens is 20"),
        "nan": (make_sample("nan", behaviour=[nan] * 4), "4 of 4 behaviour_logprobs are not finite"),
        "infinite": (make_sample("infinite", teacher=[-1.0, 0.0, -1.0, -float("inf")]), "1 of 4 teacher.logprobs"),
        "future": (make_sample("future", versions=(0, 1)), "claims version 1; the newest that exists is 0"),
        "gap": (make_sample("gap").model_copy(update={"version_spans": gap}), "tokens of unknown version"),
        "flat": (flat, "response_ids is not an array of 1 dimensions"),
        "floats": (make_sample("floats").model_copy(update={"response_ids": float32_array(fine)}), "holds float32"),
    }


def test_samples_that_nobody_can_train_on_are_dead_letters_with_all_lengths() -> None:
    world = World(max_sample_tokens=20, algorithm={"factory": "services.trainer.algorithms.combine:Combine"})
    bad = broken_samples()
    world.put(*(event for event, _ in bad.values()), make_sample("good"))
    settle(world.start(), world)
    (step,) = world.steps()
    assert [sample.turn_id for sample in step.samples] == ["good"]
    found = dead_letters(world)
    assert found.keys() == bad.keys()
    for turn, (event, message) in bad.items():
        assert message in found[turn]
        assert event.sample_id in found[turn]
        assert "response_ids [" in found[turn]
        assert "behaviour_logprobs [4]" in found[turn]


COMBINE = {"factory": "services.trainer.algorithms.combine:Combine"}


def test_the_own_teacher_answers_before_the_batch_is_archived() -> None:
    world = World(batch_size=3, algorithm=COMBINE, own_teacher={})
    asking = [
        make_sample("both", hinted_prompt_ids=[9, 1, 2, 3]),
        make_sample("hint", reward=None, hinted_prompt_ids=[8, 1, 2, 3]),
    ]
    world.put(*asking, make_sample("reward"))
    settle(world.start(), world)
    (step,) = world.steps()
    assert sorted(world.policy.questions) == sorted(
        [(asking[0].sample_id, [9, 1, 2, 3]), (asking[1].sample_id, [8, 1, 2, 3])]
    )
    assert {each.turn_id: each.has_teacher for each in step.samples} == {"both": True, "hint": True, "reward": False}
    assert step.closed_by == "count", "a hint that is still to be scored counts as a signal"
    assert [sample.is_finite for sample in world.archive.batches[0]] == [True] * 3
    assert [sample.is_finite for sample in world.policy.trained] == [True] * 3


def test_a_question_to_a_trainer_without_a_teacher_leaves_the_reward() -> None:
    world = World(algorithm=COMBINE)
    hint_only = make_sample("hint", reward=None, hinted_prompt_ids=[8, 1, 2, 3])
    world.put(make_sample("both", hinted_prompt_ids=[9, 1, 2, 3]), make_sample("reward"), hint_only)
    settle(world.start(), world)
    steps = world.steps()
    assert {each.turn_id: each.has_teacher for each in steps[0].samples} == {"both": False, "reward": False}
    (dropped,) = [each for step in steps for each in step.drops]
    assert (dropped.turn_id, dropped.reason) == ("hint", DropReason.NO_COMPONENT)
    assert dropped.detail == "it carries a request for the trainer's own teacher"
    assert world.policy.questions == []


def test_questions_that_the_own_teacher_cannot_be_asked_are_listed() -> None:
    world = World(max_sample_tokens=20, algorithm=COMBINE, own_teacher={})
    world.put(
        make_sample("long", hinted_prompt_ids=[1] * 17),
        make_sample("foreign", hinted_prompt_ids=[1000]),
        make_sample("nothing", hinted_prompt_ids=[]),
        make_sample("good", hinted_prompt_ids=[1] * 16),
    )
    settle(world.start(), world)
    (step,) = world.steps()
    assert [sample.turn_id for sample in step.samples] == ["good"]
    (foreign,) = step.drops
    assert (foreign.turn_id, foreign.reason) == ("foreign", DropReason.OTHER_TOKENIZER)
    assert "teacher_request.prompt_ids 1000..1000" in foreign.detail
    found = dead_letters(world)
    assert found.keys() == {"long", "nothing"}
    assert "21 tokens with the hinted prompt, but max_sample_tokens is 20" in found["long"]
    assert "teacher_request.prompt_ids [17]" in found["long"]
    assert "teacher_request.prompt_ids is not an array" in found["nothing"]


def test_the_version_that_teaches_is_never_removed() -> None:
    world = World(batch_size=1, max_age_versions=None, algorithm=COMBINE, own_teacher={"version": 1})
    loop = world.start()
    world.heartbeat(4)
    for number in range(4):
        world.put(make_sample(f"turn-{number}"))
        settle(loop, world)
    assert world.disk.deleted == [2], "1 teaches, 3 is the newest's base, 4 the newest"


def test_a_restart_reads_past_what_it_could_not_train_on() -> None:
    world = World(max_sample_tokens=20, algorithm={"factory": "services.trainer.algorithms.combine:Combine"})
    world.put(*(event for event, _ in broken_samples().values()))
    for turn in ("first", "second"):
        world.put(make_sample(turn))
        settle(world.start(), world)
        assert [sample.turn_id for sample in world.steps()[-1].samples] == [turn]


def test_what_is_no_sample_goes_to_the_dead_letter_topic_as_it_was() -> None:
    world = World()
    broken = make_sample("broken").model_dump(mode="json")
    broken["behaviour_logprobs"] = make_sample("x", response_ids=[1]).behaviour_logprobs.model_dump(mode="json")
    record = sample_record(make_sample("broken"), NAMESPACE)
    write(world.bus, OutgoingRecord(SAMPLES, b"broken", orjson.dumps(broken), record.headers))
    write(world.bus, OutgoingRecord(SAMPLES, b"junk", b"not json", record.headers))
    world.put(make_sample("good"))
    settle(world.start(), world)
    dead = {r.key: r for r in read_all(world.bus, f"{NAMESPACE}.{topics.TRAINER_DLQ}")}
    assert dead[b"junk"].value == b"not json"
    message = header(dead[b"broken"].headers, "dlq.error.message")
    assert message is not None
    assert "4 response ids but lengths {'behaviour_logprobs': 1}" in message
    assert make_sample("broken").sample_id in message
    assert "prompt_ids [3], response_ids [4], behaviour_logprobs [1]" in message
    assert [sample.turn_id for step in world.steps() for sample in step.samples] == ["good"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_leaves_every_dead_letter_once(point: str, nth: int, every: int) -> None:
    world = World(checkpoint_every_steps=every)
    headers = sample_record(make_sample("any"), NAMESPACE).headers
    junk = [f"junk-{number}".encode() for number in range(6)]
    for number, key in enumerate(junk):
        write(world.bus, OutgoingRecord(SAMPLES, key, b"not json", headers, partition=number % PARTITIONS))
        world.put(make_sample(f"turn-{number}", session_id=f"s{number}"))
    world.faults.arm(point, nth)
    settle_through_crashes(world)
    world.settings = world.settings.model_copy(update={"checkpoint_every_steps": 1})
    world.put(make_sample("last"))
    settle_through_crashes(world)
    dead = read_all(world.bus, f"{NAMESPACE}.{topics.TRAINER_DLQ}")
    assert Counter(record.key for record in dead) == Counter(junk)
    for record in dead:
        partition, offset = header(record.headers, "dlq.partition"), header(record.headers, "dlq.offset")
        assert header(record.headers, "dlq.id") == ids.derive("dead-letter", SAMPLES, str(partition), str(offset))
        assert record.value == b"not json"


def test_dead_letters_alone_make_a_step_that_announces_them() -> None:
    world = World()
    write(world.bus, OutgoingRecord(SAMPLES, b"junk", b"not json", partition=0))
    settle(world.start(), world)
    (step,) = world.steps()
    assert (step.samples, step.drops, step.closed_by) == ([], [], "age")
    assert step.next_offsets["0"] == 1
    (dead,) = read_all(world.bus, f"{NAMESPACE}.{topics.TRAINER_DLQ}")
    assert dead.key == b"junk"


def test_a_later_revision_of_a_trained_turn_is_listed_and_not_trained() -> None:
    world = World()
    world.put(make_sample("a"), make_sample("b"))
    settle(world.start(), world)
    later = make_sample("a", revision=(0, True, 9))
    world.put(later)
    settle(world.start(), world)
    assert world.steps()[-1].samples == []
    assert [(d.sample_id, d.reason) for d in world.steps()[-1].drops] == [(later.sample_id, DropReason.ALREADY_TRAINED)]


def test_ages_survive_a_restart() -> None:
    world = World(max_age_versions=1, batch_size=1)
    world.put(*(make_sample(f"turn-{number}", session_id="one") for number in range(3)))
    settle(world.start(), world)
    steps = world.steps()
    assert [sample.age for step in steps for sample in step.samples] == [0, 1]
    assert [d.reason for step in steps for d in step.drops] == [DropReason.TOO_OLD]
    world.put(make_sample("late", versions=(0,)))
    settle(world.start(), world)
    assert [d.reason for d in world.steps()[-1].drops] == [DropReason.TOO_OLD]
    world.put(make_sample("cut in two", versions=(0, 2)))
    settle(world.start(), world)
    (partly,) = world.steps()[-1].samples
    assert (partly.turn_id, partly.stale_tokens, partly.response_tokens) == ("cut in two", 2, 4)


def test_waiting_samples_are_read_again_and_others_are_not_listed_again() -> None:
    world = World(batch_size=3)
    world.put(
        make_sample("neutral", reward=0.0),
        *(make_sample(f"turn-{number}", session_id="one") for number in range(4)),
    )
    loop = world.start()
    while not loop.advance():
        pass
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage]
    assert [sample.turn_id for sample in world.steps()[0].samples] == ["turn-0", "turn-1", "turn-2"]
    settle(world.start(), world)
    assert [sample.turn_id for sample in world.steps()[1].samples] == ["turn-3"]
    assert max(listed(world.steps()).values()) == 1


def test_waiting_samples_survive_a_second_crash_while_they_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(batch_size=2)
    world.put(*(make_sample(f"turn-{number}", session_id="one") for number in range(9)))

    def one_step() -> None:
        loop = world.start()
        while not loop.advance():
            pass
        loop._finisher.join()  # pyright: ignore[reportPrivateUsage]

    one_step()  # takes all nine in, trains two: seven wait
    monkeypatch.setattr("services.trainer.reader._MAX_RECORDS", 2)
    one_step()  # a batch closes when two of the seven have been read again
    settle(world.start(), world)
    assert listed(world.steps()) == {make_sample(f"turn-{number}").sample_id: 1 for number in range(9)}


def test_a_waiting_sample_that_was_gone_from_the_log_is_listed() -> None:
    world = World(batch_size=1)
    world.put(make_sample("a", session_id="one"), make_sample("b", session_id="one"))
    loop = world.start()
    while not loop.advance():
        pass
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage]
    vanished = make_sample("b").sample_id
    partition = TopicPartition(SAMPLES, partition_for("one", PARTITIONS))
    world.bus.truncate_before(partition, 2)
    settle(world.start(), world)
    (dropped,) = world.steps()[1].drops
    assert (dropped.sample_id, dropped.reason) == (vanished, DropReason.SUPERSEDED)
    assert "no longer on the log" in dropped.detail


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_loses_nothing_and_trains_nothing_twice(
    point: str, nth: int, every: int, tmp_path: Path
) -> None:
    world = World(checkpoint_every_steps=every)
    world.disk.turns = LedgerFile(tmp_path / "turns.sqlite")
    world.put(
        *(
            make_sample(f"turn-{number}", session_id=f"s{number % 5}", reward=(1.0, -1.0, 0.0)[number % 3])
            for number in range(15)
        )
    )
    world.faults.arm(point, nth)
    crashes = settle_through_crashes(world)
    if every == 3:  # steps since the last checkpoint are announced with the next one
        world.settings = world.settings.model_copy(update={"checkpoint_every_steps": 1})
        world.put(make_sample("last"))
        crashes += settle_through_crashes(world)
    assert crashes == 1 or world.faults.is_armed, "the point was not passed often enough"

    steps = world.steps()
    counts = listed(steps)
    assert set(counts) >= {make_sample(f"turn-{number}").sample_id for number in range(15)}
    assert max(counts.values()) == 1
    assert len({step.train_step_id for step in steps}) == len(steps)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    in_weights = [sample.sample_id for step in steps if step.weight_version is not None for sample in step.samples]
    assert world.policy.weights == in_weights, "the weights hold exactly what the events say, in order"
    numbers = [event.weight_version for event in world.versions()]
    assert numbers == list(range(len(numbers)))
    assert world.pointers() == numbers
    for event in world.versions():
        trained = [s.sample_id for step in steps if step.weight_version is not None
                   and step.weight_version <= event.weight_version for s in step.samples]  # fmt: skip
        assert list(world.disk.artefacts[event.weight_version]) == trained


def test_training_from_an_older_checkpoint_gets_new_numbers_and_a_lineage_of_its_own() -> None:
    world = World(batch_size=1, max_age_versions=None)
    world.put(*(make_sample(f"turn-{number}", session_id="one") for number in range(3)))
    settle(world.start(), world)
    assert [event.weight_version for event in world.versions()] == [0, 1, 2, 3]
    for step in (2, 3):
        del world.disk.checkpoints[step]
    world.put(make_sample("served-by-a-lost-version", versions=(3,)))
    settle(world.start(), world)
    fresh = world.versions()[4:]
    assert [(event.weight_version, event.base_version) for event in fresh] == [(4, 1), (5, 4), (6, 5)]
    assert len({event.lineage for event in fresh}) == 1
    assert fresh[0].lineage != world.versions()[0].lineage
    new_steps = [step for step in world.steps() if step.lineage == fresh[0].lineage]
    trained_again = {sample.turn_id for step in new_steps for sample in step.samples}
    assert trained_again == {"turn-1", "turn-2", "served-by-a-lost-version"}
    assert len({step.train_step_id for step in world.steps()}) == len(world.steps())


def test_a_new_run_never_reuses_the_numbers_of_a_lost_one() -> None:
    world = World(batch_size=1)
    world.put(make_sample("a", session_id="one"), make_sample("b", session_id="one"))
    settle(world.start(), world)
    world.disk.checkpoints.clear()
    settle(world.start(), world)
    assert [event.weight_version for event in world.versions()] == [0, 1, 2, 3, 4]


def test_old_versions_go_only_when_no_engine_may_load_them() -> None:
    world = World(batch_size=1, max_age_versions=None)

    def train(turn: str) -> None:
        world.put(make_sample(turn))
        settle(loop, world)

    loop = world.start()
    world.heartbeat(1)
    for number in range(4):
        train(f"turn-{number}")
    assert world.disk.deleted == [2], "0 is the base, 1 is served, 3 is the newest's base, 4 the newest"
    world.heartbeat(None, EngineState.UPDATING, target=4)
    train("turn-4")
    assert world.disk.deleted == [2], "an engine on an unknown version may be sent back to any"
    world.heartbeat(5)
    train("turn-5")
    assert world.disk.deleted == [2, 1, 3, 4]
    assert world.tombstones() == ["default/2", "default/1", "default/3", "default/4"]


def test_an_old_version_that_the_disk_does_not_let_go_ends_nothing_and_goes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(batch_size=1, max_age_versions=None)
    loop = world.start()
    world.heartbeat(1)

    def refuse(_store: FakeStore, _version: int) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(FakeStore, "delete", refuse)
        for number in range(4):
            world.put(make_sample(f"turn-{number}"))
            settle(loop, world)
    assert world.disk.deleted == []
    world.put(make_sample("turn-4"))
    settle(loop, world)
    assert world.disk.deleted == [2, 3]


def test_a_backlog_stays_on_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.loop._READ_AHEAD_SAMPLES", 20)
    monkeypatch.setattr("services.trainer.reader._MAX_RECORDS", 10)
    world = World(batch_size=2, max_age_versions=None)
    world.put(*(make_sample(f"turn-{number}", session_id=f"s{number % 5}") for number in range(150)))
    settle(world.start(), world)
    assert [len(step.samples) for step in world.steps()] == [2] * 75
    waiting = [len(document["waiting"]) for _, document in world.disk.checkpoints.values()]
    assert max(waiting) < 20 + 10


def test_what_a_step_costs_does_not_depend_on_how_many_turns_were_trained() -> None:
    world = World(batch_size=2, max_age_versions=None)
    loop = world.start()
    sizes: list[int] = []
    added: list[int] = []
    for number in range(40):
        world.put(*(make_sample(f"turn-{number}-{each}") for each in range(2)))
        before = len(world.disk.turns.entries)  # type: ignore[union-attr] # it is the plain list here
        settle(loop, world, quiet_polls=1)
        added.append(len(world.disk.turns.entries) - before)  # type: ignore[union-attr] # the same
        sizes.append(len(orjson.dumps({**loop.progress.document(), "seen_offsets": 0, "knobs": 0})))
    assert added == [2] * 40
    assert sizes[-1] - sizes[1] < 20, "digits of counters alone"
    assert loop.progress.turns.entries == 80


def test_stopping_announces_the_steps_since_the_last_checkpoint() -> None:
    world = World(checkpoint_every_steps=100)
    world.put(make_sample("a"), make_sample("b"))
    loop = world.start()
    while not loop.advance():
        pass
    assert world.steps() == []
    loop.run(_set())
    assert [step.weight_version for step in world.steps()] == [1]
    assert [event.weight_version for event in world.versions()] == [0, 1]


@pytest.mark.parametrize("checkpoint_every_steps", [1, 100])
@pytest.mark.parametrize("during", ["taught", "train_step"])
def test_a_step_that_is_given_up_is_made_again_by_the_next_trainer(during: str, checkpoint_every_steps: int) -> None:
    world = World(checkpoint_every_steps=checkpoint_every_steps)
    samples = [make_sample(name) for name in "abcd"]
    world.put(*samples[:2])
    loop = world.start()
    while not loop.advance():
        pass
    world.put(*samples[2:])

    def interrupted(*_: object) -> Any:
        raise StepInterrupted("the process is to end")

    setattr(world.policy, during, interrupted)
    loop.run(threading.Event())  # it ends by itself
    assert [[sample.sample_id for sample in step.samples] for step in world.steps()] == [
        [sample.sample_id for sample in samples[:2]]
    ], "what was finished is announced, and nothing else"
    settle(loop := world.start(), world)
    loop.run(_set())
    assert world.policy.weights == [sample.sample_id for sample in samples]
    assert listed(world.steps()) == Counter(sample.sample_id for sample in samples)


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_a_broker_outage_delays_events_and_loses_none() -> None:
    world = World()
    world.put(make_sample("a"), make_sample("b"))
    loop = world.start()
    attempts: list[str] = []

    def go_down_once(operation: str, when: str) -> None:
        if (operation, when) == ("commit", "before"):
            attempts.append(operation)
            if len(attempts) == 1:
                world.bus.set_available(False)
                raise BrokerUnavailable("the broker went away before the commit")

    world.bus.set_fault(go_down_once)
    timer = threading.Timer(0.3, world.bus.set_available, [True])
    timer.start()
    while not loop.advance():
        pass
    loop._finisher.join()  # pyright: ignore[reportPrivateUsage]
    timer.join()
    assert [event.weight_version for event in world.versions()] == [0, 1]
    assert len(world.steps()) == 1


def test_an_unknown_end_of_a_transaction_is_looked_up_and_not_repeated() -> None:
    world = World()
    world.put(make_sample("a"), make_sample("b"))
    loop = world.start()
    failed: list[str] = []

    def lose_the_answer(operation: str, when: str) -> None:
        if (operation, when) == ("commit", "after") and not failed:
            failed.append(operation)
            raise TransactionOutcomeUnknown("no answer to the commit")

    world.bus.set_fault(lose_the_answer)
    settle(loop, world)
    assert failed == ["commit"]
    assert [event.weight_version for event in world.versions()] == [0, 1]
    assert len(world.steps()) == 1


def test_what_people_went_back_to_is_kept_until_they_release_it() -> None:
    world = World(batch_size=1, max_age_versions=None)
    loop = world.start()

    def train(turn: str) -> None:
        world.put(make_sample(turn))
        settle(loop, world)

    world.heartbeat(1)
    train("one")
    world.clock.advance(timedelta(days=2).total_seconds())  # the heartbeat expires
    roll_back(world.bus, NAMESPACE, "default", 1, reason="", now=world.clock.now())
    for turn in ("two", "three", "four"):
        train(turn)
    assert world.disk.deleted == [2], "weights_keep is 1, and no engine says that it serves version 1"
    history = trainer_history(world.settings, world.bus)
    assert (history.pointer_version, history.newest_number) == (1, 4), "a run without a checkpoint would start there"
    release(world.bus, NAMESPACE, "default")
    train("five")
    assert world.disk.deleted == [2, 1, 3]


def test_a_batch_that_a_guard_holds_moves_the_offsets_and_publishes_nothing() -> None:
    world = World(guards={"effective_samples": {"policy": "hold", "min_samples": 2}})
    world.put(make_sample("lonely"))
    settle(world.start(), world)
    (step,) = world.steps()
    assert (step.closed_by, step.weight_version, step.unchanged_reason) == ("age", None, "held")
    assert [(action.guard, action.action, action.value, action.limit) for action in step.guards] == [
        ("effective_samples", "hold", 1.0, 2.0)
    ]
    assert [sample.turn_id for sample in step.samples] == ["lonely"]
    assert step.batch_uri == "file:///batches/lineage-1/1.safetensors", "what was held is kept as what was trained"
    assert sum(step.next_offsets.values()) == 1
    assert [event.weight_version for event in world.versions()] == [0]
    assert (world.pointers(), world.policy.weights, world.policy.num_updates) == ([0], [], 0)
    assert world.report.status()["samples_trained"] == 0
    settle(world.start(), world)
    assert len(world.steps()) == 1, "the batch is not tried again"
    world.put(*(make_sample(f"later-{number}") for number in range(2)))
    settle(world.start(), world)
    assert (world.steps()[-1].weight_version, world.steps()[-1].guards) == (1, [])


def test_a_step_that_holds_itself_says_so() -> None:
    world = World(guards={"shift": {"policy": "hold", "max_shift_nats": 0.5}})
    breach = Breach("shift", "shift_mean_abs", 0.75, 0.5)
    world.policy.answer = lambda samples: StepResult(
        False, UnchangedReason.HELD, {"shift_mean_abs": 0.75}, {}, held=(breach,)
    )
    world.put(*(make_sample(f"turn-{number}") for number in range(2)))
    settle(world.start(), world)
    (step,) = world.steps()
    assert (step.weight_version, step.unchanged_reason) == (None, "held")
    assert [(action.action, action.measurement, action.value) for action in step.guards] == [
        ("hold", "shift_mean_abs", 0.75)
    ]
    assert [each.measurement for each in world.policy.controls[0].hold] == ["shift_mean_abs", "effective_sample_share"]


def test_samples_that_guards_drop_are_listed_with_their_reason() -> None:
    world = World(
        batch_size=3,
        guards={
            "exploration": {"policy": "drop", "min_answer_diversity": 0.9},
            "shift": {"policy": "drop", "max_shift_nats": 0.5},
        },
    )
    same, again = make_sample("same", response_ids=[4, 5]), make_sample("again", response_ids=[4, 5])
    moved = make_sample("moved", response_ids=[6, 7])
    breach = Breach("shift", "shift_mean_abs", 0.75, 0.5)
    world.policy.answer = lambda samples: StepResult(True, None, {}, {}, dropped={moved.sample_id: breach})
    world.put(same, again, moved)
    settle(world.start(), world)
    (step,) = world.steps()
    assert len(step.samples) == 1
    assert Counter((drop.reason, drop.detail) for drop in step.drops) == Counter(
        [
            (DropReason.GUARD, "exploration: answer_diversity 0.6667 below 0.9"),
            (DropReason.GUARD, "shift: shift_mean_abs 0.75 above 0.5"),
        ]
    )
    assert listed([step]) == Counter(event.sample_id for event in (same, again, moved))
    assert Counter(action.action for action in step.guards)["drop"] == 2
    assert world.report.status()["samples_trained"] == 1


def test_what_guards_turned_survives_every_restart() -> None:
    """The same rates and coefficients in every step, whether the trainer ran through or started again each time."""
    section = {
        "exploration": {"policy": "adapt", "min_answer_diversity": 0.7},
        "shift": {"policy": "adapt", "max_age_versions": 1},
    }
    turned: list[list[tuple[dict[str, float], list[float], list[dict[str, float]]]]] = []
    for restarts in (False, True):
        world = World(guards=section)
        loop = world.start()
        rows: list[tuple[dict[str, float], list[float], list[dict[str, float]]]] = []
        for number in range(5):
            response = [4, 5] if number < 3 else [4 + number, 50 + number, 60 + number]
            pair = [
                make_sample(f"{number}-{place}", response_ids=[token + 7 * place * (number >= 3) for token in response])
                for place in range(2)
            ]
            world.put(*pair)
            if restarts:
                loop = world.start()
            settle(loop, world)
            controls = [dict(each.coefficients) for each in world.policy.controls[-1:]]
            rows.append((world.steps()[-1].knobs, world.policy.learning_rates[-1:], controls))
        turned.append(rows)
    assert turned[0] == turned[1]
    assert [row[0]["entropy_coefficient"] for row in turned[0]] == pytest.approx(
        [0.0, 0.0005, 0.00075, 0.001125, 0.0010125]
    )
    assert [row[0]["learning_rate"] for row in turned[0]] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.25])
