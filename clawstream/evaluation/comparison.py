"""From measured answers to a comparison of versions with a control. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from clawstream.evaluation.asking import MeasuredAnswer
from clawstream.evaluation.diversity import distinct_n, self_overlap
from clawstream.evaluation.statistics import METHOD, Bootstrap, Estimate

_NGRAM: Final = 2

PerQuestion = Callable[[Sequence[MeasuredAnswer]], float | None]
"""All answers to one question to one number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Something that is reported."""

    name: str
    label: str
    """For tables and plots."""
    template: str
    """How a value is printed."""
    difference_template: str
    value: PerQuestion


def _entropy(answers: Sequence[MeasuredAnswer]) -> float | None:
    known = [answer.entropy_nats for answer in answers if answer.entropy_nats is not None]
    return fmean(known) if known else None


METRICS: Final = (
    Metric("satisfied", "preference satisfied", "{:.0%}", "{:+.0%}", lambda a: fmean(one.satisfied for one in a)),
    Metric("correct", "facts correct", "{:.0%}", "{:+.0%}", lambda a: fmean(one.correct for one in a)),
    Metric(
        "satisfied_and_correct",
        "satisfied and correct",
        "{:.0%}",
        "{:+.0%}",
        lambda a: fmean(one.satisfied and one.correct for one in a),
    ),
    Metric("length_tokens", "length (tokens)", "{:.1f}", "{:+.1f}", lambda a: fmean(one.length_tokens for one in a)),
    Metric("entropy_nats", "entropy (nats per token)", "{:.2f}", "{:+.2f}", _entropy),
    Metric("empty", "empty answers", "{:.0%}", "{:+.0%}", lambda a: fmean(one.is_empty for one in a)),
    Metric(
        "distinct_2",
        "diversity: distinct-2",
        "{:.2f}",
        "{:+.2f}",
        lambda a: distinct_n([one.answer for one in a], _NGRAM),
    ),
    Metric(
        "self_overlap_2",
        "diversity: self-overlap (2-grams)",
        "{:.2f}",
        "{:+.2f}",
        lambda a: self_overlap([one.answer for one in a], _NGRAM),
    ),
)


@dataclass(frozen=True, slots=True)
class VersionReport:
    """One version's numbers."""

    name: str
    estimates: dict[str, Estimate | None]
    """By metric. None where nothing was measured."""
    differences: dict[str, Estimate | None]
    """To the control, by metric. Empty for the control itself."""
    by_seed: dict[int, dict[str, float | None]]
    """Means per seed and metric: how much the seeds differ."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All versions of one evaluation, the control first."""

    control: str
    versions: list[VersionReport]
    questions: int
    answers_per_question: int
    confidence: float
    resamples: int
    method: str = METHOD


def compare(
    answers: Mapping[str, Sequence[MeasuredAnswer]],
    *,
    control: str,
    confidence: float,
    resamples: int,
    seed: int,
) -> Comparison:
    """`answers` by version; every version must have been asked the same questions equally often.

    Raises ValueError when that is not so, or there is no control.
    """
    questions = list(dict.fromkeys(answer.question for answer in answers[control]))
    counts = {len(of_version) for of_version in answers.values()}
    asked = {frozenset(answer.question for answer in of_version) for of_version in answers.values()}
    if len(counts) != 1 or asked != {frozenset(questions)} or counts.pop() % len(questions):
        raise ValueError("the versions were not asked the same questions equally often")
    bootstrap = Bootstrap(len(questions), resamples=resamples, confidence=confidence, seed=seed)
    columns = {name: _columns(of_version, questions) for name, of_version in answers.items()}
    reports = [
        VersionReport(
            name=name,
            estimates={metric: bootstrap.mean(values) for metric, values in columns[name].items()},
            differences=(
                {}
                if name == control
                else {
                    metric: bootstrap.difference(values, columns[control][metric])
                    for metric, values in columns[name].items()
                }
            ),
            by_seed=_by_seed(of_version, questions),
        )
        for name, of_version in answers.items()
    ]
    reports.sort(key=lambda report: report.name != control)
    return Comparison(
        control=control,
        versions=reports,
        questions=len(questions),
        answers_per_question=len(answers[control]) // len(questions),
        confidence=confidence,
        resamples=resamples,
    )


def _columns(answers: Sequence[MeasuredAnswer], questions: Sequence[str]) -> dict[str, list[float | None]]:
    """Metric to one value per question, in the order of `questions`."""
    groups: dict[str, list[MeasuredAnswer]] = {question: [] for question in questions}
    for answer in answers:
        groups[answer.question].append(answer)
    return {metric.name: [metric.value(groups[question]) for question in questions] for metric in METRICS}


def _by_seed(answers: Sequence[MeasuredAnswer], questions: Sequence[str]) -> dict[int, dict[str, float | None]]:
    rows: dict[int, dict[str, float | None]] = {}
    for seed in dict.fromkeys(answer.seed for answer in answers):
        columns = _columns([answer for answer in answers if answer.seed == seed], questions)
        known = {name: [value for value in values if value is not None] for name, values in columns.items()}
        rows[seed] = {name: fmean(values) if values else None for name, values in known.items()}
    return rows
