"""`python -m examples.environments.terminal`: see docs/environments.md."""

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from clawstream.chat_client import ChatClient
from clawstream.errors import ClawstreamError
from examples.environments.terminal.limits import MEGABYTE, Limits
from examples.environments.terminal.rollout import RolloutOptions, RolloutPlan, RolloutResult
from examples.environments.terminal.run import FailedRollout, TaskSummary, plan_rollouts, run_all, summarise
from examples.environments.terminal.sandbox import choose_isolation
from examples.environments.terminal.step_judge import load_step_judge
from examples.environments.terminal.task import TASKS_DIRECTORY, load_tasks

DEFAULTS = Limits()
"""Unless the command line says otherwise."""


def main(
    gateway: Annotated[str, typer.Option(help="Its OpenAI endpoint.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="The model to ask for; by default the one there is.")] = None,
    api_key: Annotated[str, typer.Option(help="For the gateway.", envvar="OPENAI_API_KEY")] = "none-needed-on-loopback",
    tasks: Annotated[Path, typer.Option(help="A folder of task files.")] = TASKS_DIRECTORY,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be given several times.")] = None,
    rollouts: Annotated[int, typer.Option(help="Attempts per task: a group.", min=1)] = 4,
    repetitions: Annotated[int, typer.Option(help="Groups per task.", min=1)] = 1,
    concurrent: Annotated[int, typer.Option(help="Attempts at a time.", min=1)] = 8,
    max_steps: Annotated[int, typer.Option(help="Answers per attempt.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 256,
    temperature: Annotated[float | None, typer.Option(help="Of the policy; by default the gateway's.")] = None,
    use_tool: Annotated[bool, typer.Option(help="Commands as tool calls instead of code blocks.")] = False,
    step_judge: Annotated[str | None, typer.Option(help="package.module:name of a step judge.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Of one command.", min=0.1)] = DEFAULTS.timeout_seconds,
    memory_megabytes: Annotated[int, typer.Option(help="Of one process.", min=16)] = DEFAULTS.memory_bytes // MEGABYTE,
    allow_unsandboxed: Annotated[bool, typer.Option(help="Run commands even where they cannot be isolated.")] = False,
    patience_seconds: Annotated[float, typer.Option(help="How long to wait for a gateway that is away.")] = 300.0,
    seed: Annotated[int, typer.Option(help="The same seed asks with the same random numbers.")] = 0,
    run_id: Annotated[str | None, typer.Option(help="First part of all ids; by default a fresh one.")] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write everything as JSON.")] = None,
) -> None:
    """Let the policy solve terminal tasks in a sandbox, and tell the gateway how each attempt ended."""
    console = Console(stderr=True)
    try:
        isolation, in_words = asyncio.run(choose_isolation(allow_unsandboxed=allow_unsandboxed))
        console.print(f"Sandbox: {in_words}")
        options = RolloutOptions(
            max_steps=max_steps,
            max_tokens=max_tokens,
            temperature=temperature,
            use_tool=use_tool,
            isolation=isolation,
            limits=Limits(
                timeout_seconds=timeout_seconds,
                cpu_seconds=max(1, round(timeout_seconds)),
                memory_bytes=memory_megabytes * MEGABYTE,
            ),
            step_judge=load_step_judge(step_judge) if step_judge else None,
        )
        plans = plan_rollouts(
            load_tasks(tasks, task or ()),
            rollouts=rollouts,
            repetitions=repetitions,
            run_id=run_id or f"terminal-{uuid.uuid4().hex[:12]}",
            seed=seed,
        )
        client = ChatClient(gateway, api_key=api_key, model=model, patience_seconds=patience_seconds)
        results = asyncio.run(run(client, plans, options, concurrent, console))
    except ClawstreamError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)
    summaries = summarise(results)
    print_table(Console(), summaries)
    failed = [result for result in results if isinstance(result, FailedRollout)]
    for one in failed[:5]:
        console.print(f"{one.rollout_id}: {one.error}", style="red", markup=False)
    if report is not None:
        document = {
            "isolation": isolation,
            "seed": seed,
            "tasks": [{**asdict(summary), "pass_rate": summary.pass_rate} for summary in summaries],
            "rollouts": [asdict(result) for result in results],
        }
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        console.print(f"wrote {os.path.relpath(report)}")
    if len(failed) == len(results):
        sys.exit(1)


async def run(
    client: ChatClient, plans: Sequence[RolloutPlan], options: RolloutOptions, concurrent: int, console: Console
) -> list[RolloutResult | FailedRollout]:
    """All attempts, with a line that shows how far they are."""
    began, ended, solved, tokens = time.monotonic(), 0, 0, 0
    columns = (
        TextColumn("rollouts"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console) as progress:
        line = progress.add_task("rollouts", total=len(plans), detail="")

        def on_end(result: RolloutResult | FailedRollout) -> None:
            nonlocal ended, solved, tokens
            ended += 1
            if isinstance(result, RolloutResult):
                solved += result.solved
                tokens += result.tokens
            seconds = max(time.monotonic() - began, 1e-9)
            detail = f"{solved} of {ended} solved, {60 * ended / seconds:.1f} a minute, {tokens / seconds:.0f} tokens/s"
            progress.update(line, advance=1, detail=detail)

        async with client:
            return await run_all(client, plans, options, concurrent=concurrent, on_end=on_end)


def print_table(console: Console, summaries: Sequence[TaskSummary]) -> None:
    """One row per task."""
    table = Table(title="Terminal tasks")
    table.add_column("task")
    for column in ("attempts", "solved", "pass rate", "steps", "tokens", "failed commands", "turns on the log"):
        table.add_column(column, justify="right")
    for summary in summaries:
        if summary.task == "all":
            table.add_section()
        table.add_row(
            summary.task,
            str(summary.attempts),
            str(summary.solved),
            f"{summary.pass_rate:.0%}",
            f"{summary.mean_steps:.1f}",
            f"{summary.mean_tokens:.0f}",
            f"{summary.failed_commands}/{summary.commands}",
            str(summary.recorded_turns),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
