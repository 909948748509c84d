"""What people see of many attempts: how far they are, how they went, and why some did not end."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from clawstream.chat_client import ChatClient
from clawstream.clock import SystemClock
from clawstream.durations import duration
from clawstream.errors import EngineUnavailable
from clawstream.progress_display import ProgressDisplay
from examples.environments.terminal.rollout import RolloutOptions, RolloutPlan, RolloutResult
from examples.environments.terminal.run import FailedRollout, TaskSummary, run_all


class GatewayAway:
    """Says once, and once again after each answer, that the gateway is waited for."""

    def __init__(self, console: Console, patience_seconds: float) -> None:
        self._console = console
        self._patience_seconds = patience_seconds
        self._is_away = False

    def note(self, problem: EngineUnavailable) -> None:
        """It does not answer now."""
        if not self._is_away:
            patience = duration(self._patience_seconds)
            self._console.print(f"waiting up to {patience} for the gateway: {problem}", style="yellow", markup=False)
        self._is_away = True

    def answered(self) -> None:
        """It does."""
        self._is_away = False


async def run_shown(
    client: ChatClient,
    plans: Sequence[RolloutPlan],
    options: RolloutOptions,
    concurrent: int,
    console: Console,
    waiting: GatewayAway,
    results: list[RolloutResult | FailedRollout],
) -> None:
    """All attempts, with a line that shows how far they are; an attempt is as far as its answers are of `max_steps`.

    `results` gets each one as it ends: what there is when the run is interrupted.
    """
    clock = SystemClock()
    began_at_seconds = clock.monotonic_seconds()
    answers: Counter[str] = Counter()
    solved = tokens = 0
    with ProgressDisplay(console, clock, total=len(plans), unit="rollouts") as display:
        display.describe("terminal tasks")

        def say() -> None:
            seconds = max(clock.monotonic_seconds() - began_at_seconds, 1e-9)
            display.detail = (
                f"{solved} of {len(results)} solved, {answers.total()} answers, {tokens / seconds:.0f} tokens/s"
            )

        def on_answer(rollout_id: str, new_tokens: int) -> None:
            nonlocal tokens
            waiting.answered()
            tokens += new_tokens
            answers[rollout_id] += 1
            say()
            display.advance(1 / options.max_steps)

        def on_end(result: RolloutResult | FailedRollout) -> None:
            nonlocal solved
            results.append(result)
            solved += isinstance(result, RolloutResult) and result.solved
            say()
            display.advance(1 - answers[result.rollout_id] / options.max_steps)

        async with client:
            await run_all(client, plans, options, concurrent=concurrent, on_end=on_end, on_answer=on_answer)


def print_reasons(console: Console, what: str, reasons: Sequence[str]) -> None:
    """How many attempts, and why: the commonest first."""
    for reason, count in Counter(reasons).most_common(5):
        attempts = "1 attempt" if count == 1 else f"{count} attempts"
        console.print(f"{attempts} {what}: {reason}", style="red", markup=False)


def print_table(console: Console, summaries: Sequence[TaskSummary]) -> None:
    """One row per task."""
    table = Table(title="Terminal tasks")
    table.add_column("task")
    for column in ("attempts", "solved", "pass rate", "steps", "tokens", "failed commands", "turns on the log"):
        table.add_column(column, justify="right")
    shows_lost = any(summary.without_outcome for summary in summaries)
    if shows_lost:
        table.add_column("without outcome", justify="right")
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
            *([str(summary.without_outcome)] if shows_lost else []),
        )
    console.print(table)
