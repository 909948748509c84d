"""The tracker against a model: nothing is lost, nothing is committed twice, no late result counts."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from clawstream.bus.interface import Record, TopicPartition
from clawstream.worker.outcomes import Skip
from clawstream.worker.tracker import Ticket, Tracker

PARTITIONS = [TopicPartition("inputs", number) for number in range(3)]
WINDOW = 4
MAX_IN_FLIGHT = 3
"""Of one partition."""
DONE = Skip("done")


def record(partition: TopicPartition, offset: int) -> Record:
    return Record(partition.topic, partition.partition, offset, b"k", b"v", (), 1000 + offset)


@dataclass
class Model:
    """One assignment of one partition, told as plainly as possible."""

    generation: int
    started: list[int] = field(default_factory=list)
    dispatched: list[int] = field(default_factory=list)
    resolved: set[int] = field(default_factory=set)

    def prefix(self) -> list[int]:
        done: list[int] = []
        for offset in self.started:
            if offset not in self.resolved:
                break
            done.append(offset)
        return done


class TrackerMachine(RuleBasedStateMachine):
    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker(window_per_partition=WINDOW, max_in_flight_per_partition=MAX_IN_FLIGHT)
        self.models: dict[TopicPartition, Model] = {}
        self.next_offset = dict.fromkeys(PARTITIONS, 0)
        self.committed = dict.fromkeys(PARTITIONS, 0)
        self.generation = 0
        self.generation_of: dict[int, int] = {}

    @rule(partition=st.sampled_from(PARTITIONS))
    def assign(self, partition: TopicPartition) -> None:
        """Reading starts again at what was committed, as a consumer does."""
        self.generation += 1
        self.tracker.assign([partition])
        self.models[partition] = Model(self.generation)
        self.next_offset[partition] = self.committed[partition]

    @rule(partition=st.sampled_from(PARTITIONS))
    def release(self, partition: TopicPartition) -> None:
        self.tracker.release([partition])
        self.models.pop(partition, None)

    @rule(partition=st.sampled_from(PARTITIONS), gap=st.integers(0, 2))
    def start(self, partition: TopicPartition, gap: int) -> None:
        """Offsets have gaps: markers and aborted records take some."""
        offset = self.next_offset[partition] + gap
        taken = self.tracker.start(record(partition, offset))
        assert taken == (partition in self.models)
        if taken:
            self.models[partition].started.append(offset)
            self.next_offset[partition] = offset + 1
            assert not self.tracker.start(record(partition, offset)), "the same record again"

    @rule(target=tickets, limit=st.integers(0, 5))
    def dispatch(self, limit: int) -> list[Ticket]:
        given = self.tracker.dispatch(limit)
        assert len(given) <= limit
        for ticket in given:
            model = self.models[ticket.partition]
            offset = ticket.record.offset
            assert offset == model.started[len(model.dispatched)]
            model.dispatched.append(offset)
            assert model.started.index(offset) < len(model.prefix()) + WINDOW
            assert len(set(model.dispatched) - model.resolved) <= MAX_IN_FLIGHT
            self.generation_of[id(ticket)] = model.generation
        waiting = sum(
            min(
                min(len(model.started), len(model.prefix()) + WINDOW) - len(model.dispatched),
                MAX_IN_FLIGHT - len(set(model.dispatched) - model.resolved),
            )
            for model in self.models.values()
        )
        assert len(given) == limit or waiting == 0, "work that could be done was held back"
        return given

    @rule(given=consumes(tickets), data=st.data())
    def resolve(self, given: list[Ticket], data: st.DataObject) -> None:
        for ticket in data.draw(st.permutations(given)):
            model = self.models.get(ticket.partition)
            current = model is not None and model.generation == self.generation_of[id(ticket)]
            assert self.tracker.resolve(ticket, DONE) == current, "a late result was used, or a good one dropped"
            if current and model is not None:
                model.resolved.add(ticket.record.offset)
                assert not self.tracker.resolve(ticket, DONE), "a second result for one input"

    @rule(limit=st.integers(1, 6))
    def commit(self, limit: int) -> None:
        prefixes = self.tracker.completed(limit)
        assert sum(len(prefix.results) for prefix in prefixes) <= limit
        for prefix in prefixes:
            model = self.models[prefix.partition]
            offsets = [ticket.record.offset for ticket, _ in prefix.results]
            assert offsets == model.prefix()[: len(offsets)]
            assert [ticket for ticket, _ in self.tracker.advance(prefix.partition, prefix.next_offset)] == [
                ticket for ticket, _ in prefix.results
            ]
            assert prefix.next_offset > self.committed[prefix.partition], "committed twice"
            self.committed[prefix.partition] = prefix.next_offset
            del model.started[: len(offsets)]
            model.dispatched = [offset for offset in model.dispatched if offset not in offsets]
        if sum(len(prefix.results) for prefix in prefixes) < limit:
            assert not any(model.prefix() for model in self.models.values())

    @invariant()
    def counts_agree(self) -> None:
        assert self.tracker.unfinished() == {key: len(model.started) for key, model in self.models.items()}
        behind = {
            key: len(model.resolved & set(model.started[len(model.prefix()) :])) for key, model in self.models.items()
        }
        assert self.tracker.occupying() == {key: len(model.started) - behind[key] for key, model in self.models.items()}
        under_way = sum(len(set(model.dispatched) - model.resolved) for model in self.models.values())
        assert self.tracker.in_flight == under_way
        unresolved = [
            1000 + offset for model in self.models.values() for offset in model.started if offset not in model.resolved
        ]
        assert self.tracker.oldest_unresolved_milliseconds() == min(unresolved, default=None)
        heads = {
            key: [offset for offset in model.started if offset not in model.resolved]
            for key, model in self.models.items()
        }
        assert self.tracker.heads() == {key: offsets[0] for key, offsets in heads.items() if offsets}
        assert self.tracker.completed_count == sum(len(model.prefix()) for model in self.models.values())
        assert self.tracker.has_completed(PARTITIONS) == any(model.prefix() for model in self.models.values())


TestTracker = TrackerMachine.TestCase
TestTracker.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_unresolved_input_is_never_passed_over() -> None:
    tracker = Tracker(window_per_partition=4, max_in_flight_per_partition=64)
    tracker.assign([PARTITIONS[0]])
    tracker.start(record(PARTITIONS[0], 0))
    with pytest.raises(ValueError, match=r"inputs\[0\]@0 is not resolved"):
        tracker.advance(PARTITIONS[0], 1)


def test_the_window_begins_with_the_oldest_unresolved_input_and_not_with_the_oldest_uncommitted_one() -> None:
    tracker = Tracker(window_per_partition=4, max_in_flight_per_partition=64)
    tracker.assign([PARTITIONS[0]])
    for offset in range(10):
        tracker.start(record(PARTITIONS[0], offset))
    first = tracker.dispatch(10)
    assert [ticket.record.offset for ticket in first] == [0, 1, 2, 3]
    tracker.resolve(first[0], DONE)
    tracker.resolve(first[1], DONE)
    tracker.resolve(first[3], DONE)
    assert [ticket.record.offset for ticket in tracker.dispatch(10)] == [4, 5]


def test_partitions_take_turns() -> None:
    tracker = Tracker(window_per_partition=64, max_in_flight_per_partition=64)
    tracker.assign(PARTITIONS)
    for partition in PARTITIONS:
        for offset in range(4):
            tracker.start(record(partition, offset))
    first = {tracker.dispatch(1)[0].partition for _ in range(3)}
    assert first == set(PARTITIONS)
