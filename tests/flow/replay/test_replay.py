"""History judged again on a real Kafka: the same twice, each once after kill -9, and promoted into new revisions."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.interface import Record
from clawstream.clock import SystemClock
from clawstream.codec import decode_as
from clawstream.ids import score_id
from schemas.events import NextStateEvent, ReplayScoreEvent, ScoreEvent
from schemas.judge_spec import JudgeSpec
from services.judge.handler import score_record
from services.judge.specs import completed
from tests.fixtures.buses import read_all
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event
from tests.fixtures.service_process import ServiceProcess
from tests.flow.replay.conftest import CommandLine, kill_with_children

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_SECONDS = 240.0
OTHER_RULES = 'rules=[["thanks", -1], ["no", -1], ["maybe", 1]]'
OLD = completed(JudgeSpec(backend="rules", rules=[("thanks", 1), ("no", -1)]))
WORDS = ["thanks", "no, too long", "maybe", "thanks a lot"]


def wait_for(condition: Callable[[], Any], what: str, *processes: ServiceProcess) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        for each in processes:
            assert each.process.poll() is None, f"a process ended:\n{each.text()}"
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


def shadow(log: JudgedLog) -> list[ReplayScoreEvent]:
    return log.events(topics.SCORES_REPLAY, ReplayScoreEvent)


def judged(log: JudgedLog, count: int) -> None:
    """A conversation, and what the old spec's judge wrote about it."""
    next_states = log.converse({number: WORDS[number % 4] for number in range(count)})
    references: dict[str, Record] = {}
    for record in read_all(log.bus, log.topic(topics.NEXT_STATES)):
        references[decode_as(record, NextStateEvent).next_state_id] = record
    verdicts = {"thanks": 1, "no, too long": -1, "maybe": None, "thanks a lot": 1}
    records = []
    for number, each in enumerate(next_states):
        record = references[each.next_state_id]
        verdict = verdicts[WORDS[number % 4]]
        vote = {"vote": 0, "verdict": verdict, "abstention": None if verdict is not None else "no_rule"}
        score = ScoreEvent.model_validate(
            {
                "score_id": score_id(each.next_state_id, OLD.spec_hash),
                "next_state_id": each.next_state_id,
                "next_state_ref": {"topic": record.topic, "partition": record.partition, "offset": record.offset},
                "turn_id": each.turn_id,
                "turn_ref": each.turn_ref,
                "session_id": each.session_id,
                "principal": each.principal,
                "judge_spec_hash": OLD.spec_hash,
                "status": "failed" if verdict is None else "scored",
                "verdict": verdict,
                "reward": verdict,
                "votes": [vote],
                "judged_at": SystemClock().now(),
            }
        )
        records.append(score_record(score, topic=log.topic(topics.SCORES), source="judge/tests", traceparent=None))
    log.write(records)


def test_twice_the_same_and_the_report_counts_what_changed(
    log: JudgedLog, clawstream: CommandLine, tmp_path: Path
) -> None:
    judged(log, 40)
    first = clawstream.json("replay", "run", "--set", OTHER_RULES, "--name", "first")
    second = clawstream.json("replay", "run", "--set", OTHER_RULES, "--name", "second")
    by_replay: dict[str, dict[str, int | None]] = {}
    for score in shadow(log):
        by_replay.setdefault(score.replay_id, {})[score.next_state_id] = score.verdict
    assert len(by_replay) == 2
    assert by_replay[first["replay_id"]] == by_replay[second["replay_id"]]
    assert len(by_replay[first["replay_id"]]) == 40
    assert len(shadow(log)) == 80

    assert (first["inputs_old"], first["inputs_new"], first["inputs_both"], first["coverage"]) == (40, 40, 40, 1.0)
    agreement = first["agreement"]
    # 20 of thanks: +1 to -1; 10 of no: equal; 10 of maybe: failed to +1.
    assert (agreement["flips_to_negative"], agreement["flips_to_positive"], agreement["compared"]) == (20, 0, 30)
    assert agreement["agreement"] == pytest.approx(10 / 30)
    assert agreement["kappa"] == pytest.approx(0.0)
    assert (agreement["failed_old"], agreement["failed_new"]) == (10, 0)
    assert first["worst"][0]["following"].startswith("thanks")
    page = (tmp_path / "data/replays/first/report.html").read_text()
    assert first["worst"][0]["next_state_id"] in page
    assert "complete" in clawstream("replay", "list")
    assert [score.promotion_epoch for score in log.scores()] == [0] * 40, "nothing that counts has changed"


