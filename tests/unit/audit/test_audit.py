"""A clean log passes; a log that is broken in one way is found out, at the right record."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from clawstream import topics
from clawstream.audit.log import LogRecord
from clawstream.audit.report import as_document, checks_table, summary
from clawstream.audit.run import AuditReport, audit
from clawstream.topics import full_name
from tests.fixtures.synthetic_log import NAMESPACE, SyntheticLog, clean_log, dead_letter, event_of

Tamper = Callable[[SyntheticLog], LogRecord]
"""Breaks a promise and returns the record that the audit must name first."""


def audited(log: SyntheticLog) -> AuditReport:
    return audit(
        log,
        checksum=log.checksum,
        max_examples=10,
        directory=None,
        pause=lambda: None,
        progress=lambda doing, done, of: None,
    )


def test_a_clean_log_keeps_every_promise() -> None:
    report = audited(clean_log())
    assert report.holds, summary(report)
    assert report.handled == {
        "judge": {"output": 15, "skip": 4, "dead letter": 1, "waiting": 0},
        "teacher": {"output": 14, "skip": 1, "waiting": 0},
    }
    assert report.training == {"trained": 12, "zero_advantage": 2}
    assert report.records_read == sum(len(records) for records in clean_log().topics.values())
    idle = {result.name for result in report.results if result.checked == 0}
    assert idle == {"readable", "turns in order"}, "the clean log must exercise every other check"


def test_an_empty_log_keeps_every_promise() -> None:
    assert audited(SyntheticLog()).holds


def test_what_is_not_committed_yet_may_be_open() -> None:
    log = clean_log()
    last = log.topics[topics.SCORES][-1]
    log.remove(topics.SCORES, -1)
    log.remove(topics.SAMPLES, -1)
    log.remove(topics.TRAIN_STEPS, -1)
    log.remove(topics.WEIGHTS, -1)
    log.remove(topics.WEIGHTS, -1)
    log.remove(topics.WEIGHTS_APPLIED, -1)
    log.offsets["judge"][last.partition] = event_of(last)["next_state_ref"]["offset"]
    log.offsets["teacher"][last.partition] = last.offset
    report = audited(log)
    assert report.holds, summary(report)
    assert report.handled["judge"]["waiting"] == 1


def lost_score(log: SyntheticLog) -> LogRecord:
    score = event_of(log.topics[topics.SCORES][3])
    place = score["next_state_ref"]
    log.remove(topics.SCORES, 3)
    return at(log, topics.NEXT_STATES, place["partition"], place["offset"])


def lost_skip(log: SyntheticLog) -> LogRecord:
    skip = event_of(log.topics[topics.SKIPS][0])
    log.remove(topics.SKIPS, 0)
    return at(log, topics.NEXT_STATES, skip["partition"], skip["offsets_by_reason"]["session_end"][0])


def lost_dead_letter(log: SyntheticLog) -> LogRecord:
    letter = log.remove(topics.JUDGE_DLQ, 0)
    return at(
        log, topics.NEXT_STATES, int(letter.header("dlq.partition") or ""), int(letter.header("dlq.offset") or "")
    )


def score_twice(log: SyntheticLog) -> LogRecord:
    return log.copy(topics.SCORES, 3)


def score_twice_under_another_spec(log: SyntheticLog) -> LogRecord:
    log.copy(topics.SCORES, 3)
    return log.change(topics.SCORES, -1, score_id="another", judge_spec_hash="another")


def score_and_dead_letter(log: SyntheticLog) -> LogRecord:
    place = event_of(log.topics[topics.SCORES][3])["next_state_ref"]
    dead_letter(log, topics.JUDGE_DLQ, at(log, topics.NEXT_STATES, place["partition"], place["offset"]))
    return log.topics[topics.SCORES][3]


def score_of_what_is_to_be_skipped(log: SyntheticLog) -> LogRecord:
    scored = event_of(log.topics[topics.SCORES][3])["next_state_id"]
    index = next(i for i, r in enumerate(log.topics[topics.NEXT_STATES]) if event_of(r)["next_state_id"] == scored)
    log.change(topics.NEXT_STATES, index, turn_trainable=False)
    return log.topics[topics.SCORES][3]


def skipped_for_another_reason(log: SyntheticLog) -> LogRecord:
    skip = event_of(log.topics[topics.SKIPS][0])
    offsets = skip["offsets_by_reason"]["session_end"]
    return log.change(topics.SKIPS, 0, offsets_by_reason={"untrainable_turn": offsets})


def score_of_nothing(log: SyntheticLog) -> LogRecord:
    place = event_of(log.topics[topics.SCORES][3])["next_state_ref"]
    log.copy(topics.SCORES, 3)
    return log.change(topics.SCORES, -1, score_id="new", next_state_ref={**place, "offset": place["offset"] + 1})


def score_of_another_next_state(log: SyntheticLog) -> LogRecord:
    return log.change(topics.SCORES, 3, next_state_id="another")


def score_id_twice(log: SyntheticLog) -> LogRecord:
    first = event_of(log.topics[topics.SCORES][0])
    later = next(
        index
        for index, record in enumerate(log.topics[topics.SCORES])
        if index and record.partition == log.topics[topics.SCORES][0].partition
    )
    log.topics[topics.SAMPLES].clear()
    log.topics[topics.TRAIN_STEPS].clear()
    return log.change(topics.SCORES, later, score_id=first["score_id"])


def scores_out_of_order(log: SyntheticLog) -> LogRecord:
    same = [i for i, r in enumerate(log.topics[topics.SCORES]) if r.partition == log.topics[topics.SCORES][0].partition]
    return swapped(log, topics.SCORES, *same[:2])


def samples_out_of_order(log: SyntheticLog) -> LogRecord:
    first = log.topics[topics.SAMPLES][0].partition
    same = [i for i, r in enumerate(log.topics[topics.SAMPLES]) if r.partition == first]
    return swapped(log, topics.SAMPLES, *same[:2])


def score_visible_ahead(log: SyntheticLog) -> LogRecord:
    last = log.topics[topics.SCORES][-1]
    log.offsets["judge"][last.partition] = event_of(last)["next_state_ref"]["offset"]
    return last


def sample_visible_ahead(log: SyntheticLog) -> LogRecord:
    last = log.topics[topics.SAMPLES][-1]
    log.offsets["teacher"][last.partition] -= 1
    return last


def lost_sample(log: SyntheticLog) -> LogRecord:
    score_id = event_of(log.remove(topics.SAMPLES, 3))["score_id"]
    log.topics[topics.TRAIN_STEPS].clear()
    return next(record for record in log.topics[topics.SCORES] if event_of(record)["score_id"] == score_id)


def lost_skip_of_the_teacher(log: SyntheticLog) -> LogRecord:
    index = next(i for i, r in enumerate(log.topics[topics.SKIPS]) if event_of(r)["stage"] == "teacher")
    skip = event_of(log.remove(topics.SKIPS, index))
    return at(log, topics.SCORES, skip["partition"], skip["offsets_by_reason"]["neutral_without_hint"][0])


def sample_twice(log: SyntheticLog) -> LogRecord:
    return log.copy(topics.SAMPLES, 3)


def sample_of_no_score(log: SyntheticLog) -> LogRecord:
    log.copy(topics.SAMPLES, 3)
    return log.change(topics.SAMPLES, -1, judge_spec_hash="another", sample_id="new")


def turn_twice(log: SyntheticLog) -> LogRecord:
    return log.copy(topics.TURNS, 3)


def child_before_its_parent(log: SyntheticLog) -> LogRecord:
    first = log.topics[topics.TURNS][0]
    later = next(r for r in log.topics[topics.TURNS][1:] if r.partition == first.partition)
    return log.change(topics.TURNS, 0, parent_turn_id=event_of(later)["turn_id"])


def next_state_of_no_turn(log: SyntheticLog) -> LogRecord:
    place = event_of(log.topics[topics.NEXT_STATES][0])["turn_ref"]
    return log.change(topics.NEXT_STATES, 0, turn_ref={**place, "offset": place["offset"] + 1})


def unreadable_turn(log: SyntheticLog) -> LogRecord:
    return log.add(topics.TURNS, 0, b"key", b"{")


def unreadable_next_state(log: SyntheticLog) -> LogRecord:
    made = log.add(topics.NEXT_STATES, 0, b"key", b"[]")
    log.offsets["judge"][0] = made.offset + 1
    return made


def letter_of_nothing(log: SyntheticLog) -> LogRecord:
    return log.add(topics.JUDGE_DLQ, 0, b"key", b"value")


def trained_twice(log: SyntheticLog) -> LogRecord:
    first, second = (event_of(record) for record in log.topics[topics.TRAIN_STEPS])
    again = {**second["samples"][0], "turn_id": first["samples"][0]["turn_id"]}
    return log.change(topics.TRAIN_STEPS, 1, samples=[again, *second["samples"][1:]])


def listed_twice(log: SyntheticLog) -> LogRecord:
    first, second = (event_of(record) for record in log.topics[topics.TRAIN_STEPS])
    return log.change(topics.TRAIN_STEPS, 1, drops=[*second["drops"], first["drops"][0]])


def not_listed(log: SyntheticLog) -> LogRecord:
    first = event_of(log.topics[topics.TRAIN_STEPS][0])
    place = first["samples"][2]["ref"]
    log.change(topics.TRAIN_STEPS, 0, samples=first["samples"][:2] + first["samples"][3:])
    return at(log, topics.SAMPLES, place["partition"], place["offset"])


def trained_from_nothing(log: SyntheticLog) -> LogRecord:
    first = event_of(log.topics[topics.TRAIN_STEPS][0])
    place = first["samples"][0]["ref"]
    phantom = {**first["samples"][0], "turn_id": "t", "sample_id": "s", "ref": {**place, "offset": place["offset"] + 1}}
    return log.change(topics.TRAIN_STEPS, 0, samples=[*first["samples"], phantom])


def step_missing(log: SyntheticLog) -> LogRecord:
    return log.change(topics.TRAIN_STEPS, 1, step=3)


def positions_fall(log: SyntheticLog) -> LogRecord:
    second = event_of(log.topics[topics.TRAIN_STEPS][1])["next_offsets"]
    first = event_of(log.topics[topics.TRAIN_STEPS][0])["next_offsets"]
    partition = next(iter(first))
    return log.change(topics.TRAIN_STEPS, 1, next_offsets={**second, partition: first[partition] - 1})


def archive_lost(log: SyntheticLog) -> LogRecord:
    del log.batches["memory://batches/step-2"]
    return log.topics[topics.TRAIN_STEPS][1]


def archive_changed(log: SyntheticLog) -> LogRecord:
    log.batches["memory://batches/step-1"] += b"!"
    return log.topics[topics.TRAIN_STEPS][0]


def version_reused(log: SyntheticLog) -> LogRecord:
    return log.copy(topics.WEIGHTS, 2)


def version_falls(log: SyntheticLog) -> LogRecord:
    log.copy(topics.WEIGHTS, 1)
    log.change(topics.WEIGHTS, -1, weight_version=1)
    return log.topics[topics.WEIGHTS][-1]


def pointer_to_nothing(log: SyntheticLog) -> LogRecord:
    log.copy(topics.WEIGHTS, 1)
    return log.change(topics.WEIGHTS, -1, weight_version=9)


def step_not_published(log: SyntheticLog) -> LogRecord:
    for index in reversed(range(len(log.topics[topics.WEIGHTS]))):
        if event_of(log.topics[topics.WEIGHTS][index])["weight_version"] == 2:
            log.remove(topics.WEIGHTS, index)
    return log.topics[topics.TRAIN_STEPS][1]


def answered_by_no_version(log: SyntheticLog) -> LogRecord:
    return log.change(topics.TURNS, 5, version_spans=[{"weight_version": 7, "start": 0, "end": 3}])


def in_service_but_unpublished(log: SyntheticLog) -> LogRecord:
    return log.change(topics.WEIGHTS_APPLIED, 1, weight_version=8)


def at(log: SyntheticLog, topic: str, partition: int, offset: int) -> LogRecord:
    return next(each for each in log.topics[topic] if (each.partition, each.offset) == (partition, offset))


def swapped(log: SyntheticLog, topic: str, first: int, second: int) -> LogRecord:
    """The contents of two records of a partition change places. The later one then breaks the order."""
    a, b = log.topics[topic][first], log.topics[topic][second]
    log.topics[topic][first] = replace(b, offset=a.offset)
    log.topics[topic][second] = replace(a, offset=b.offset)
    return log.topics[topic][second]


TAMPERED: list[tuple[Tamper, str]] = [
    (lost_score, "next states end"),
    (lost_skip, "next states end"),
    (lost_dead_letter, "next states end"),
    (unreadable_next_state, "next states end"),
    (score_twice, "next states end once"),
    (score_twice_under_another_spec, "next states end once"),
    (score_and_dead_letter, "next states end once"),
    (score_of_what_is_to_be_skipped, "judge's skips"),
    (skipped_for_another_reason, "judge's skips"),
    (score_of_nothing, "scores have next states"),
    (score_of_another_next_state, "scores have next states"),
    (score_id_twice, "score ids once"),
    (scores_out_of_order, "scores in order"),
    (score_visible_ahead, "judge not ahead"),
    (lost_sample, "scores end"),
    (lost_skip_of_the_teacher, "scores end"),
    (sample_twice, "scores end once"),
    (sample_of_no_score, "samples have scores"),
    (samples_out_of_order, "samples in order"),
    (sample_visible_ahead, "teacher not ahead"),
    (turn_twice, "turns once"),
    (child_before_its_parent, "turns in order"),
    (next_state_of_no_turn, "next states have turns"),
    (unreadable_turn, "readable"),
    (letter_of_nothing, "readable"),
    (trained_twice, "turns trained once"),
    (listed_twice, "samples listed once"),
    (not_listed, "samples are accounted for"),
    (trained_from_nothing, "steps list what exists"),
    (step_missing, "steps in order"),
    (positions_fall, "steps in order"),
    (archive_lost, "batches are kept"),
    (archive_changed, "batches are kept"),
    (version_reused, "versions rise"),
    (version_falls, "pointers"),
    (pointer_to_nothing, "pointers"),
    (step_not_published, "steps are published"),
    (answered_by_no_version, "served is published"),
    (in_service_but_unpublished, "served is published"),
]


@pytest.mark.parametrize(("tamper", "check"), TAMPERED, ids=[tamper.__name__ for tamper, _ in TAMPERED])
def test_what_was_tampered_with_is_found_and_named(tamper: Tamper, check: str) -> None:
    log = clean_log()
    record = tamper(log)
    report = audited(log)
    assert not report.holds
    broken = {result.name: result for result in report.results if not result.holds}
    assert check in broken, summary(report)
    first = broken[check].examples[0]
    found = (first.topic, first.partition, first.offset)
    assert found == (full_name(NAMESPACE, record.topic), record.partition, record.offset), str(first)
    assert f"{first.topic}[{first.partition}]@{first.offset}" in str(first)


def test_every_check_has_a_log_that_breaks_it() -> None:
    assert {check for _, check in TAMPERED} == {result.name for result in audited(clean_log()).results}


def test_replays_may_score_what_the_judge_scored() -> None:
    log = clean_log()
    log.copy(topics.SCORES, 3)
    made = log.change(topics.SCORES, -1, score_id="replayed", judge_spec_hash="other")
    log.topics[topics.SCORES][-1] = replace(made, headers=(("ce_source", b"replay/now"),))
    report = audited(log)
    assert report.holds, summary(report)
    log.copy(topics.SCORES, -1)
    assert [result.name for result in audited(log).results if not result.holds] == ["next states end once"]


def test_what_retention_took_away_is_no_violation() -> None:
    log = clean_log()
    partition = log.topics[topics.SCORES][0].partition
    scores = [record for record in log.topics[topics.SCORES] if record.partition == partition]
    inputs = {event_of(record)["next_state_ref"]["offset"]: record for record in scores}
    first = at(log, topics.NEXT_STATES, partition, min(inputs))
    log.starts[topics.SCORES, partition] = scores[1].offset
    old = replace(first, timestamp_milliseconds=scores[1].timestamp_milliseconds - 1)
    log.topics[topics.NEXT_STATES][log.topics[topics.NEXT_STATES].index(first)] = old
    report = audited(log)
    assert "next states end" not in {result.name for result in report.results if not result.holds}, summary(report)


def test_the_oldest_batches_may_have_been_removed_but_no_hole_may_be_between_them() -> None:
    log = clean_log()
    del log.batches["memory://batches/step-1"]
    report = audited(log)
    assert report.holds, summary(report)


def test_the_reports_say_what_is_wrong() -> None:
    log = clean_log()
    record = score_twice(log)
    report = audited(log)
    place = f"{NAMESPACE}.scores.v1[{record.partition}]@{record.offset}"
    assert place in summary(report)
    document = as_document(report)
    assert document["holds"] is False
    assert document["first_violation"]["offset"] == record.offset
    assert checks_table(report).row_count == len(report.results)
