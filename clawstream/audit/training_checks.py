"""What must hold of training and of weights: trained = seen - dropped, once per lineage, from versions that exist."""

from collections.abc import Iterator
from typing import Final

from clawstream import topics
from clawstream.audit.checks import Check, Evidence, Violation
from clawstream.topics import full_name

_DAY_MILLISECONDS: Final = 24 * 3600 * 1000
"""Tombstones of removed versions stay at least so long; afterwards nothing tells that a version was published."""


def _steps(query: str, **values: int) -> "_StepCheck":
    return _StepCheck(topics.TRAIN_STEPS, query, values)


class _StepCheck:
    """A check whose query gives (offset, problem) of records of a topic with one partition."""

    def __init__(self, topic: str, query: str, values: dict[str, int]) -> None:
        self._topic = topic
        self._query = query
        self._values = values

    def __call__(self, evidence: Evidence) -> Iterator[Violation]:
        values = {**self._values, "now": evidence.taken_at_milliseconds}
        topic = full_name(evidence.namespace, self._topic)
        for offset, problem in evidence.memory.ask(self._query, **values):
            yield Violation(topic, 0, offset, problem)


def _not_listed(evidence: Evidence) -> Iterator[Violation]:
    query = """
        SELECT s.partition, s.offset, 'sample ' || coalesce(s.id, '(unreadable)') || ' was read, since step ' ||
               o.step || ' of policy ' || o.policy || ' goes on at ' || o.offset ||
               ', but no step lists it as trained or dropped'
        FROM (SELECT policy, partition, max(offset) AS offset, step FROM step_offsets GROUP BY policy, partition) o
        JOIN samples s ON s.partition = o.partition AND s.offset < o.offset
        WHERE NOT EXISTS (SELECT 1 FROM listed l WHERE l.partition = s.partition AND l.offset = s.offset
                          AND l.policy = o.policy)
          AND NOT EXISTS (SELECT 1 FROM ends e WHERE e.stage = 'trainer' AND e.partition = s.partition
                          AND e.offset = s.offset)
          AND (SELECT start FROM bounds WHERE topic = 'train-steps.v1') = 0
        ORDER BY 1, 2"""
    return evidence.violations(topics.SAMPLES, evidence.memory.ask(query))


def _unpublished(evidence: Evidence) -> Iterator[Violation]:
    query = """
        SELECT topic, partition, offset, 'version ' || version || ' of policy ' || policy ||
               ' was served, but never published'
        FROM served WHERE version > 0
          AND NOT EXISTS (SELECT 1 FROM versions v WHERE v.policy = served.policy AND v.version = served.version)
          AND NOT EXISTS (SELECT 1 FROM steps s WHERE s.policy = served.policy AND s.version = served.version)
        ORDER BY 1, 2, 3"""
    for topic, partition, offset, problem in evidence.memory.ask(query):
        yield Violation(full_name(evidence.namespace, topic), partition, offset, problem)


