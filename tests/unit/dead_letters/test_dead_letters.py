"""Dead letters as data, and sending them back on a log in memory."""

from datetime import UTC, datetime, timedelta

import pytest

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.codec import header
from clawstream.dead_letters.letter import Letter, Letters, counts
from clawstream.dead_letters.reading import read_letters
from clawstream.dead_letters.redrive import Redriver, RedriveReport
from clawstream.dead_letters.selection import Selection, moment
from clawstream.errors import DecodeError, Overtaken, SettingsError, TransactionAbortable
from clawstream.stages import JUDGE
from clawstream.topics import JUDGE_DLQ, NEXT_STATES, full_name, topic_definitions
from clawstream.topics_admin import apply_topics
from clawstream.worker.dead_letters import dead_letter_record
from clawstream.worker.outcomes import DeadLetter
from tests.fixtures.buses import read_all

START = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)
INPUTS = full_name("clawstream", NEXT_STATES)
DEAD = full_name("clawstream", JUDGE_DLQ)


class Scene:
    """The judge's topics, with some dead letters."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.bus = MemoryBus(clock=self.clock)
        admin = self.bus.admin()
        apply_topics(admin, "clawstream", 1, topic_definitions().values())

    def write(self, *records: OutgoingRecord) -> None:
        producer = self.bus.producer()
        for record in records:
            producer.produce(record)
        producer.flush(10)

    def bury(
        self,
        value: bytes,
        *,
        reason: str = "undecodable",
        key: bytes | None = b"session",
        partition: int = 3,
        without_value: bool = False,
        times: int = 1,
    ) -> Record:
        """Writes an input and its letter; returns the input."""
        headers = (("ce_id", b"id"), ("traceparent", b"00-1"))
        self.write(OutgoingRecord(INPUTS, key, value, headers, partition=partition))
        record = read_all(self.bus, INPUTS)[-1]
        letter = dead_letter_record(
            record,
            DeadLetter(reason, DecodeError("broken"), 2, without_value=without_value),
            topic=DEAD,
            group="clawstream.judge",
            service_version="1",
            now=self.clock.now(),
        )
        self.write(*[letter] * times)
        return record

    def letters(self) -> list[Letter]:
        return read_letters(self.bus, "clawstream", [JUDGE])

    def redrive(self, selection: Selection | None = None) -> RedriveReport:
        redriver = Redriver(self.bus, "clawstream", JUDGE, clock=self.clock)
        return redriver.run(selection or Selection(), lambda done, of: None)

    def inputs(self) -> list[Record]:
        return read_all(self.bus, INPUTS)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_letter_says_where_it_was_and_why_it_is_here(scene: Scene) -> None:
    record = scene.bury(b"{broken")
    (letter,) = scene.letters()
    assert letter.name == f"judge/{letter.record.partition}@0"
    assert letter.origin is not None
    assert str(letter.origin) == str(record)
    assert (letter.reason, letter.error_type, letter.error_message) == ("undecodable", "DecodeError", "broken")
    assert (letter.attempts, letter.buried_at, letter.value_bytes, letter.redrives) == (2, START, 7, 0)
    assert letter.redriven_at is None


def test_a_letter_of_a_writer_that_says_less_is_readable_too(scene: Scene) -> None:
    scene.write(OutgoingRecord(DEAD, b"k", b"v", (("dlq.error.type", b"DecodeError"), ("dlq.time", b"yesterday"))))
    (letter,) = scene.letters()
    assert (letter.reason, letter.origin, letter.attempts) == ("undecodable", None, 1)
    assert letter.buried_at == START
    (refused,) = scene.redrive().refused
    assert "headers do not say" in refused[1]


def test_an_input_comes_back_as_it_was_with_a_count(scene: Scene) -> None:
    before = scene.bury(b"\x00\xff{broken")
    scene.clock.advance(60)
    report = scene.redrive()
    assert [letter.origin for letter in report.redriven] != []
    (_, again) = scene.inputs()
    assert (again.key, again.value, again.partition) == (before.key, before.value, before.partition)
    assert again.headers[: len(before.headers)] == before.headers
    assert header(again.headers, "redrive.count") == "1"
    assert (header(again.headers, "redrive.of") or "").startswith(DEAD)
    assert not [name for name, _ in again.headers if name.startswith("dlq.")]


def test_a_letter_is_sent_back_once(scene: Scene) -> None:
    scene.bury(b"a")
    scene.bury(b"b", reason="deadline")
    assert len(scene.redrive(Selection(reasons=["deadline"])).redriven) == 1
    scene.clock.advance(60)
    second = scene.redrive()
    assert ([len(second.redriven), len(second.already)], second.refused) == ([1, 1], [])
    third = scene.redrive()
    assert [len(third.redriven), len(third.already)] == [0, 2]
    assert [record.value for record in scene.inputs()] == [b"a", b"b", b"b", b"a"]
    assert counts(scene.letters()) == {("judge", "deadline"): (0, 1), ("judge", "undecodable"): (0, 1)}
    assert [letter.redriven_at for letter in scene.letters()] == [START + timedelta(seconds=60), START]


def test_what_comes_back_again_counts_on(scene: Scene) -> None:
    scene.bury(b"a")
    scene.redrive()
    (_, again) = scene.inputs()
    scene.write(
        dead_letter_record(
            again,
            DeadLetter("undecodable", DecodeError("still broken")),
            topic=DEAD,
            group="g",
            service_version="1",
            now=scene.clock.now() + timedelta(seconds=1),
        )
    )
    first, second = scene.letters()
    assert (first.redriven_at, second.redriven_at) == (START, None)
    assert second.redrives == 1
    scene.redrive()
    assert header(scene.inputs()[-1].headers, "redrive.count") == "2"
    assert [name for name, _ in scene.inputs()[-1].headers].count("redrive.count") == 1


def test_an_input_that_was_buried_twice_is_one_letter(scene: Scene) -> None:
    scene.bury(b"a", times=3)
    (letter,) = scene.letters()
    assert letter.copies == 3
    assert len(scene.redrive().redriven) == 1
    assert len(scene.inputs()) == 2


def test_a_value_that_did_not_fit_is_read_where_it_was(scene: Scene) -> None:
    scene.bury(b"large", without_value=True)
    assert len(scene.redrive().redriven) == 1
    assert [record.value for record in scene.inputs()] == [b"large", b"large"]


def test_a_value_that_is_gone_is_refused_by_name_and_the_others_go(scene: Scene) -> None:
    gone = scene.bury(b"large", without_value=True)
    scene.bury(b"a", partition=4)
    scene.bus.truncate_before(gone.topic_partition, gone.offset + 1)
    report = scene.redrive()
    assert [letter.value_bytes for letter in report.redriven] == [1]
    ((letter, problem),) = report.refused
    assert letter.is_value_omitted
    assert "retention removed it" in problem
    assert scene.letters()[0].redriven_at is None


def test_what_its_topic_refuses_is_named_and_the_others_go(scene: Scene) -> None:
    scene.bury(b"x" * 2_000_000)
    for number in range(5):
        scene.bury(b"%d" % number)
    admin = scene.bus.admin()
    admin.alter_topic_config(INPUTS, {"max.message.bytes": "1000000"})
    report = scene.redrive()
    assert len(report.redriven) == 5
    ((letter, problem),) = report.refused
    assert letter.value_bytes == 2_000_000
    assert "larger than" in problem
    assert [record.value for record in scene.inputs()[6:]] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_letter_of_another_topic_is_refused(scene: Scene) -> None:
    scene.write(OutgoingRecord("clawstream.scores.v1", b"k", b"v", partition=0))
    (elsewhere,) = read_all(scene.bus, "clawstream.scores.v1")
    outcome = DeadLetter("undecodable", DecodeError("x"))
    scene.write(
        dead_letter_record(elsewhere, outcome, topic=DEAD, group="g", service_version="1", now=scene.clock.now())
    )
    report = scene.redrive()
    assert (report.redriven, len(report.refused)) == ([], 1)


def test_a_preview_writes_nothing(scene: Scene) -> None:
    scene.bury(b"a")
    report = Redriver(scene.bus, "clawstream", JUDGE, clock=scene.clock).preview(Selection())
    assert len(report.redriven) == 1
    assert len(scene.inputs()) == 1
    assert scene.letters()[0].redriven_at is None


def test_what_failed_half_way_is_not_sent_twice(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawstream.dead_letters.redrive.MAX_LETTERS_PER_TRANSACTION", 2)
    for number in range(5):
        scene.bury(b"%d" % number)
    commits = 0

    def second_commit_fails(operation: str, when: str) -> None:
        nonlocal commits
        if (operation, when) == ("commit", "before"):
            commits += 1
            if commits == 2:
                raise TransactionAbortable("the broker is going away")

    scene.bus.set_fault(second_commit_fails)
    with pytest.raises(TransactionAbortable):
        scene.redrive()
    scene.bus.set_fault(None)
    report = scene.redrive()
    assert [len(report.redriven), len(report.already)] == [3, 2]
    assert sorted(record.value or b"" for record in scene.inputs()[5:]) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_second_redrive_fences_the_first(scene: Scene) -> None:
    scene.bury(b"a")
    fenced = False

    def another_starts(operation: str, when: str) -> None:
        nonlocal fenced
        if (operation, when) == ("produce", "before") and not fenced:
            fenced = True
            assert len(scene.redrive().redriven) == 1

    scene.bus.set_fault(another_starts)
    with pytest.raises(
        Overtaken, match=r"another `clawstream dlq redrive` of this stage began meanwhile.*run it again"
    ):
        scene.redrive()
    assert [record.value for record in scene.inputs()] == [b"a", b"a"]


def test_a_selection_means_what_holds_in_all_its_parts(scene: Scene) -> None:
    scene.bury(b"a")
    scene.clock.advance(3600)
    scene.bury(b"b", reason="deadline", partition=5)
    first, second = scene.letters()
    assert Selection(reasons=["deadline"]).of([first, second]) == [second]
    assert Selection(names=[first.name]).of([first, second]) == [first]
    assert Selection(since=START + timedelta(seconds=3600)).of([first, second]) == [second]
    assert Selection(until=START + timedelta(seconds=3600)).of([first, second]) == [first]
    assert Selection(reasons=["deadline"], until=START).of([first, second]) == []
    assert Selection().is_empty
    assert not Selection(until=START).is_empty


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", START - timedelta(seconds=90)),
        ("30m", START - timedelta(minutes=30)),
        ("2h", START - timedelta(hours=2)),
        ("7d", START - timedelta(days=7)),
        ("2026-02-28", datetime(2026, 2, 28, tzinfo=UTC)),
        ("2026-02-28T10:00+01:00", datetime(2026, 2, 28, 9, tzinfo=UTC)),
    ],
)
def test_times_as_people_say_them(text: str, expected: datetime) -> None:
    assert moment(text, START) == expected


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(SettingsError, match="is no time"):
        moment("soon", START)


def test_a_marker_is_no_letter(scene: Scene) -> None:
    scene.bury(b"a")
    scene.redrive()
    records = read_all(scene.bus, DEAD)
    letters = Letters(JUDGE)
    for record in records:
        letters.apply(record)
    assert (len(records), len(letters.all())) == (2, 1)
