"""What a single step was worth, apart from how the rollout ends. Optional: `--step-judge package.module:name`.

A step judge is a coroutine function from the task, the command and its result to a number from -1 to 1, or None for no
opinion. `exit_codes` is an example; one that asks a model looks the same.
"""

from collections.abc import Awaitable, Callable
from importlib import import_module

from clawstream.errors import SettingsError
from examples.environments.terminal.sandbox import CommandResult
from examples.environments.terminal.task import Task

StepJudge = Callable[[Task, str | None, CommandResult | None], Awaitable[float | None]]
"""(task, command, result); both are None when the answer held no command."""


async def exit_codes(task: Task, command: str | None, result: CommandResult | None) -> float | None:
    """-1 for an answer without a command or a killed one, -0.5 for a failed one, else no opinion."""
    if result is None or result.timed_out or result.flooded:
        return -1.0
    return -0.5 if result.exit_code != 0 else None


def load_step_judge(path: str) -> StepJudge:
    """By import path `package.module:name`. Raises SettingsError."""
    module, _, name = path.partition(":")
    try:
        judge = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"step judge {path!r}: {error}; it must be package.module:name") from error
    if not callable(judge):
        raise SettingsError(f"step judge {path!r} cannot be called")
    return judge  # pyright: ignore[reportReturnType] - what a user names can only be checked by calling it