TRAINING_CHECKS: Final = (
    Check(
        "samples are accounted for",
        "a sample that was read is trained, dropped with a reason, or a dead letter",
        "SELECT count(*) FROM samples",
        _not_listed,
    ),
    Check(
        "steps list what exists",
        "a step lists samples that are on the log",
        "SELECT count(*) FROM listed",
        _steps(
            """SELECT l.at, l.kind || ' sample ' || l.sample || ' is not at [' || l.partition || ']@' || l.offset ||
                      CASE WHEN s.id IS NULL THEN '' ELSE ', but ' || s.id END
               FROM listed l
               JOIN bounds b ON b.topic = 'samples.v1' AND b.partition = l.partition
               JOIN steps t ON t.at = l.at
               LEFT JOIN samples s ON s.partition = l.partition AND s.offset = l.offset
               WHERE l.sample != '' AND l.offset >= b.start AND coalesce(s.id, '') != l.sample
                 AND (s.id IS NOT NULL OR (l.kind = 'trained' AND t.time > :now - :lag))
               ORDER BY 1""",
            lag=2 * _DAY_MILLISECONDS,
        ),
    ),
    Check(
        "turns trained once",
        "a turn is trained at most once in a lineage",
        "SELECT count(*) FROM listed WHERE kind = 'trained'",
        _steps(
            """SELECT at, 'turn ' || turn || ' of sample ' || sample || ' was trained before in lineage ' || lineage ||
                      ', by the step at offset ' || earlier
               FROM (SELECT *, lag(at) OVER (PARTITION BY lineage, turn ORDER BY at) AS earlier
                     FROM listed WHERE kind = 'trained')
               WHERE earlier IS NOT NULL ORDER BY 1"""
        ),
    ),
    Check(
        "samples listed once",
        "a sample is trained or dropped once in a lineage",
        "SELECT count(*) FROM listed",
        _steps(
            """SELECT at, 'sample ' || sample || ' is ' || kind || ', but was ' || earlier_kind ||
                      ' before in lineage ' || lineage || ', by the step at offset ' || earlier
               FROM (SELECT *, lag(at) OVER same AS earlier, lag(kind) OVER same AS earlier_kind FROM listed
                     WINDOW same AS (PARTITION BY lineage, partition, offset ORDER BY at))
               WHERE earlier IS NOT NULL ORDER BY 1"""
        ),
    ),
    Check(
        "steps in order",
        "the steps of a lineage follow one another, and their positions never fall",
        "SELECT count(*) FROM steps",
        _steps(
            """SELECT at, 'step ' || step || ' of lineage ' || lineage || ' follows step ' || earlier
               FROM (SELECT *, lag(step) OVER (PARTITION BY lineage ORDER BY at) AS earlier FROM steps)
               WHERE earlier IS NOT NULL AND step != earlier + 1
               UNION ALL
               SELECT at, 'goes on in partition ' || partition || ' of samples at ' || offset ||
                      ', but the step before at ' || earlier
               FROM (SELECT *, lag(offset) OVER (PARTITION BY lineage, partition ORDER BY at) AS earlier
                     FROM step_offsets)
               WHERE earlier > offset
               ORDER BY 1"""
        ),
    ),
    Check(
        "versions rise",
        "a version's number is never used again, and rises",
        "SELECT count(*) FROM versions WHERE NOT removed",
        _StepCheck(
            topics.WEIGHTS,
            """SELECT at, 'version ' || version || ' of policy ' || policy || ' comes after version ' || highest
               FROM (SELECT *, max(version) OVER (PARTITION BY policy ORDER BY at
                                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS highest
                     FROM versions WHERE NOT removed)
               WHERE highest >= version
               UNION ALL
               SELECT at, 'version ' || version || ' of policy ' || policy || ' was made from version ' || base
               FROM versions WHERE base >= version
               ORDER BY 1""",
            {},
        ),
    ),
    Check(
        "pointers",
        "what should be in service was published, and falls only by a rollback",
        "SELECT count(*) FROM pointers",
        _StepCheck(
            topics.WEIGHTS,
            """SELECT at, 'points at version ' || version || ' of policy ' || policy || ', which was never published'
               FROM pointers p WHERE version > 0
                 AND NOT EXISTS (SELECT 1 FROM versions v WHERE v.policy = p.policy AND v.version = p.version)
                 AND NOT EXISTS (SELECT 1 FROM steps s WHERE s.policy = p.policy AND s.version = p.version)
               UNION ALL
               SELECT at, 'points at version ' || version || ' after ' || earlier || ', and is no rollback'
               FROM (SELECT *, lag(version) OVER (PARTITION BY policy ORDER BY at) AS earlier FROM pointers)
               WHERE earlier > version AND NOT rollback
               ORDER BY 1""",
            {},
        ),
    ),
    Check(
        "steps are published",
        "the version that a step made is on the log",
        "SELECT count(*) FROM steps WHERE version IS NOT NULL",
        _steps(
            """SELECT at, 'version ' || version || ' of policy ' || policy || ' was never published'
               FROM steps s WHERE version IS NOT NULL AND time > :now - :tombstones
                 AND NOT EXISTS (SELECT 1 FROM versions v WHERE v.policy = s.policy AND v.version = s.version)
               UNION ALL
               SELECT at, 'made version ' || version || ' from version ' || base FROM steps WHERE base >= version
               ORDER BY 1""",
            tombstones=_DAY_MILLISECONDS,
        ),
    ),
    Check(
        "served is published",
        "every version that answered or was ready had been published",
        "SELECT count(*) FROM served",
        _unpublished,
    ),
)
"""Of the trainer, the weights and the engines."""
