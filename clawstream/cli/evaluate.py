"""`clawstream eval`: held-out questions under several weight versions and a frozen control."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from clawstream.chat_client import ChatClient
from clawstream.cli.terminal import errors, output
from clawstream.clock import SystemClock
from clawstream.engine.client import HttpEngineClient
from clawstream.errors import MissingDependencyError, SettingsError
from clawstream.evaluation.asking import MeasuredAnswer, ask_all
from clawstream.evaluation.comparison import compare
from clawstream.evaluation.preferences import Preference, load_preference
from clawstream.evaluation.questions import Question, load_questions
from clawstream.evaluation.report import print_comparison, verdict, write_json, write_plot
from clawstream.evaluation.respondents import ChatRespondent, EngineRespondent, Respondent, Sampling
from clawstream.evaluation.served import served_engine
from clawstream.evaluation.targets import Target, TargetKind, check_names, parse_target
from clawstream.interruption import terminated_like_interrupted
from clawstream.progress_display import ProgressDisplay
from clawstream.rendering.interface import ChatRenderer

_STARTUP_SECONDS = 300.0
_PATIENCE_SECONDS = 300.0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(name="eval")(evaluate)


def evaluate(
    questions: Annotated[Path, typer.Option("--questions", "-q", help="A TOML file with held_out questions.")],
    control: Annotated[str, typer.Option(help="The frozen control: [NAME=]PLACE.")],
    version: Annotated[list[str], typer.Option(help="What is compared with it: [NAME=]PLACE; may be repeated.")],
    preference: Annotated[str, typer.Option(help="terse, no-bullets, or package.module:name.")] = "terse",
    seeds: Annotated[int, typer.Option(help="How many seeds, from --seed on.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="The first one; also of the bootstrap.")] = 1,
    samples: Annotated[int, typer.Option(help="Answers per question and seed.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="Of the answers.", min=0.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.", min=1)] = 64,
    tokenizer: Annotated[Path | None, typer.Option(help="Model directory to render with; engines need it.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name to ask endpoints for.")] = None,
    api_key: Annotated[str, typer.Option(help="For endpoints.", envvar="OPENAI_API_KEY")] = "none",
    threads: Annotated[int, typer.Option(help="Of an engine that is started.", min=1)] = 2,
    concurrent: Annotated[int, typer.Option(help="Questions at a time.", min=1)] = 16,
    confidence: Annotated[float, typer.Option(help="Of the intervals.", min=0.5, max=0.999)] = 0.95,
    resamples: Annotated[int, typer.Option(help="Of the bootstrap.", min=100)] = 2000,
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where the report goes.")] = Path("reports"),
) -> None:
    """Ask held-out questions of several weight versions and a control, and report means with confidence intervals.

    A PLACE is a model directory (an engine is started for it), an engine's address, or an OpenAI-compatible endpoint
    whose address ends in /v1.
    """
    targets = [parse_target(control, default_name="control"), *(parse_target(text) for text in version)]
    check_names(targets)
    if tokenizer is None and any(target.kind is TargetKind.ENGINE for target in targets):
        raise SettingsError("an engine is asked by token ids: give --tokenizer, the directory of its model")
    wish, held_out = load_preference(preference), load_questions(questions).held_out
    report = directory / f"eval-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    report.mkdir(parents=True)
    sampling = Sampling(temperature, max_tokens)
    with _told_when_cut_off(report), terminated_like_interrupted():  # an engine that was started must not stay behind
        answers = asyncio.run(
            _ask_targets(
                targets,
                held_out,
                wish,
                sampling,
                seeds=range(seed, seed + seeds),
                samples=samples,
                concurrent=concurrent,
                open_respondent=lambda target: _open(
                    target, tokenizer, report, threads=threads, slots=concurrent, model=model, api_key=api_key
                ),
            )
        )
    comparison = compare(answers, control=targets[0].name, confidence=confidence, resamples=resamples, seed=seed)
    print_comparison(output, comparison)
    for each in comparison.versions[1:]:
        output.print(verdict(each))
    settings = {
        "questions": str(questions),
        "preference": wish.name,
        "seeds": list(range(seed, seed + seeds)),
        "samples": samples,
        "temperature": temperature,
        "max_tokens": max_tokens,
        "targets": {target.name: target.place for target in targets},
    }
    write_json(report / "eval.json", comparison, answers, settings)
    output.print(str(report / "eval.json"))
    try:
        write_plot(report / "eval.png", comparison)
        output.print(str(report / "eval.png"))
    except MissingDependencyError as error:
        errors.print(str(error))


@contextmanager
def _told_when_cut_off(report: Path) -> Generator[None]:
    """Whatever ends the asking, no empty folder is left, and what is in one that is left is told."""
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        if not is_whole:
            left = sorted(file.name for file in report.iterdir())
            if left:
                errors.print(f"cut off: there is no report; {report} holds what engines logged: {', '.join(left)}")
            else:
                report.rmdir()
                errors.print("cut off: there is no report")


async def _ask_targets(
    targets: Sequence[Target],
    questions: Sequence[Question],
    preference: Preference,
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    samples: int,
    concurrent: int,
    open_respondent: Callable[[Target], AbstractAsyncContextManager[Respondent]],
) -> dict[str, list[MeasuredAnswer]]:
    """One target after another, so that two engines never share the machine."""
    answers: dict[str, list[MeasuredAnswer]] = {}
    total = len(questions) * len(seeds) * samples * len(targets)
    with ProgressDisplay(errors, SystemClock(), total=total, unit="answers") as display:
        for target in targets:
            async with AsyncExitStack() as stack:
                with display.preparing(f"starting {target.name}"):
                    respondent = await stack.enter_async_context(open_respondent(target))
                display.describe(target.name)
                answers[target.name] = await ask_all(
                    respondent,
                    questions,
                    preference.is_satisfied,
                    sampling,
                    seeds=seeds,
                    samples_per_question=samples,
                    concurrent=concurrent,
                    advance=display.advance,
                )
    return answers


@asynccontextmanager
async def _open(
    target: Target,
    tokenizer: Path | None,
    report: Path,
    *,
    threads: int,
    slots: int,
    model: str | None,
    api_key: str,
) -> AsyncGenerator[Respondent]:
    if target.kind is TargetKind.ENDPOINT:
        async with ChatClient(target.place, api_key=api_key, model=model, patience_seconds=_PATIENCE_SECONDS) as client:
            yield ChatRespondent(client)
    elif target.kind is TargetKind.ENGINE:
        assert tokenizer is not None, "checked before"
        renderer = _renderer(tokenizer)
        engine = HttpEngineClient(target.name, target.place, vocabulary_size=renderer.vocabulary_size)
        try:
            yield EngineRespondent(engine, renderer)
        finally:
            await engine.close()
    else:
        async with served_engine(
            target.name,
            Path(target.place),
            threads=threads,
            slots=min(slots, 256),
            startup_seconds=_STARTUP_SECONDS,
            log_file=report / f"engine-{target.name.replace('/', '-')}.log",
        ) as engine:
            yield EngineRespondent(engine, _renderer(tokenizer or Path(target.place)))


def _renderer(directory: Path) -> ChatRenderer:
    try:
        from clawstream.rendering.renderer import load_renderer  # the other commands do without its packages
    except ImportError as error:
        raise MissingDependencyError("rendering needs more packages: pip install 'clawstream[gateway]'") from error
    return load_renderer(directory)
