"""The study: what is run next, what is kept, and the page that is made of it."""

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
import typer
from typer.testing import CliRunner

from clawstream.errors import SettingsError, SupervisorError
from examples.demo.evaluation import Measurement
from examples.demo.history import History, StepRow, VersionRow
from examples.demo.report import SeedResult
from examples.demo.run import Effort
from examples.demo.system import DemoPlan
from examples.study import __main__ as study
from examples.study import document
from examples.study.document import write_document
from examples.study.results import CurvePoint, Run, RunResult, StudySettings, file_of, read_results, write_result
from examples.study.schedule import duration, planned_runs, runs_left, seconds_left
from examples.study.summary import findings, summarise

MODES = ["binary", "opd", "combine", "hybrid"]
SETTINGS = StudySettings(
    persona="terse",
    model="smollm2",
    minutes=10.0,
    versions=40,
    batch_size=16,
    learning_rate=1e-5,
    temperature=0.7,
    concurrent=8,
    pause_seconds=5.0,
    samples=3,
)


def measurement(reward: float, correct: float, length: float = 30.0) -> Measurement:
    return Measurement(
        answers=72,
        reward=reward,
        reward_standard_error=0.1,
        satisfied=(reward + 1) / 2,
        correct=correct,
        length_tokens=length,
        entropy_nats=1.0,
        empty=0.0,
    )


def result(mode: str, seed: int, *, reward: float = 0.5, correct: float = 0.6, length: float = 20.0) -> RunResult:
    shift = 0.01 * seed
    return RunResult(
        run=Run(mode, seed),
        control=measurement(-0.8 + shift, 0.7),
        before=measurement(-0.8, 0.7),
        policy=measurement(reward + shift, correct + shift, length),
        final_version=12,
        steps=13,
        judge_agreement=0.9,
        entropies=[1.2, 1.1, 1.0],
        curve=[CurvePoint(0, 20, -0.8, 40.0), CurvePoint(6, 20, 0.1, 30.0)],
        total_seconds=900.0,
    )


def whole_study() -> dict[Run, RunResult]:
    runs = [result("binary", seed, correct=0.3, length=6.0) for seed in (1, 2, 3)]
    runs += [result(mode, seed, correct=0.7) for mode in MODES[1:] for seed in (1, 2, 3)]
    return {each.run: each for each in runs}


# -- schedule


def test_runs_go_seed_by_seed_and_whole_ones_are_not_run_again() -> None:
    planned = planned_runs(["binary", "opd"], 2)
    assert [run.name for run in planned] == ["binary-seed-1", "opd-seed-1", "binary-seed-2", "opd-seed-2"]
    assert [run.name for run in runs_left(planned, {Run("opd", 1)})] == ["binary-seed-1", "binary-seed-2", "opd-seed-2"]


def test_time_left_is_guessed_and_then_learned() -> None:
    left = planned_runs(MODES, 3)
    assert seconds_left(left, {}, 10.0) == 12 * (600 + 240)
    done = {Run("opd", 1): result("opd", 1)}
    assert seconds_left(left[:3], done, 10.0) == 3 * 900
    assert (duration(7500), duration(59 * 60)) == ("2 h 05 min", "59 min")


# -- results


def test_results_come_back_as_they_were_and_parts_of_files_never_count(tmp_path: Path) -> None:
    kept = [result("binary", 1), result("opd", 2)]
    for each in kept:
        write_result(tmp_path, SETTINGS, each)
    planned = planned_runs(MODES, 3)
    assert read_results(tmp_path, SETTINGS, planned) == {each.run: each for each in kept}
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["binary-seed-1.json", "opd-seed-2.json"]
    assert read_results(tmp_path / "nowhere", SETTINGS, planned) == {}


def test_results_of_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    write_result(tmp_path, dataclasses.replace(SETTINGS, minutes=2.0, batch_size=4), result("binary", 1))
    with pytest.raises(SettingsError, match=r"binary-seed-1\.json was made with another batch_size, minutes"):
        read_results(tmp_path, SETTINGS, planned_runs(MODES, 1))


