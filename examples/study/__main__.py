"""`python -m examples.study`: see `make study`."""

import asyncio
import os
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from clawstream.errors import ClawstreamError, SettingsError
from clawstream.evaluation.questions import load_questions
from clawstream.rendering.renderer import load_renderer
from examples.demo.modes import MODES
from examples.demo.personas import personas
from examples.demo.report import SeedResult, print_table
from examples.demo.run import Effort, run_seed
from examples.demo.system import DemoPlan
from examples.study.document import write_document
from examples.study.results import Run, RunResult, StudySettings, read_results, result_of, write_result
from examples.study.schedule import duration, planned_runs, runs_left, seconds_left

_DEMO = Path(__file__).parents[1] / "demo"


def main(
    model_directory: Annotated[Path, typer.Option(help="A Hugging Face directory.")] = Path("models/smollm2"),
    mode: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}; all by default.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per mode.", min=1)] = 3,
    persona: Annotated[str, typer.Option(help="Who talks: terse or no-bullets.")] = "terse",
    minutes: Annotated[float, typer.Option(help="Length of the conversations per run.", min=0.1)] = 10.0,
    versions: Annotated[int, typer.Option(help="Stop a run earlier at this weight version.", min=1)] = 10,
    batch_size: Annotated[int, typer.Option(help="Judged answers per training step.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="Adam's step size.")] = 3e-5,
    temperature: Annotated[float, typer.Option(help="Of the policy's answers.")] = 0.7,
    concurrent: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 8,
    pause: Annotated[float, typer.Option(help="Mean seconds that a user pauses between conversations.", min=0)] = 8.0,
    samples: Annotated[int, typer.Option(help="Held-out answers per question and evaluation.", min=1)] = 3,
    directory: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("reports/study"),
    document: Annotated[Path, typer.Option(help="The page that is written.")] = Path("docs/study.md"),
    only_document: Annotated[
        bool, typer.Option(help="Write the page from the results there are; run nothing.")
    ] = False,
) -> None:
    """Every way to learn, on the same traffic, with several seeds and a control. Interrupt it and start it again."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console()
    modes = mode or list(MODES)
    for given, known in ((modes, MODES), ([persona], personas())):
        if unknown := [name for name in given if name not in known]:
            raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    settings = StudySettings(
        persona=persona,
        model=model_directory.name,
        minutes=minutes,
        versions=versions,
        batch_size=batch_size,
        learning_rate=learning_rate,
        temperature=temperature,
        concurrent=concurrent,
        pause_seconds=pause,
        samples=samples,
    )
    planned = planned_runs(modes, seeds)
    try:
        done = read_results(directory, settings, planned)
        left = runs_left(planned, done)
        console.print(f"{len(done)} of {len(planned)} runs are whole; {_left(left, done, settings)}")
        for run in [] if only_document else left:
            console.rule(
                f"{run.name}: run {len(done) + 1} of {len(planned)}; {_left(runs_left(planned, done), done, settings)}"
            )
            result = _run(run, settings, model_directory, directory, console)
            print_table(console, result)
            done[run] = result_of(result)
            console.print(f"wrote {os.path.relpath(write_result(directory, settings, done[run]))}")
            _write(document, settings, planned, done, console)
        if done:
            _write(document, settings, planned, done, console)
    except SettingsError as error:
        console.print(str(error), style="red")
        sys.exit(2)
    except ClawstreamError as error:
        console.print(f"{error}\nWhole runs are kept; start again to go on.", style="red")
        sys.exit(1)


def _run(run: Run, settings: StudySettings, model_directory: Path, directory: Path, console: Console) -> SeedResult:
    """One run of the demo. Its data (weights, log) is removed when it is whole, and stays for a look when it is not."""
    folder = (directory / "work" / f"{run.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    persona = personas()[settings.persona]
    plan = DemoPlan(
        directory=folder,
        model_directory=model_directory.resolve(),
        seed=run.seed,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        temperature=settings.temperature,
        mode=MODES[run.mode],
    )
    effort = Effort(
        training_seconds=settings.minutes * 60,
        max_versions=settings.versions,
        concurrent_conversations=settings.concurrent,
        samples_per_question=settings.samples,
        pause_seconds=settings.pause_seconds,
    )
    questions = load_questions(_DEMO / persona.questions_file)
    result = asyncio.run(run_seed(plan, persona, questions, load_renderer(model_directory), effort, console))
    shutil.rmtree(folder)
    return result


def _left(left: list[Run], done: dict[Run, RunResult], settings: StudySettings) -> str:
    return f"about {duration(seconds_left(left, done, settings.minutes))} left" if left else "nothing is left to run"


def _write(
    document: Path, settings: StudySettings, planned: list[Run], done: dict[Run, RunResult], console: Console
) -> None:
    for file in write_document(document, settings, planned, done):
        console.print(f"wrote {os.path.relpath(file)}")


if __name__ == "__main__":
    typer.run(main)
