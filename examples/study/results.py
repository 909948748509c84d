"""What a run leaves behind: one JSON file per mode and seed, written when the run is whole."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from clawstream.durable_files import replace_file
from clawstream.errors import SettingsError
from examples.demo.evaluation import Measurement
from examples.demo.report import SeedResult


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One mode with one seed."""

    mode: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file and its folder."""
        return f"{self.mode}-seed-{self.seed}"


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What all runs of a study have in common: results of other settings do not belong beside each other."""

    persona: str
    model: str
    """Name of the model's directory."""
    minutes: float
    """Of conversation per run."""
    versions: int
    batch_size: int
    learning_rate: float
    temperature: float
    concurrent: int
    pause_seconds: float
    """Mean pause of each user between two conversations."""
    samples: int
    """Held-out answers per question."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What one weight version's answers in conversation were like."""

    weight_version: int
    turns: int
    reward: float
    """The judge's mean."""
    length_tokens: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run's numbers."""

    run: Run
    control: Measurement
    """The frozen copy after training, asked with the same random numbers as the policy."""
    before: Measurement
    """The policy before training."""
    policy: Measurement
    """The policy after training."""
    final_version: int
    steps: int
    judge_agreement: float
    """Share of judged answers where the judge's sign is what the user meant."""
    entropies: list[float]
    """Policy entropy of each training step in nats per token, where it was measured."""
    curve: list[CurvePoint]
    total_seconds: float


def result_of(result: SeedResult) -> RunResult:
    """What is kept of a run of the demo."""
    history = result.history
    return RunResult(
        run=Run(result.mode, result.seed),
        control=result.control_after,
        before=result.policy_before,
        policy=result.policy_after,
        final_version=result.final_version,
        steps=len(history.steps),
        judge_agreement=result.judge_agreement,
        entropies=[step.entropy for step in history.steps if step.entropy is not None],
        curve=[CurvePoint(row.weight_version, row.turns, row.reward, row.length_tokens) for row in history.versions],
        total_seconds=result.total_seconds,
    )


def file_of(directory: Path, run: Run) -> Path:
    """Where a run's result is."""
    return directory / f"{run.name}.json"


def write_result(directory: Path, settings: StudySettings, result: RunResult) -> Path:
    """Keeps a result, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    file = file_of(directory, result.run)
    document = {"settings": asdict(settings), "result": asdict(result)}
    replace_file(file, orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return file


def read_results(directory: Path, settings: StudySettings, runs: Sequence[Run]) -> dict[Run, RunResult]:
    """Results of those of `runs` that are whole. Raises SettingsError for one that was made with other settings."""
    found: dict[Run, RunResult] = {}
    for run in runs:
        file = file_of(directory, run)
        if not file.exists():
            continue
        document: Any = orjson.loads(file.read_bytes())
        if document["settings"] != asdict(settings):
            other = sorted(name for name, value in asdict(settings).items() if document["settings"].get(name) != value)
            raise SettingsError(
                f"{file} was made with another {', '.join(other)}: use the same options, or another --directory"
            )
        found[run] = _result(document["result"])
    return found


def _result(document: Mapping[str, Any]) -> RunResult:
    fields: dict[str, Any] = dict(document)
    fields |= {name: Measurement(**document[name]) for name in ("control", "before", "policy")}
    fields["run"] = Run(**document["run"])
    fields["curve"] = [CurvePoint(**point) for point in document["curve"]]
    return RunResult(**fields)