def test_a_result_holds_no_path_of_the_machine(tmp_path: Path) -> None:
    written = orjson.loads(write_result(tmp_path, SETTINGS, result("binary", 1)).read_bytes())
    assert str(tmp_path) not in str(written)
    assert file_of(tmp_path, Run("binary", 1)).exists()


# -- numbers


def test_means_errors_and_differences_are_over_seeds() -> None:
    control, binary, *_ = summarise(whole_study().values(), MODES)
    assert control.values["reward"].by_seed == pytest.approx((-0.79, -0.78, -0.77))
    assert binary.values["correct"].mean == pytest.approx(0.32)
    assert binary.values["correct"].standard_error == pytest.approx(0.01 / 3**0.5)
    assert binary.differences["reward"].by_seed == pytest.approx((1.3, 1.3, 1.3))
    assert binary.differences["correct"].mean == pytest.approx(0.32 - 0.7)


def test_the_control_of_a_seed_is_the_mean_over_modes_and_missing_modes_are_left_out() -> None:
    odd = dataclasses.replace(result("opd", 1), control=measurement(-0.39, 0.5))
    summaries = summarise([result("binary", 1), odd], MODES)
    assert [summary.name for summary in summaries] == ["control", "binary", "opd"]
    assert summaries[0].values["reward"].mean == pytest.approx((-0.79 - 0.39) / 2)
    assert summaries[2].differences["reward"].mean == pytest.approx(0.51 + 0.39)
    assert summaries[2].values["reward"].standard_error is None
    assert summarise([], MODES) == []


def test_findings_say_what_is_there_and_what_is_not_distinguishable() -> None:
    told = findings(summarise(whole_study().values(), MODES))
    assert any(line.startswith("`binary`: reward +1.30") and "80% shorter" in line for line in told)
    assert "`combine` against `binary`: correctness +40% [+- 0%] (within seeds)." in told
    one_seed = findings(summarise([result("binary", 1)], MODES))
    assert "one seed, not distinguishable from 0" in one_seed[0]


# -- page


def test_the_page_has_the_table_the_plots_and_what_is_missing(tmp_path: Path) -> None:
    planned, results = planned_runs(MODES, 3), whole_study()
    del results[Run("hybrid", 3)]
    file = tmp_path / "docs" / "study.md"
    page, *plots = write_document(file, SETTINGS, planned, results)
    text = page.read_text()
    assert "1 of 12 runs are missing" in text
    header = next(line for line in text.splitlines() if "| control | binary |" in line)
    assert header == "|  | control | binary | opd | combine | hybrid |"
    row = next(line for line in text.splitlines() if line.startswith("| fact correct"))
    assert row.count("|") == header.count("|")
    assert "70% +- 0%" in row
    assert "32% +- 1%" in row
    for plot in plots:
        root = ElementTree.fromstring(plot.read_text())
        assert root.tag.endswith("svg")
        assert f"]({plot.name})" in text
    assert re.search(r">\s*hybrid\s*<", plots[0].read_text()), "text stays text"


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    written = [
        [
            each.read_bytes()
            for each in write_document(tmp_path / name / "study.md", SETTINGS, planned_runs(MODES, 3), whole_study())
        ]
        for name in ("first", "second")
    ]
    assert written[0] == written[1]


def test_the_page_names_the_runs_that_the_clock_ended(tmp_path: Path) -> None:
    results = {Run("binary", 1): result("binary", 1), Run("opd", 1): result("opd", 1)}
    results[Run("opd", 1)] = dataclasses.replace(results[Run("opd", 1)], final_version=4)

    def text(versions: int) -> str:
        settings = dataclasses.replace(SETTINGS, versions=versions)
        return write_document(tmp_path / "study.md", settings, planned_runs(["binary", "opd"], 1), results)[
            0
        ].read_text()

    assert "before version 12, so with less to learn from than the others: opd-seed-1 (version 4)." in text(12)
    assert "Ended by the clock" not in text(4)


