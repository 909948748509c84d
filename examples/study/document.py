"""The study as a page of Markdown with two SVG plots, made from results alone: the same results give the same bytes."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.figure import Figure

from clawstream.durable_files import replace_file
from examples.study.results import Run, RunResult, StudySettings
from examples.study.summary import MEASURES, ModeSummary, SeedMean, findings, summarise

_INTRODUCTION = """\
Made by `make study` from the results of whole runs; do not edit. Each run is a system of its own (Kafka, two engines,
gateway, judge, teacher, trainer) on a CPU, in which a scripted user talks to the policy. Of a seed all modes have the
same user, questions drawn by the same generator, and the same settings but what they learn from. Afterwards policy and
frozen control answer questions that were never asked in training."""
_EXPECTATION = """\
The shape that we expect, to be tested and not assumed: a scalar alone buys short and empty answers, because the judge's
verdict says *that* an answer was bad and not *why*; a hint says what was missing, so answers that learn from it stay
true. It would show as a `binary` that gains reward and loses correctness, and an `opd`, `combine` or `hybrid` that
gains reward and keeps it."""
_OUTCOMES = ("reward", "correct")


def write_document(
    file: Path, settings: StudySettings, planned: Sequence[Run], results: Mapping[Run, RunResult]
) -> list[Path]:
    """Writes the page and its plots beside it. Returns what was written. Raises ValueError without any result."""
    modes = list(dict.fromkeys(run.mode for run in planned))
    summaries = summarise(results.values(), modes)
    if not summaries:
        raise ValueError("there is no result yet: a study needs at least one whole run")
    outcomes, curves = (file.with_name(f"{file.stem}-{name}.svg") for name in ("outcomes", "curves"))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(outcomes, _svg(_outcomes(summaries)))
    replace_file(curves, _svg(_curves(modes, list(results.values()))))
    text = _page(settings, planned, results, summaries, outcomes.name, curves.name)
    replace_file(file, text.encode())
    return [file, outcomes, curves]


def _page(
    settings: StudySettings,
    planned: Sequence[Run],
    results: Mapping[Run, RunResult],
    summaries: Sequence[ModeSummary],
    outcomes: str,
    curves: str,
) -> str:
    missing = [run.name for run in planned if run not in results]
    state = "" if not missing else f"\nNot whole: {len(missing)} of {len(planned)} runs are missing.\n"
    control, modes = summaries[0], summaries[1:]
    lines = [
        "# Study: what each way to learn does to reward and correctness",
        "",
        _INTRODUCTION,
        state,
        _EXPECTATION,
        "",
        "## Held-out answers after training",
        "",
        "Means over seeds, +- the standard error of that mean.",
        "",
        _row(["", *(summary.name for summary in summaries)]),
        _row(["---", *("---:" for _ in summaries)]),
        *(
            _row([measure.label, *(_cell(each.values[measure.name], measure.template) for each in summaries)])
            for measure in MEASURES
        ),
        _row(["seeds", *(str(len(each.seeds)) for each in summaries)]),
        "",
        "Difference to the control, taken within each seed:",
        "",
        _row(["", *(summary.name for summary in modes)]),
        _row(["---", *("---:" for _ in modes)]),
        *(
            _row([m.label, *(_cell(each.differences[m.name], m.difference_template) for each in modes)])
            for m in MEASURES
        ),
        "",
        f"![Held-out reward and correctness by mode]({outcomes})",
        "",
        "## What it says",
        "",
        *(f"- {sentence}" for sentence in findings(summaries)),
        "",
        f"With {len(control.seeds)} seeds only large effects can be told from chance.",
        "",
        "## On the way",
        "",
        "In conversation, by the weight version that answered; one line per run.",
        "",
        f"![Reward and length in conversation, entropy in training]({curves})",
        "",
        "## Every run",
        "",
        _row(
            ["run", "reward", "control", "correct", "control", "length", "version", "steps", "judge right", "minutes"]
        ),
        _row(["---", *("---:" for _ in range(9))]),
        *(_run_row(results[run]) for run in planned if run in results),
        "",
        *_ended_by_the_clock(settings, [results[run] for run in planned if run in results]),
        "## Settings",
        "",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in asdict(settings).items()),
        "",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: SeedMean, template: str) -> str:
    if value.standard_error is None:
        return template.format(value.mean)
    return f"{template.format(value.mean)} +- {template.format(value.standard_error).lstrip('+')}"


def _run_row(result: RunResult) -> str:
    policy, control = result.policy, result.control
    return _row(
        [
            result.run.name,
            f"{policy.reward:+.2f}",
            f"{control.reward:+.2f}",
            f"{policy.correct:.0%}",
            f"{control.correct:.0%}",
            f"{policy.length_tokens:.1f}",
            str(result.final_version),
            str(result.steps),
            f"{result.judge_agreement:.0%}",
            f"{result.total_seconds / 60:.0f}",
        ]
    )


def _ended_by_the_clock(settings: StudySettings, results: Sequence[RunResult]) -> list[str]:
    """Runs that learned from less than the others: the machine was too slow or too busy for them."""
    short = [result for result in results if result.final_version < settings.versions]
    if not short:
        return []
    named = ", ".join(f"{result.run.name} (version {result.final_version})" for result in short)
    told = (
        f"Ended by the clock before version {settings.versions}, so with less to learn from than the others: {named}. "
        "Remove their result files and start the study again on a quieter machine to compare like with like."
    )
    return [told, ""]


def _outcomes(summaries: Sequence[ModeSummary]) -> Figure:
    """Two panels: a bar per mode, and a dot per seed."""
    figure = cast(Any, Figure(figsize=(9, 3.6), layout="constrained"))
    labels = {measure.name: measure.label for measure in MEASURES}
    for axis, name in zip(figure.subplots(1, 2), _OUTCOMES, strict=True):
        values = [summary.values[name] for summary in summaries]
        colours = ["tab:grey", *("tab:blue" for _ in summaries[1:])]
        errors = [value.standard_error or 0.0 for value in values]
        axis.bar(range(len(values)), [value.mean for value in values], yerr=errors, capsize=4, color=colours, alpha=0.6)
        for place, value in enumerate(values):
            axis.plot([place] * len(value.by_seed), value.by_seed, "k.", markersize=5)
        axis.set_xticks(range(len(values)), [summary.name for summary in summaries])
        axis.axhline(values[0].mean, color="tab:grey", linewidth=1, linestyle="--")
        axis.set_title(labels[name])
    return figure


def _curves(modes: Sequence[str], results: Sequence[RunResult]) -> Figure:
    """Three panels, one colour per mode, one line per run."""
    figure = cast(Any, Figure(figsize=(11, 3.6), layout="constrained"))
    axes = figure.subplots(1, 3)
    colours = {mode: f"C{place}" for place, mode in enumerate(modes)}
    for result in sorted(results, key=lambda each: each.run):
        style = {"color": colours[result.run.mode], "linewidth": 1.2, "alpha": 0.8}
        style |= {"label": result.run.mode if result.run.seed == _first_seed(results, result.run.mode) else None}
        versions = [point.weight_version for point in result.curve]
        axes[0].plot(versions, [point.reward for point in result.curve], **style)
        axes[1].plot(versions, [point.length_tokens for point in result.curve], **style)
        axes[2].plot(range(1, len(result.entropies) + 1), result.entropies, **style)
    for axis, title, x_label in (
        (axes[0], "Judge's mean reward", "weight version"),
        (axes[1], "Response length (tokens)", "weight version"),
        (axes[2], "Policy entropy (nats per token)", "training step"),
    ):
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.legend()
    return figure


def _first_seed(results: Sequence[RunResult], mode: str) -> int:
    return min(result.run.seed for result in results if result.run.mode == mode)


def _svg(figure: Figure) -> bytes:
    """Text stays text, and neither time nor chance gets in."""
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "clawstream"}):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    lines = [line.rstrip() for line in content.getvalue().decode().splitlines()]
    return ("\n".join(lines) + "\n").encode()
