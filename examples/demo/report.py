"""The demo's report: a table for the terminal, curves as PNG, everything as JSON."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import orjson
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from clawstream.evaluation.asking import MeasuredAnswer
from examples.demo.evaluation import Measurement
from examples.demo.history import History


@dataclass(frozen=True, slots=True)
class SeedResult:
    """All that one seed produced."""

    seed: int
    persona: str
    control_before: Measurement
    """The frozen copy, asked before training."""
    policy_before: Measurement
    control_after: Measurement
    """The frozen copy, asked again after training with other random numbers."""
    policy_after: Measurement
    answers_after: list[MeasuredAnswer]
    """What the trained policy said."""
    history: History
    judge_agreement: float
    """Share of judged answers where the judge's sign is what the user meant."""
    judged_exchanges: int
    mode: str
    """What was learned from."""
    final_version: int
    setup_seconds: float
    """Starting all processes, models loaded."""
    training_seconds: float
    """From the first question to the last version in service."""
    total_seconds: float

    @property
    def reward_gain(self) -> float:
        """Held-out reward of the trained policy above the control's, both measured after training."""
        return self.policy_after.reward - self.control_after.reward

    @property
    def reward_gain_standard_error(self) -> float:
        """Of the gain: the two evaluations are independent samples."""
        return math.hypot(self.policy_after.reward_standard_error, self.control_after.reward_standard_error)


_ROWS = (
    ("reward (-1 to 1)", "reward", "{:+.2f}"),
    ("user satisfied", "satisfied", "{:.0%}"),
    ("fact correct", "correct", "{:.0%}"),
    ("length (tokens)", "length_tokens", "{:.1f}"),
    ("entropy (nats/token)", "entropy_nats", "{:.2f}"),
    ("empty answers", "empty", "{:.0%}"),
)


def print_table(console: Console, result: SeedResult) -> None:
    """Held-out measurements before and after, control beside policy."""
    table = Table(
        title=f"Held-out questions, persona {result.persona}, mode {result.mode}, seed {result.seed} "
        f"({result.policy_after.answers} answers each; weight version {result.final_version})"
    )
    table.add_column("", justify="left")
    for column in ("control, before", "policy, before", "control, after", "policy, after"):
        table.add_column(column, justify="right")
    for label, field, template in _ROWS:
        measurements = (result.control_before, result.policy_before, result.control_after, result.policy_after)
        table.add_row(label, *(template.format(getattr(measurement, field)) for measurement in measurements))
    console.print(table)
    history = result.history
    console.print(
        f"Reward gain over the control: {result.reward_gain:+.2f} "
        f"(standard error {result.reward_gain_standard_error:.2f}). "
        f"{len(history.steps)} training steps, {history.turns} turns, {history.scores} scores "
        f"({history.failed_scores} failed), drops {history.drops_by_reason or 'none'}. "
        f"The judge agreed with the user in {result.judge_agreement:.1%} of {result.judged_exchanges} exchanges."
    )
    console.print(
        f"Set-up {result.setup_seconds:.0f} s, training {result.training_seconds:.0f} s, "
        f"all {result.total_seconds:.0f} s."
    )


def write_report(directory: Path, results: list[SeedResult]) -> list[Path]:
    """Writes `report.json` and `report.png`. Returns what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    json_file = directory / "report.json"
    json_file.write_bytes(orjson.dumps([_document(result) for result in results], option=orjson.OPT_INDENT_2))
    png_file = directory / "report.png"
    _draw(results).savefig(png_file, dpi=120)
    return [json_file, png_file]


def _document(result: SeedResult) -> dict[str, Any]:
    document = asdict(result)
    document["reward_gain"] = result.reward_gain
    document["reward_gain_standard_error"] = result.reward_gain_standard_error
    for name in ("judged", "turn_of_response"):
        del document["history"][name]
    return document


def _draw(results: list[SeedResult]) -> Figure:
    matplotlib.use("Agg")
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    figure.suptitle(f"clawstream demo: persona {results[0].persona}, mode {results[0].mode}")
    for result in results:
        label = f"seed {result.seed}"
        versions, steps = result.history.versions, result.history.steps
        served = [row.weight_version for row in versions]
        axes[0, 0].plot(served, [row.reward for row in versions], ".-", label=label)
        axes[0, 1].plot(served, [row.length_tokens for row in versions], ".-", label=label)
        trained = [step.step for step in steps]
        axes[0, 2].plot(trained, [step.mean_age for step in steps], ".-", label=label)
        entropies = [(step.step, step.entropy) for step in steps if step.entropy is not None]
        axes[1, 0].plot([step for step, _ in entropies], [entropy for _, entropy in entropies], ".-", label=label)
    titles = (
        (axes[0, 0], "Judge's mean reward in conversation", "weight version that answered"),
        (axes[0, 1], "Response length in conversation (tokens)", "weight version that answered"),
        (axes[0, 2], "Age of trained samples (versions)", "training step"),
        (axes[1, 0], "Policy entropy (nats per token)", "training step"),
    )
    for axis, title, x_label in titles:
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.legend()
    _bars(axes[1, 1], results, "satisfied", "Held-out: user satisfied")
    _bars(axes[1, 2], results, "correct", "Held-out: fact correct")
    return figure


def _bars(axis: Any, results: list[SeedResult], field: str, title: str) -> None:
    names = ("control_before", "policy_before", "control_after", "policy_after")
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        positions = [position + index * width for position in range(len(names))]
        axis.bar(
            positions, [getattr(getattr(result, name), field) for name in names], width, label=f"seed {result.seed}"
        )
    axis.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    axis.set_ylim(0, 1)
    axis.set_title(title)
    axis.legend()
