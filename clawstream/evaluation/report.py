"""A comparison as a table for the terminal, as JSON, and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import orjson
from rich.console import Console
from rich.table import Table

from clawstream.errors import MissingDependencyError
from clawstream.evaluation.asking import MeasuredAnswer
from clawstream.evaluation.comparison import METRICS, Comparison, VersionReport
from clawstream.evaluation.statistics import Estimate

_PLOTTED: Final = ("satisfied", "correct", "length_tokens", "distinct_2")


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Means with intervals, and differences to the control."""
    table = Table(
        title=f"{comparison.questions} questions, {comparison.answers_per_question} answers each; "
        f"{comparison.confidence:.0%} {comparison.method} ({comparison.resamples} resamples)"
    )
    table.add_column("")
    for version in comparison.versions:
        is_control = version.name == comparison.control and version.name != "control"
        table.add_column(f"{version.name} (control)" if is_control else version.name)
    for metric in METRICS:
        cells = [_cell(version.estimates[metric.name], metric.template) for version in comparison.versions]
        table.add_row(metric.label, *cells)
    table.add_section()
    for metric in METRICS:
        cells = [
            "" if not version.differences else _cell(version.differences[metric.name], metric.difference_template)
            for version in comparison.versions
        ]
        table.add_row(f"difference: {metric.label}", *cells)
    console.print(table)


def write_json(
    file: Path,
    comparison: Comparison,
    answers: Mapping[str, Sequence[MeasuredAnswer]],
    settings: Mapping[str, Any],
) -> None:
    """Everything: the comparison, what it was made with, and every answer."""
    document = {
        "settings": dict(settings),
        "comparison": asdict(comparison),
        "answers": {name: [asdict(answer) for answer in of_version] for name, of_version in answers.items()},
    }
    file.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def write_plot(file: Path, comparison: Comparison) -> None:
    """Four panels of means with intervals, a bar per version. Raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # not at the top: only this function needs it, and not everyone has it
    except ImportError as error:
        raise MissingDependencyError("the picture needs matplotlib: pip install 'clawstream[demo]'") from error
    figure = cast(Any, Figure(figsize=(11, 7), layout="constrained"))
    figure.suptitle(f"clawstream eval: {comparison.confidence:.0%} {comparison.method}")
    labels = {metric.name: metric.label for metric in METRICS}
    for axis, name in zip(figure.subplots(2, 2).flat, _PLOTTED, strict=True):
        shown = [(version.name, version.estimates[name]) for version in comparison.versions]
        known = [(version, estimate) for version, estimate in shown if estimate is not None]
        means = [estimate.mean for _, estimate in known]
        below = [estimate.mean - estimate.low for _, estimate in known]
        above = [estimate.high - estimate.mean for _, estimate in known]
        colours = ["tab:grey" if version == comparison.control else "tab:blue" for version, _ in known]
        axis.bar(range(len(known)), means, yerr=[below, above], capsize=4, color=colours)
        axis.set_xticks(range(len(known)), [version for version, _ in known], rotation=20)
        axis.set_title(labels[name])
    figure.savefig(file, dpi=120)


def verdict(version: VersionReport) -> str:
    """In one sentence whether a version differs from the control where it matters."""
    words: list[str] = []
    for metric in METRICS[:2]:
        estimate = version.differences.get(metric.name)
        if estimate is None:
            continue
        direction = "higher" if estimate.low > 0 else "lower" if estimate.high < 0 else "not distinguishable"
        words.append(f"{metric.label} {direction} ({_cell(estimate, metric.difference_template)})")
    return f"{version.name} against the control: {'; '.join(words)}."


def _cell(estimate: Estimate | None, template: str) -> str:
    if estimate is None:
        return "-"
    low, high = template.format(estimate.low), template.format(estimate.high)
    return f"{template.format(estimate.mean)} [{low}, {high}]"
