"""The audit's report for people and for programs."""

from typing import Any

from rich.table import Table

from clawstream.audit.checks import Violation
from clawstream.audit.run import AuditReport


def checks_table(report: AuditReport) -> Table:
    """One row for each promise."""
    table = Table("promise", "checked", "violations", "first violation", box=None)
    for result in report.results:
        first = str(result.examples[0]) if result.examples else ""
        style = None if result.holds else "red"
        table.add_row(result.promise, str(result.checked), str(result.violations), first, style=style)
    return table


def counts_table(report: AuditReport) -> Table:
    """How inputs ended."""
    table = Table("stage", "outputs", "skips", "dead letters", "waiting", box=None)
    for stage, counts in report.handled.items():
        table.add_row(stage, *(str(counts.get(kind, 0)) for kind in ("output", "skip", "dead letter", "waiting")))
    return table


def summary(report: AuditReport) -> str:
    """In a line or two."""
    training = ", ".join(f"{count} {reason}" for reason, count in report.training.items()) or "nothing trained"
    counts = f"{report.records_read} records read; samples: {training}"
    if report.first is None:
        return f"{counts}\nevery promise is kept"
    return f"{counts}\n{report.violations} violations; the first: {report.first}"


def as_document(report: AuditReport) -> dict[str, Any]:
    """For `--json`."""
    return {
        "namespace": report.namespace,
        "holds": report.holds,
        "violations": report.violations,
        "first_violation": None if report.first is None else _violation(report.first),
        "records": dict(report.records),
        "handled": {stage: dict(counts) for stage, counts in report.handled.items()},
        "training": dict(report.training),
        "checks": [
            {
                "name": result.name,
                "promise": result.promise,
                "checked": result.checked,
                "violations": result.violations,
                "examples": [_violation(each) for each in result.examples],
            }
            for result in report.results
        ],
    }


def _violation(violation: Violation) -> dict[str, Any]:
    return {
        "topic": violation.topic,
        "partition": violation.partition,
        "offset": violation.offset,
        "problem": violation.problem,
    }
