"""`python -m examples.environments.terminal`: see docs/environments.md."""

import asyncio
import os
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer

from clawstream.chat_client import ChatClient
from clawstream.cli.terminal import errors, output
from clawstream.errors import ClawstreamError
from clawstream.interruption import terminated_like_interrupted
from examples.environments.terminal.console import GatewayAway, print_reasons, print_table, run_shown
from examples.environments.terminal.limits import MEGABYTE, Limits
from examples.environments.terminal.rollout import RolloutOptions, RolloutResult
from examples.environments.terminal.run import FailedRollout, plan_rollouts, summarise
from examples.environments.terminal.sandbox import choose_isolation
from examples.environments.terminal.step_judge import load_step_judge
from examples.environments.terminal.task import TASKS_DIRECTORY, load_tasks

DEFAULTS = Limits()
"""Unless the command line says otherwise."""
_EXIT_CODE_INTERRUPTED = 130
"""As shells have it: 128 and SIGINT's number."""


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
    is_interrupted = False
    try:
        isolation, in_words = asyncio.run(choose_isolation(allow_unsandboxed=allow_unsandboxed))
        errors.print(f"Sandbox: {in_words}")
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
        waiting = GatewayAway(errors, patience_seconds)
        client = ChatClient(
            gateway, api_key=api_key, model=model, patience_seconds=patience_seconds, on_wait=waiting.note
        )
        results: list[RolloutResult | FailedRollout] = []
        try:
            with terminated_like_interrupted():
                asyncio.run(run_shown(client, plans, options, concurrent, errors, waiting, results))
        except KeyboardInterrupt:
            errors.print(f"interrupted: {len(plans) - len(results)} of {len(plans)} attempts have no outcome")
            is_interrupted = True
    except ClawstreamError as error:
        errors.print(str(error), style="red", markup=False)
        sys.exit(1)
    summaries = summarise(results)
    print_table(output, summaries)
    failed = [result for result in results if isinstance(result, FailedRollout)]
    print_reasons(errors, "without an outcome", [one.error for one in failed])
    refused = [one.detail for one in results if isinstance(one, RolloutResult) and one.ended_by == "refused"]
    print_reasons(errors, "ended by what the gateway refused", refused)
    if report is not None:
        document = {
            "isolation": isolation,
            "seed": seed,
            "is_interrupted": is_interrupted,
            "tasks": [{**asdict(summary), "pass_rate": summary.pass_rate} for summary in summaries],
            "rollouts": [asdict(result) for result in results],
        }
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        errors.print(f"wrote {os.path.relpath(report)}")
    if is_interrupted:
        sys.exit(_EXIT_CODE_INTERRUPTED)
    if not any(isinstance(result, RolloutResult) and result.steps for result in results):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