def test_without_any_result_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result yet"):
        write_document(tmp_path / "study.md", SETTINGS, planned_runs(MODES, 1), {})


# -- the whole of it, with recorded runs


def recorded(plan: DemoPlan) -> SeedResult:
    """What a run of the demo returns."""
    kept = result(plan.mode.name, plan.seed)
    return SeedResult(
        seed=plan.seed,
        persona="terse",
        control_before=kept.control,
        policy_before=kept.before,
        control_after=kept.control,
        policy_after=kept.policy,
        answers_after=[],
        history=History(
            versions=[VersionRow(0, 20, -0.8, 40.0), VersionRow(6, 20, 0.1, 30.0)],
            steps=[StepRow(number, number, 16, 0.5, 0.1, 1.3 - 0.1 * number, 3.0) for number in (1, 2, 3)],
            turns=80,
            scores=40,
            failed_scores=0,
            drops_by_reason={},
            judged={},
            turn_of_response={},
        ),
        judge_agreement=0.9,
        judged_exchanges=40,
        mode=plan.mode.name,
        final_version=12,
        setup_seconds=30.0,
        training_seconds=600.0,
        total_seconds=900.0,
    )


class Runs:
    """Stands in for the demo: remembers what was run, and fails when told to."""

    def __init__(self) -> None:
        self.plans: list[DemoPlan] = []
        self.fails_at = ""

    async def run_seed(self, plan: DemoPlan, *given: object) -> SeedResult:
        assert any(isinstance(each, Effort) and each.training_seconds == 120 for each in given)
        self.plans.append(plan)
        (plan.directory / "data").mkdir(parents=True, exist_ok=True)  # two attempts may share a second
        if f"{plan.mode.name}-seed-{plan.seed}" == self.fails_at:
            raise SupervisorError("the trainer did not become ready")
        return recorded(plan)

    @property
    def names(self) -> list[str]:
        return [f"{plan.mode.name}-seed-{plan.seed}" for plan in self.plans]


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(study, "run_seed", runs.run_seed)
    monkeypatch.setattr(study, "load_renderer", lambda directory: None)
    # The page is written after every run; its plots have their own tests, and drawing takes half a second each time.
    monkeypatch.setattr(document, "_svg", lambda figure: b"<svg/>\n")
    app = typer.Typer()
    app.command()(study.main)
    page = tmp_path / "docs" / "study.md"

    def start(*further: str):
        options = ["--minutes", "2", "--seeds", "2", "--mode", "binary", "--mode", "combine", *further]
        return CliRunner().invoke(app, [*options, "--directory", str(tmp_path / "r"), "--document", str(page)])

    runs.fails_at = "binary-seed-2"
    first = start()
    assert first.exit_code == 1
    assert "did not become ready" in first.output
    assert "Whole runs are kept" in first.output
    assert runs.names == ["binary-seed-1", "combine-seed-1", "binary-seed-2"]
    assert "2 of 4 runs are missing" in page.read_text()
    assert [folder.name[:13] for folder in (tmp_path / "r" / "work").iterdir()] == ["binary-seed-2"], "for a look"

    runs.fails_at, runs.plans = "", []
    second = start()
    assert second.exit_code == 0, second.output
    assert "2 of 4 runs are whole; about 30 min left" in second.output
    assert runs.names == ["binary-seed-2", "combine-seed-2"]
    assert {plan.mode.algorithm for plan in runs.plans} == {
        "services.trainer.algorithms.binary:Binary",
        "services.trainer.algorithms.combine:Combine",
    }
    assert "runs are missing" not in page.read_text()

    runs.plans = []
    written = page.read_bytes()
    assert "nothing is left to run" in start().output
    assert (runs.plans, page.read_bytes()) == ([], written)
    assert start("--batch-size", "4").exit_code == 2, "results of other settings do not belong beside these"
