"""`python -m examples.demo`: see `make demo`."""

import asyncio
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from clawstream.evaluation.questions import load_questions
from clawstream.rendering.renderer import load_renderer
from examples.demo.modes import MODES
from examples.demo.personas import personas
from examples.demo.report import print_table, write_report
from examples.demo.run import Effort, run_seed
from examples.demo.system import DemoPlan


def main(
    model_directory: Annotated[Path, typer.Option(help="A Hugging Face directory.")] = Path("models/smollm2"),
    persona: Annotated[str, typer.Option(help="Who talks: terse or no-bullets.")] = "terse",
    mode: Annotated[str, typer.Option(help=f"What is learned from: {', '.join(MODES)}.")] = "binary-baseline",
    seeds: Annotated[int, typer.Option(help="Number of seeds, one after another.", envvar="SEEDS", min=1)] = 1,
    minutes: Annotated[float, typer.Option(help="Length of the conversations per seed.", min=0.1)] = 10.0,
    versions: Annotated[int, typer.Option(help="Stop earlier at this weight version.", min=1)] = 20,
    batch_size: Annotated[int, typer.Option(help="Judged answers per training step.", min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(help="Adam's step size.")] = 3e-5,
    temperature: Annotated[float, typer.Option(help="Of the policy's answers.")] = 0.7,
    concurrent: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 8,
    pause: Annotated[float, typer.Option(help="Mean seconds that a user pauses between conversations.", min=0)] = 8.0,
    samples: Annotated[int, typer.Option(help="Held-out answers per question and evaluation.", min=1)] = 3,
    reports: Annotated[Path, typer.Option(help="Where runs and reports go.")] = Path("reports"),
) -> None:
    """Teach a small model what one scripted user wants, on this machine, and measure it."""
    # A polite kill ends the run as Ctrl-C does: everything that was started is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console()
    chosen = personas().get(persona)
    if chosen is None:
        raise typer.BadParameter(f"no persona {persona!r}; there are {', '.join(personas())}")
    learning = MODES.get(mode)
    if learning is None:
        raise typer.BadParameter(f"no mode {mode!r}; there are {', '.join(MODES)}")
    questions = load_questions(Path(__file__).parent / chosen.questions_file)
    directory = (reports / f"demo-{persona}-{mode}-{datetime.now(UTC):%Y%m%d-%H%M%S}").resolve()
    renderer = load_renderer(model_directory)
    effort = Effort(
        training_seconds=minutes * 60,
        max_versions=versions,
        concurrent_conversations=concurrent,
        samples_per_question=samples,
        pause_seconds=pause,
    )
    results = []
    for seed in range(1, seeds + 1):
        console.rule(f"seed {seed} of {seeds}: a user who {chosen.description}; mode {mode}")
        plan = DemoPlan(
            directory=directory / f"seed-{seed}",
            model_directory=model_directory.resolve(),
            seed=seed,
            batch_size=batch_size,
            learning_rate=learning_rate,
            temperature=temperature,
            mode=learning,
        )
        result = asyncio.run(run_seed(plan, chosen, questions, renderer, effort, console))
        results.append(result)
        print_table(console, result)
        for path in write_report(directory, results):
            console.print(f"wrote {os.path.relpath(path)}")


if __name__ == "__main__":
    typer.run(main)
