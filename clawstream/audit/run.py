"""The audit itself: read the log once, then ask."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clawstream import topics
from clawstream.audit.archives import Checksum, archive_check
from clawstream.audit.checks import CHECKS, Check, Evidence, Violation
from clawstream.audit.intake import Intake
from clawstream.audit.log import AuditedLog, Committed, LogRecord, Snapshot
from clawstream.audit.memory import Memory
from clawstream.audit.training_checks import TRAINING_CHECKS
from clawstream.stages import JUDGE, TEACHER, Stage
from clawstream.topics import topic_definitions

_SETTLED_ROUNDS: Final = 100
"""A group's offsets may become visible a moment after the records of the same transaction: ask so often."""

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much is done and how much there is."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    name: str
    promise: str
    checked: int
    """Records that it looked at."""
    violations: int
    examples: Sequence[Violation]
    """The first ones, in the order of the log."""

    @property
    def holds(self) -> bool:
        """Whether the promise is kept."""
        return self.violations == 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audit found."""

    namespace: str
    records: Mapping[str, int]
    """Topic without namespace to the number of records read."""
    handled: Mapping[str, Mapping[str, int]]
    """Stage to how its inputs ended (`output`, `skip`, `dead letter`), and how many wait."""
    training: Mapping[str, int]
    """Samples trained, and dropped by reason, over all lineages."""
    results: Sequence[CheckResult]
    first: Violation | None = field(default=None)
    """The first violation, in the order of the pipeline."""

    @property
    def holds(self) -> bool:
        """Whether every promise is kept."""
        return self.first is None

    @property
    def records_read(self) -> int:
        """Over all topics."""
        return sum(self.records.values())

    @property
    def violations(self) -> int:
        """Over all checks."""
        return sum(result.violations for result in self.results)


def audit(
    log: AuditedLog,
    *,
    checksum: Checksum | None,
    max_examples: int,
    directory: Path | None,
    pause: Callable[[], None],
    progress: Progress,
) -> AuditReport:
    """Reads all of `log` that is retained now and checks it.

    Without `checksum` the archives of batches are not looked at. `directory` holds the scratch file (about 300 bytes
    a record); None is the system's own. `pause` is called before the group's offsets are asked for once more.
    Raises BusError and OpenTransaction.
    """
    with tempfile.TemporaryDirectory(prefix="clawstream-audit-", dir=directory) as scratch:
        memory = Memory(Path(scratch) / "memory.sqlite")
        try:
            return _audit(log, memory, checksum, max_examples, pause, progress)
        finally:
            memory.close()


def _audit(
    log: AuditedLog,
    memory: Memory,
    checksum: Checksum | None,
    max_examples: int,
    pause: Callable[[], None],
    progress: Progress,
) -> AuditReport:
    snapshot = log.snapshot()
    total = sum(end - snapshot.starts[each] for each, end in snapshot.ends.items())
    intake = Intake(memory, log.namespace)
    records: Counter[str] = Counter()
    horizon = _Horizon(snapshot)
    for seen, record in enumerate(log.records(snapshot), start=1):
        intake.take(record)
        horizon.see(record)
        records[record.topic] += 1
        if seen % 1000 == 0:
            progress("reading", seen, total)
    progress("sorting", 0, 1)
    for (topic, partition), end in snapshot.ends.items():
        memory.add("bounds", topic, partition, snapshot.starts[topic, partition], end)
    for stage, outputs in ((JUDGE, topics.SCORES), (TEACHER, topics.SAMPLES)):
        for partition in range(topic_definitions()[stage.input_topic].partitions):
            time = horizon.of(stage, outputs, partition)
            if time is not None:
                memory.add("horizons", stage.name, partition, time)
    memory.seal()
    _add_committed(memory, snapshot.committed, _settled(log, memory, snapshot, pause))
    checks = [*CHECKS, *TRAINING_CHECKS, *([archive_check(checksum)] if checksum is not None else [])]
    evidence = Evidence(memory, log.namespace, snapshot.taken_at_milliseconds)
    results: list[CheckResult] = []
    for number, check in enumerate(checks):
        progress(check.name, number, len(checks))
        results.append(_result(check, evidence, max_examples))
    progress("done", len(checks), len(checks))
    return AuditReport(
        log.namespace,
        dict(sorted(records.items())),
        {stage.name: _handled(memory, stage, table) for stage, table in ((JUDGE, "next_states"), (TEACHER, "scores"))},
        {
            (reason or "trained"): count
            for reason, count in memory.ask("SELECT reason, count(*) FROM listed GROUP BY reason ORDER BY reason")
        },
        results,
        next((result.examples[0] for result in results if result.examples), None),
    )


def _result(check: Check, evidence: Evidence, max_examples: int) -> CheckResult:
    examples: list[Violation] = []
    count = 0
    for violation in check.find(evidence):
        count += 1
        if len(examples) < max_examples:
            examples.append(violation)
    return CheckResult(check.name, check.promise, evidence.memory.number(check.counted), count, examples)


class _Horizon:
    """Before which moment an input's end may have gone from the log by retention, while the input is still there.

    An end is written after its input. So what is older than the oldest end that is still there may have had one.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._first: dict[tuple[str, int], int] = {}

    def see(self, record: LogRecord) -> None:
        """The records of a partition come in order."""
        self._first.setdefault((record.topic, record.partition), record.timestamp_milliseconds)

    def of(self, stage: Stage, outputs: str, partition: int) -> int | None:
        """In milliseconds since 1970; None when nothing has gone."""
        letters = [each for each in self._snapshot.starts if each[0] == stage.dead_letter_topic]
        sources = [(outputs, partition), (topics.SKIPS, partition), *letters]
        times = [self._oldest(each) for each in sources if self._snapshot.starts.get(each, 0) > 0]
        return max(times, default=None)

    def _oldest(self, partition: tuple[str, int]) -> int:
        retention = int(topic_definitions()[partition[0]].config["retention.ms"])
        return self._first.get(partition, self._snapshot.taken_at_milliseconds - retention)


def _settled(log: AuditedLog, memory: Memory, snapshot: Snapshot, pause: Callable[[], None]) -> Committed:
    """The groups' offsets after everything was read, once they cover what is visible, or never will."""
    query = """SELECT stage, partition, max(offset) FROM ends
               WHERE live AND stage IN ('judge', 'teacher') GROUP BY stage, partition"""
    visible = list(memory.ask(query))
    committed: Committed = {}
    for attempt in range(_SETTLED_ROUNDS):
        if attempt:
            pause()
        committed = log.committed()
        if all(committed.get(stage, {}).get(partition, 0) > offset for stage, partition, offset in visible):
            break
    return committed


def _add_committed(memory: Memory, before: Committed, after: Committed) -> None:
    for stage, offsets in after.items():
        for partition, offset in offsets.items():
            memory.put("committed", stage, partition, before.get(stage, {}).get(partition, 0), offset)


def _handled(memory: Memory, stage: Stage, table: str) -> dict[str, int]:
    counts = {
        str(kind): int(count)
        for kind, count in memory.ask(
            "SELECT kind, count(*) FROM ends WHERE stage = :stage AND live GROUP BY kind", stage=stage.name
        )
    }
    waiting = memory.number(
        f"""SELECT count(*) FROM {table} inputs
            LEFT JOIN committed ON stage = :stage AND committed.partition = inputs.partition
            WHERE offset >= coalesce(after, 0)""",
        stage=stage.name,
    )
    return {**counts, "waiting": waiting}