def test_killed_midway_and_continued_judges_each_once(log: JudgedLog, clawstream: CommandLine) -> None:
    count = 1500
    log.converse({number: WORDS[number % 4] for number in range(count)})
    process = clawstream.start("replay", "run", "--set", OTHER_RULES, "--name", "killed", "--json")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not shadow(log):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    kill_with_children(process)
    process.communicate(timeout=PATIENCE_SECONDS)
    before = len(shadow(log))
    assert 0 < before <= count
    refused = clawstream("replay", "run", "--set", "votes=1", "--set", "rules=[]", "--name", "killed", code=1)
    assert "another --name" in refused
    continued = clawstream.json("replay", "run", "--set", OTHER_RULES, "--name", "killed")
    scores = shadow(log)
    assert Counter(Counter(score.next_state_id for score in scores).values()) == {1: count}
    assert {score.replay_id for score in scores} == {continued["replay_id"]}


def test_bounds_by_offset_and_a_new_name_for_another_spec(log: JudgedLog, clawstream: CommandLine) -> None:
    log.converse(dict.fromkeys(range(0, 50, 5), "thanks"))
    partition = topics.partition_for("session-0", 12)
    said = clawstream.json("replay", "run", "--set", OTHER_RULES, "--offsets", f"{partition}:2-6")
    offsets = [score.next_state_ref.offset for score in shadow(log)]
    assert said["inputs_new"] == len(offsets) == 4
    assert (min(offsets), max(offsets)) == (2, 5)


def test_promotion_makes_new_revisions_and_lists_what_was_trained(
    log: JudgedLog, clawstream: CommandLine, toml: str, start_service: Callable[..., ServiceProcess]
) -> None:
    judged(log, 20)
    teacher = start_service("teacher", toml)
    wait_for(lambda: len(log.samples()) == 15, "samples of the old spec", teacher)
    incomplete = clawstream("judge", "promote", "--replay", "better", code=1)
    assert "no replay 'better'" in incomplete
    clawstream("replay", "run", "--set", OTHER_RULES, "--name", "better")
    said = clawstream.json("judge", "promote", "--replay", "better")
    assert (said["promotion_epoch"], said["changed"], said["promoted_scores"], said["turns"]) == (1, True, 20, 20)
    assert said["already_trained"] == []
    wait_for(lambda: len(log.samples()) == 35, "samples of the promoted scores", teacher)
    revised = {sample.turn_id: sample for sample in log.samples() if sample.revision.promotion_epoch == 1}
    assert len(revised) == 20
    first = {sample.turn_id: sample for sample in log.samples() if sample.revision.promotion_epoch == 0}
    for turn_id, sample in revised.items():
        assert turn_id not in first or sample.revision.order > first[turn_id].revision.order
        assert sample.reward == (1.0 if int(turn_id.removeprefix("turn-")) % 4 == 2 else -1.0)

    again = clawstream.json("judge", "promote", "--replay", "better")
    assert (again["promotion_epoch"], again["changed"]) == (1, False)
    assert len(log.scores()) == 40, "promoted once"

    rows = clawstream.json("judge", "list")
    assert [(row["promotion_epoch"], row["counts"]) for row in rows] == [(0, False), (1, True)]
    back = clawstream.json("judge", "rollback")
    assert (back["promotion_epoch"], back["rolled_back_to"], back["spec_hash"]) == (2, 0, OLD.spec_hash)
    unknown = clawstream(
        "judge", "promote", *(f"--set={each}" for each in ('backend="openai"', 'model="m"', 'prompt="nope"')), code=2
    )
    assert "prompt 'nope' does not exist" in unknown
    assert len(clawstream.json("judge", "list")) == 3

    judge = start_service("judge", toml)
    turn = turn_event(999)
    (reference,) = log.write_turns([turn])
    log.write_next_states([next_state_of(turn, reference, "thanks")])
    wait_for(lambda: any(score.turn_id == "turn-999" for score in log.scores()), "a live score", judge)
    (live,) = [score for score in log.scores() if score.turn_id == "turn-999"]
    assert (live.promotion_epoch, live.verdict, live.judge_spec_hash) == (2, 1, OLD.spec_hash)
