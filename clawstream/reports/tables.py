"""Reports as tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from clawstream.reports.drift import Dimension, DriftReport
from clawstream.reports.judge_gap import VERDICTS, GapReport, JudgeReport


def drift_tables(report: DriftReport, *, most_groups: int) -> Iterator[Table]:
    """One table per dimension, the largest differences first."""
    for dimension in report.dimensions:
        yield _dimension(dimension, most_groups)


def _dimension(dimension: Dimension, most_groups: int) -> Table:
    title = (
        f"By {dimension.name}: {dimension.distance:.1%} apart, {dimension.by_chance:.1%} by chance; "
        f"effectively {dimension.effective_served:.1f} served, {dimension.effective_trained:.1f} trained"
    )
    columns = (dimension.name, "served", "share", "trained", "share", "difference", "reward")
    table = Table(*columns, box=None, title=title, title_justify="left")
    for row in dimension.groups[:most_groups]:
        table.add_row(
            row.group,
            str(row.served),
            f"{row.served_share:.1%}",
            str(row.trained),
            f"{row.trained_share:.1%}",
            f"{row.trained_share - row.served_share:+.1%}",
            "" if row.mean_reward is None else f"{row.mean_reward:+.2f}",
        )
    if len(dimension.groups) > most_groups:
        table.add_row(f"{len(dimension.groups) - most_groups} more", "", "", "", "", "", "")
    return table


def judge_tables(report: JudgeReport) -> Iterator[Table]:
    """By judge spec, the verdicts of pairs, and versions where an evaluation was given."""
    columns = (
        *("judge spec", "judged", "reward", "with evidence", "agreement", "kappa"),
        *("reward there", "explicit", "gap", "false praise", "false blame"),
    )
    table = Table(*columns, box=None, title="Judge and explicit evidence on the same turns", title_justify="left")
    for row in [*report.by_spec, report.overall] if len(report.by_spec) > 1 else [report.overall]:
        table.add_row(*_gap_row(row))
    yield table
    if report.overall.pairs:
        verdicts = Table(
            *("judge \\ explicit", *(f"{verdict:+d}" for verdict in VERDICTS)),
            box=None,
            title="Verdicts",
            title_justify="left",
        )
        for judge in VERDICTS:
            counts = [report.overall.confusion.get(f"{judge:+d}/{truth:+d}", 0) for truth in VERDICTS]
            verdicts.add_row(f"{judge:+d}", *map(str, counts))
        yield verdicts
    if report.versions:
        versions = Table(
            *("version", "number", "judged", "judge's reward", "held-out reward", "gap", "held-out correct"),
            box=None,
            title="Judge in conversation and truth under held-out questions",
            title_justify="left",
        )
        for version in report.versions:
            number = "" if version.weight_version is None else str(version.weight_version)
            rewards = (_signed(version.judge_reward), _signed(version.held_out_reward), _signed(version.gap))
            correct = "" if version.correct is None else f"{version.correct:.0%}"
            versions.add_row(version.name, number, str(version.judged), *rewards, correct)
        yield versions


def _gap_row(row: GapReport) -> tuple[str, ...]:
    error = "" if row.gap_standard_error is None else f" +- {row.gap_standard_error:.2f}"
    return (
        row.judge_spec_hash[:16],
        str(row.judged),
        _signed(row.judge_reward),
        str(row.pairs),
        "" if row.agreement is None else f"{row.agreement:.0%}",
        _signed(row.kappa),
        _signed(row.judge_reward_of_pairs),
        _signed(row.explicit_reward),
        _signed(row.gap) + error,
        str(row.false_praise),
        str(row.false_blame),
    )


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"
