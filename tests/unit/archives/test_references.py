"""References by offset, translated: to the same record at its new place, or to nowhere, or refused."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream import topics
from clawstream.archives.references import NOWHERE, REFERRING, Places, Translator, in_order
from clawstream.bus.interface import Record
from clawstream.codec import header
from clawstream.errors import ArchiveError
from clawstream.topics import topic_definitions
from schemas.events import EVENT_MODELS
from schemas.events.base import RecordReference


def translator(*, allow_dangling: bool = False, without: str = "") -> Translator:
    """Every archived record at an even offset 2n below 20 is now at 100 + n, in partition 3."""
    places = Places()
    for topic in (topics.TURNS, topics.NEXT_STATES, topics.SCORES, topics.SAMPLES):
        if topic != without:
            places.add(topic, 3, {2 * number: 100 + number for number in range(10)})
    return Translator("old", "new", places, allow_dangling)


def ref(topic: str, offset: int, namespace: str = "old") -> dict[str, Any]:
    return {"topic": f"{namespace}.{topic}", "partition": 3, "offset": offset}


def moved(topic: str, event: dict[str, Any] | None, how: Translator, **headers: str) -> Record:
    value = None if event is None else orjson.dumps(event)
    record = Record(
        f"new.{topic}", 3, 7, b"key", value, tuple((name, text.encode()) for name, text in headers.items()), 0
    )
    return how.translated(topic, record)


def document(topic: str, event: dict[str, Any], how: Translator | None = None) -> dict[str, Any]:
    return orjson.loads(moved(topic, event, how or translator()).value or b"")


def test_references_lead_to_the_same_records_and_nothing_else_changes() -> None:
    event = {"turn_ref": ref(topics.TURNS, 4), "deep": [{"a": ref(topics.NEXT_STATES, 18)}], "offset": 4, "words": "4"}
    assert document(topics.SCORES, event) == {
        "turn_ref": ref(topics.TURNS, 102, "new"),
        "deep": [{"a": ref(topics.NEXT_STATES, 109, "new")}],
        "offset": 4,
        "words": "4",
    }


def test_a_samples_revision_and_all_of_a_train_step_are_translated() -> None:
    revision = {"promotion_epoch": 2, "explicit": True, "next_state_offset": 6}
    sample = {"turn_ref": ref(topics.TURNS, 4), "next_state_ref": ref(topics.NEXT_STATES, 6), "revision": revision}
    assert document(topics.SAMPLES, sample)["revision"] == {**revision, "next_state_offset": 103}
    step = {
        "samples": [{"ref": ref(topics.SAMPLES, 2), "revision": revision}],
        "drops": [{"ref": ref(topics.SAMPLES, 8)}],
        "next_offsets": {"3": 9, "4": 0},
    }
    assert document(topics.TRAIN_STEPS, step) == {
        "samples": [{"ref": ref(topics.SAMPLES, 101, "new"), "revision": {**revision, "next_state_offset": 103}}],
        "drops": [{"ref": ref(topics.SAMPLES, 104, "new")}],
        "next_offsets": {"3": 105, "4": 0},
    }


def test_ends_of_principals_and_skipped_inputs_are_translated() -> None:
    assert document(topics.FORGOTTEN, {"turn_ends": {"3": 5}})["turn_ends"] == {"3": 103}
    skips = {"topic": "old.next-states.v1", "partition": 3, "offsets_by_reason": {"a": [2, 5, 6], "b": [7]}}
    assert document(topics.SKIPS, skips) == {
        "topic": "new.next-states.v1",
        "partition": 3,
        "offsets_by_reason": {"a": [101, 103], "b": [NOWHERE]},
    }


def test_a_dead_letter_says_where_its_original_is_now() -> None:
    names = {"dlq.topic": "old.scores.v1", "dlq.partition": "3", "dlq.offset": "8", "dlq.reason": "8"}
    letter = moved(topics.TEACHER_DLQ, {"turn_ref": ref(topics.TURNS, 4)}, translator(), **names)
    assert [header(letter.headers, name) for name in names] == ["new.scores.v1", "3", "104", "8"]
    assert orjson.loads(letter.value or b"")["turn_ref"]["offset"] == 102
    assert moved(topics.TEACHER_DLQ, None, translator(), **names).value is None


@pytest.mark.parametrize("value", [b"\x00\xff", b"[1]", b"7", None])
def test_what_is_no_event_stays_what_it_is(value: bytes | None) -> None:
    record = Record("new.samples.v1", 3, 7, b"key", value, (), 0)
    assert translator().translated(topics.SAMPLES, record) == record


def test_topics_without_references_are_not_even_parsed() -> None:
    spaced = Record(
        "new.turns.v1", 3, 7, b"key", b'{ "turn_ref": {"topic":"old.turns.v1","partition":3,"offset":4} }', (), 0
    )
    assert translator().translated(topics.TURNS, spaced) is spaced


def test_a_record_that_was_not_archived_is_counted_and_leads_nowhere() -> None:
    how = translator()
    event = document(
        topics.SCORES, {"turn_ref": ref(topics.TURNS, 3), "next_state_ref": ref(topics.NEXT_STATES, 40)}, how
    )
    assert (event["turn_ref"]["offset"], event["next_state_ref"]["offset"], how.dangling) == (NOWHERE, NOWHERE, 2)
    assert RecordReference.model_validate(event["turn_ref"])


def test_a_topic_that_was_not_restored_is_refused_unless_it_may_dangle() -> None:
    event = {"turn_ref": ref(topics.TURNS, 4)}
    with pytest.raises(ArchiveError, match=r"new\.scores\.v1\[3\]@7 refers to records of turns\.v1.*--dangling"):
        document(topics.SCORES, event, translator(without=topics.TURNS))
    how = translator(without=topics.TURNS, allow_dangling=True)
    assert document(topics.SCORES, event, how)["turn_ref"]["offset"] == NOWHERE


def test_every_topic_whose_events_hold_references_is_translated_after_those_it_refers_to() -> None:
    names = list(topic_definitions())
    order = in_order(list(reversed(names)))
    assert sorted(order) == sorted(names)
    assert [each for each in order if each in (topics.TURNS, topics.NEXT_STATES, topics.SCORES, topics.SAMPLES)] == [
        topics.TURNS,
        topics.NEXT_STATES,
        topics.SCORES,
        topics.SAMPLES,
    ]
    for topic, definition in topic_definitions().items():
        schemas = [str(EVENT_MODELS[event].model_json_schema()) for event in definition.events]
        if any("RecordReference" in schema for schema in schemas):
            assert topic in REFERRING, topic


@given(st.lists(st.integers(0, 10**6), unique=True, min_size=1).map(sorted), st.integers(0, 10**6), st.integers(0, 99))
def test_places_are_those_of_a_table(old: list[int], asked: int, first: int) -> None:
    table = {offset: first + number for number, offset in enumerate(old)}
    places = Places()
    places.add("t", 0, table)
    assert all(places.of("t", 0, offset) == place for offset, place in table.items())
    assert places.of("t", 0, asked) == table.get(asked, NOWHERE)
    before = [place for offset, place in table.items() if offset < asked]
    assert places.after("t", 0, asked) == (max(before) + 1 if before else 0)
