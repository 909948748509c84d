"""`python -m examples.homework`: see docs/evaluation.md."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from clawstream.chat_client import ChatClient
from clawstream.clock import SystemClock
from clawstream.errors import ClawstreamError, EngineError
from clawstream.evaluation.statistics import METHOD, Bootstrap, Estimate
from clawstream.progress_display import ProgressDisplay
from examples.homework.problems import SHIPPED_FILE, load_problems
from examples.homework.scenario import Assignment, ConversationResult, Role, assignments, converse

_CONFIDENCE = 0.95
_RESAMPLES = 2000
_SEED_STRIDE = 1_000
_ROWS: tuple[tuple[str, Callable[[ConversationResult], bool]], ...] = (
    ("first answer correct", lambda one: one.first.correct),
    ("first answer in style", lambda one: one.first.in_style),
    ("first answer both", lambda one: one.first.correct and one.first.in_style),
    ("last answer correct", lambda one: one.last.correct),
    ("last answer in style", lambda one: one.last.in_style),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How the conversations are held."""

    seeds: int
    first_seed: int
    max_turns: int
    max_tokens: int
    temperature: float
    concurrent: int
    measure_only: bool


def main(
    endpoint: Annotated[str, typer.Option(help="Any OpenAI-compatible one.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="The model to ask for.")] = None,
    api_key: Annotated[str, typer.Option(help="For the endpoint.", envvar="OPENAI_API_KEY")] = "none",
    problems: Annotated[Path, typer.Option(help="JSON lines with GSM8K's fields.")] = SHIPPED_FILE,
    limit: Annotated[int | None, typer.Option(help="Only the first so many problems.", min=1)] = None,
    role: Annotated[list[Role] | None, typer.Option(help="student, teacher; by default both.")] = None,
    seeds: Annotated[int, typer.Option(help="Conversations per problem and role.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 1,
    max_turns: Annotated[int, typer.Option(help="Answers per conversation.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers.", min=0.0)] = 0.7,
    concurrent: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 8,
    measure_only: Annotated[bool, typer.Option(help="One answer each, as side turns: nothing is learned.")] = False,
    patience_seconds: Annotated[float, typer.Option(help="How long to wait for an endpoint that is away.")] = 300.0,
    report: Annotated[Path | None, typer.Option(help="Where to write everything as JSON.")] = None,
) -> None:
    """Hold the homework conversations and score them against ground truth."""
    console = Console(stderr=True)
    effort = Effort(seeds, seed, max_turns, max_tokens, temperature, concurrent, measure_only)
    try:
        planned = assignments(load_problems(problems, limit), role or list(Role))
        client = ChatClient(endpoint, api_key=api_key, model=model, patience_seconds=patience_seconds)
        results, failures = asyncio.run(hold_all(client, planned, effort, console))
    except ClawstreamError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)
    if failures:
        console.print(f"{len(failures)} conversations failed, the first: {failures[0]}", style="red", markup=False)
    if not results:
        sys.exit(1)
    table = summarise(results, seed)
    print_table(Console(), table, len(planned), seeds)
    if report is not None:
        document = {
            "settings": {**asdict(effort), "problems": problems.name},
            "summary": {
                role: {name: estimate and asdict(estimate) for name, estimate in rows.items()}
                for role, rows in table.items()
            },
            "failures": failures,
            "conversations": [asdict(result) for result in results],
        }
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        console.print(f"wrote {os.path.relpath(report)}")


async def hold_all(
    client: ChatClient, planned: Sequence[Assignment], effort: Effort, console: Console
) -> tuple[list[ConversationResult], list[str]]:
    """All conversations, `concurrent` at a time, with a line that shows how far they are; and what failed, in words."""
    slots = asyncio.Semaphore(effort.concurrent)
    total = len(planned) * effort.seeds
    with ProgressDisplay(console, SystemClock(), total=total, unit="conversations") as display:
        display.describe("homework")
        results: list[ConversationResult] = []
        failures: list[str] = []

        async def one(assignment: Assignment, seed: int) -> None:
            async with slots:
                try:
                    result = await converse(
                        client,
                        assignment,
                        max_turns=effort.max_turns,
                        max_tokens=effort.max_tokens,
                        temperature=effort.temperature,
                        seed=seed * _SEED_STRIDE,
                        measure_only=effort.measure_only,
                    )
                    results.append(result)
                except EngineError as error:
                    failures.append(f"{assignment.role.value}, {assignment.problem.question[:60]!r}: {error}")
            display.advance()

        numbers = range(effort.first_seed, effort.first_seed + effort.seeds)
        async with client:
            await asyncio.gather(*(one(each, number) for number in numbers for each in planned))
        return results, failures


def summarise(results: Sequence[ConversationResult], seed: int) -> dict[Role, dict[str, Estimate | None]]:
    """Per role the share of conversations of which something is true, with its interval over problems."""
    table: dict[Role, dict[str, Estimate | None]] = {}
    for role in Role:
        of_role = [result for result in results if result.role is role]
        questions = list(dict.fromkeys(result.question for result in of_role))
        if not questions:
            continue
        bootstrap = Bootstrap(len(questions), resamples=_RESAMPLES, confidence=_CONFIDENCE, seed=seed)
        groups = [[result for result in of_role if result.question == question] for question in questions]
        table[role] = {
            name: bootstrap.mean([sum(map(holds, group)) / len(group) for group in groups]) for name, holds in _ROWS
        }
    return table


def print_table(
    console: Console, summary: dict[Role, dict[str, Estimate | None]], conversations: int, seeds: int
) -> None:
    """One row per share."""
    table = Table(title=f"{conversations} conversations, {seeds} seeds; {_CONFIDENCE:.0%} {METHOD}")
    table.add_column("")
    for role in summary:
        table.add_column(role.value, justify="right")
    for name, _ in _ROWS:
        estimates = [rows[name] for rows in summary.values()]
        table.add_row(name, *(f"{e.mean:.0%} [{e.low:.0%}, {e.high:.0%}]" if e is not None else "-" for e in estimates))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
