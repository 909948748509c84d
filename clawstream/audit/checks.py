"""What must hold of a log, as questions to the audit's memory. Each answers with the records that break it.

An input is handled when its stage's group committed an offset behind it. Outputs, skips, dead letters and that offset
are one transaction, so either all of them are on the log or none.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from clawstream import topics
from clawstream.audit.memory import Memory
from clawstream.ids import sample_id
from clawstream.topics import full_name, topic_definitions


@dataclass(frozen=True, slots=True)
class Violation:
    """One record that breaks a promise."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    problem: str
    """What is wrong, with the other records that show it."""

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What checks look at."""

    memory: Memory
    namespace: str
    taken_at_milliseconds: int

    def at(self, topic: str, partition: int, offset: int) -> str:
        """A position, as people read it."""
        return f"{full_name(self.namespace, topic)}[{partition}]@{offset}"

    def violations(self, topic: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[Violation]:
        """Of rows (partition, offset, problem)."""
        for partition, offset, problem in rows:
            yield Violation(full_name(self.namespace, topic), partition, offset, problem)


@dataclass(frozen=True, slots=True)
class Check:
    """One promise."""

    name: str
    promise: str
    """In a sentence."""
    counted: str
    """The query that says how many records it looked at."""
    find: Callable[[Evidence], Iterator[Violation]]
    """Those that break it, in the order of the log."""


def _sql(topic: str, query: str) -> Callable[[Evidence], Iterator[Violation]]:
    """A check whose query gives (partition, offset, problem) of records of `topic`."""
    return lambda evidence: evidence.violations(topic, evidence.memory.ask(query))


def _malformed(evidence: Evidence) -> Iterator[Violation]:
    rows = evidence.memory.ask("SELECT topic, partition, offset, problem FROM malformed ORDER BY 1, 2, 3")
    for topic, partition, offset, problem in rows:
        yield Violation(full_name(evidence.namespace, topic), partition, offset, f"cannot be read: {problem}")


_MISSING_SCORES: Final = """
    SELECT partition, offset, 'next state ' || coalesce(id, '(unreadable)') || ' is below the committed offset ' ||
           before || ' and has neither a score nor a skip nor a dead letter'
    FROM next_states JOIN committed USING (partition)
    WHERE stage = 'judge' AND offset < before
      AND NOT EXISTS (SELECT 1 FROM ends WHERE ends.stage = 'judge' AND ends.partition = next_states.partition
                      AND ends.offset = next_states.offset AND live)
      AND time > coalesce((SELECT h.time FROM horizons h WHERE h.stage = 'judge'
                           AND h.partition = next_states.partition), -1)
    ORDER BY partition, offset"""

_MISSING_SAMPLES: Final = """
    SELECT partition, offset, scores.id, scores.turn, scores.time, before
    FROM scores JOIN committed USING (partition)
    WHERE stage = 'teacher' AND offset < before
      AND NOT EXISTS (SELECT 1 FROM ends WHERE ends.stage = 'teacher' AND ends.partition = scores.partition
                      AND ends.offset = scores.offset)
      AND time > coalesce((SELECT h.time FROM horizons h WHERE h.stage = 'teacher'
                           AND h.partition = scores.partition), -1)
    ORDER BY partition, offset"""


def _missing_samples(evidence: Evidence) -> Iterator[Violation]:
    """A sample may be gone because a later one of its turn replaced it, once compaction came; steps list it."""
    lag = int(topic_definitions()[topics.SAMPLES].config["min.compaction.lag.ms"])
    memory = evidence.memory
    for partition, offset, score, turn, time, before in memory.ask(_MISSING_SAMPLES):
        if turn is not None:
            listed = memory.number("SELECT count(*) FROM listed WHERE sample = :id", id=sample_id(turn, score))
            replaced = time < evidence.taken_at_milliseconds - lag and memory.number(
                "SELECT (SELECT count(*) FROM samples WHERE turn = :turn) "
                "+ (SELECT count(*) FROM tombstones WHERE turn = :turn)",
                turn=turn,
            )
            if listed or replaced:
                continue
        yield Violation(
            full_name(evidence.namespace, topics.SCORES),
            partition,
            offset,
            f"score {score or '(unreadable)'} is below the committed offset {before} and has neither a sample nor a "
            "skip nor a dead letter",
        )


def _second_ends(stage: str, input_topic: str) -> Callable[[Evidence], Iterator[Violation]]:
    """Of one input: two ends by the stage itself, or two scores of replays under one spec."""

    def find(evidence: Evidence) -> Iterator[Violation]:
        query = """
            SELECT partition, offset, kind, topic, at_partition, at_offset, before_kind, before_topic,
                   before_partition, before_offset
            FROM (SELECT *, lag(kind) OVER same AS before_kind, lag(topic) OVER same AS before_topic,
                         lag(at_partition) OVER same AS before_partition, lag(at_offset) OVER same AS before_offset
                  FROM ends WHERE stage = :stage
                  WINDOW same AS (PARTITION BY partition, offset, CASE WHEN live THEN '' ELSE spec END
                                  ORDER BY topic, at_partition, at_offset))
            WHERE before_kind IS NOT NULL ORDER BY topic, at_partition, at_offset"""
        for row in evidence.memory.ask(query, stage=stage):
            partition, offset, kind, topic, at_partition, at_offset, *before = row
            yield Violation(
                full_name(evidence.namespace, topic),
                at_partition,
                at_offset,
                f"a second end ({kind}) of {evidence.at(input_topic, partition, offset)}, whose {before[0]} is "
                f"{evidence.at(before[1], before[2], before[3])}",
            )

    return find


def _ahead(stage: str, input_topic: str) -> Callable[[Evidence], Iterator[Violation]]:
    def find(evidence: Evidence) -> Iterator[Violation]:
        query = """
            SELECT ends.partition, ends.offset, kind, topic, at_partition, at_offset, coalesce(after, 0)
            FROM ends LEFT JOIN committed ON committed.stage = ends.stage AND committed.partition = ends.partition
            WHERE ends.stage = :stage AND live AND ends.offset >= coalesce(after, 0)
            ORDER BY topic, at_partition, at_offset"""
        rows = evidence.memory.ask(query, stage=stage)
        for partition, offset, kind, topic, at_partition, at_offset, after in rows:
            yield Violation(
                full_name(evidence.namespace, topic),
                at_partition,
                at_offset,
                f"the {kind} of {evidence.at(input_topic, partition, offset)} is visible, but group {stage} has "
                f"committed only {after}: an aborted or torn transaction was shown, or offsets were set back",
            )

    return find


def _unordered(table: str, topic: str, stage: str) -> Callable[[Evidence], Iterator[Violation]]:
    query = f"""
        SELECT at_partition, at_offset, 'follows the output of offset ' || earlier || ' of its partition of inputs, ' ||
               'but is that of offset ' || offset
        FROM (SELECT *, lag(offset) OVER (PARTITION BY at_partition, partition ORDER BY at_offset) AS earlier
              FROM ends WHERE stage = '{stage}' AND topic = '{topic}' AND live)
        WHERE earlier > offset ORDER BY 1, 2"""
    return _sql(topic, query)


def _skips_without_cause(evidence: Evidence) -> Iterator[Violation]:
    query = """
        SELECT topic, at_partition, at_offset, ends.partition, ends.offset, reason, skip
        FROM ends JOIN next_states USING (partition, offset)
        WHERE stage = 'judge' AND live AND id IS NOT NULL
          AND ((kind = 'skip' AND reason IN ('session_end', 'untrainable_turn') AND reason != coalesce(skip, ''))
               OR (kind = 'output' AND skip IS NOT NULL))
        ORDER BY 1, 2, 3"""
    for topic, at_partition, at_offset, partition, offset, reason, skip in evidence.memory.ask(query):
        found = f"skips it as {reason}" if reason else "scores it"
        yield Violation(
            full_name(evidence.namespace, topic),
            at_partition,
            at_offset,
            f"{found}, but {evidence.at(topics.NEXT_STATES, partition, offset)} is "
            + (f"to be skipped as {skip}" if skip else "to be judged"),
        )


CHECKS: Final = (
    Check("readable", "every record can be read", "SELECT count(*) FROM malformed", _malformed),
    Check(
        "turns once",
        "a turn is on the log once",
        "SELECT count(*) FROM turns",
        _sql(
            topics.TURNS,
            """SELECT partition, offset, 'turn ' || id || ' is on the log before, at offset ' || earlier
               FROM (SELECT *, lag(offset) OVER (PARTITION BY id ORDER BY partition, offset) AS earlier FROM turns)
               WHERE earlier IS NOT NULL ORDER BY 1, 2""",
        ),
    ),
    Check(
        "turns in order",
        "a turn follows its parent",
        "SELECT count(*) FROM turns WHERE parent IS NOT NULL",
        _sql(
            topics.TURNS,
            """SELECT child.partition, child.offset, 'turn ' || child.id || ' stands before its parent ' ||
                      child.parent || ' at offset ' || parent.offset
               FROM turns child JOIN turns parent ON parent.id = child.parent
               WHERE parent.partition = child.partition AND parent.offset >= child.offset ORDER BY 1, 2""",
        ),
    ),
    Check(
        "next states have turns",
        "a next state refers to its turn",
        "SELECT count(*) FROM next_states",
        _sql(
            topics.NEXT_STATES,
            """SELECT n.partition, n.offset, 'its turn ' || n.turn || ' is not at [' || turn_partition || ']@' ||
                      turn_offset || CASE WHEN t.id IS NULL THEN '' ELSE ', but turn ' || t.id END
               FROM next_states n
               JOIN bounds b ON b.topic = 'turns.v1' AND b.partition = turn_partition
               LEFT JOIN turns t ON t.partition = turn_partition AND t.offset = turn_offset
               WHERE turn_offset >= start AND turn_offset < end AND (t.id IS NULL OR t.id != n.turn)
               ORDER BY 1, 2""",
        ),
    ),
    Check(
        "next states end",
        "a next state that was handled has a score, a skip or a dead letter",
        "SELECT count(*) FROM next_states JOIN committed USING (partition) WHERE stage = 'judge' AND offset < before",
        _sql(topics.NEXT_STATES, _MISSING_SCORES),
    ),
    Check(
        "next states end once",
        "none of them ends twice under one spec",
        "SELECT count(*) FROM ends WHERE stage = 'judge'",
        _second_ends("judge", topics.NEXT_STATES),
    ),
    Check(
        "scores have next states",
        "a score names a next state that is there, and nobody else's",
        "SELECT count(*) FROM scores",
        _sql(
            topics.SCORES,
            """SELECT s.partition, s.offset, 'no next state ' || s.next_state || ' is at [' || s.input_partition ||
                      ']@' || s.input_offset || CASE WHEN n.id IS NULL THEN '' ELSE ', but ' || n.id END
               FROM scores s
               JOIN bounds b ON b.topic = 'next-states.v1' AND b.partition = s.input_partition
               LEFT JOIN next_states n ON n.partition = s.input_partition AND n.offset = s.input_offset
               WHERE s.input_offset >= start AND s.input_offset < end AND (n.id IS NULL OR n.id != s.next_state)
               ORDER BY 1, 2""",
        ),
    ),
    Check(
        "score ids once",
        "a score's id belongs to one next state and one spec",
        "SELECT count(*) FROM scores",
        _sql(
            topics.SCORES,
            """SELECT partition, offset, 'score ' || id || ' is also that of another next state'
               FROM (SELECT *, lag(next_state || spec) OVER (PARTITION BY id ORDER BY partition, offset) AS earlier
                     FROM scores WHERE id IS NOT NULL)
               WHERE earlier IS NOT NULL AND earlier != next_state || spec ORDER BY 1, 2""",
        ),
    ),
    Check(
        "scores in order",
        "scores stand in the order of their next states",
        "SELECT count(*) FROM scores WHERE live",
        _unordered("scores", topics.SCORES, "judge"),
    ),
    Check(
        "judge's skips",
        "the judge skips what it should, and only that",
        "SELECT count(*) FROM next_states WHERE skip IS NOT NULL",
        _skips_without_cause,
    ),
    Check(
        "judge not ahead",
        "nothing of the judge is visible that its offsets do not cover",
        "SELECT count(*) FROM ends WHERE stage = 'judge' AND live",
        _ahead("judge", topics.NEXT_STATES),
    ),
    Check(
        "scores end",
        "a score that was handled has a sample, a skip or a dead letter",
        "SELECT count(*) FROM scores JOIN committed USING (partition) WHERE stage = 'teacher' AND offset < before",
        _missing_samples,
    ),
    Check(
        "scores end once",
        "none of them ends twice",
        "SELECT count(*) FROM ends WHERE stage = 'teacher'",
        _second_ends("teacher", topics.SCORES),
    ),
    Check(
        "samples have scores",
        "a sample is made of a score that is there",
        "SELECT count(*) FROM samples",
        _sql(
            topics.SAMPLES,
            """SELECT p.partition, p.offset, 'no score of [' || p.input_partition || ']@' || p.input_offset ||
                      ' under its judge spec is on the log'
               FROM samples p JOIN bounds b ON b.topic = 'scores.v1' AND b.partition = p.input_partition
               WHERE b.start = 0 AND p.id IS NOT NULL
                 AND NOT EXISTS (SELECT 1 FROM scores s WHERE s.input_partition = p.input_partition
                                 AND s.input_offset = p.input_offset AND s.spec = p.spec)
               ORDER BY 1, 2""",
        ),
    ),
    Check(
        "samples in order",
        "samples stand in the order of their scores",
        "SELECT count(*) FROM samples",
        _unordered("samples", topics.SAMPLES, "teacher"),
    ),
    Check(
        "teacher not ahead",
        "nothing of the teacher is visible that its offsets do not cover",
        "SELECT count(*) FROM ends WHERE stage = 'teacher'",
        _ahead("teacher", topics.SCORES),
    ),
)
"""Of gateway, judge and teacher, in the order of the pipeline."""
