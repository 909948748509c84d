"""A task: one TOML file with an instruction, files to begin with, and a verifier. Adding a task is adding a file."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawstream.errors import SettingsError
from examples.environments.terminal.sandbox import Sandbox

TASKS_DIRECTORY = Path(__file__).with_name("tasks")


class TaskFile(BaseModel):
    """A file that is there when the policy begins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    """Its path in the folder."""
    content: str
    """Its text. A first line break is left out, and a last one added, as text files have it."""
    executable: bool = False
    """Whether it may be run."""

    @property
    def text(self) -> str:
        """What is written."""
        text = self.content.removeprefix("\n")
        return text if text.endswith("\n") or not text else f"{text}\n"


class Task(BaseModel):
    """See the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The name of its file: `X-Task-Id`."""
    instruction: str = Field(min_length=1)
    """What the policy is told."""
    verifier: str = Field(min_length=1)
    """A command that ends with 0 exactly when the task is solved. Runs in the folder, in the sandbox."""
    solution: str = Field(min_length=1)
    """Commands that solve it. Only tests run them; the policy never sees them."""
    files: tuple[TaskFile, ...] = ()
    """What is there at the beginning."""

    def set_up(self, sandbox: Sandbox) -> None:
        """Writes the files. Raises SandboxError for a name that leads out of the folder."""
        for file in self.files:
            sandbox.write(file.name, file.text, executable=file.executable)


def load_tasks(directory: Path = TASKS_DIRECTORY, names: Sequence[str] = ()) -> list[Task]:
    """All tasks of a directory, or those with these names, sorted. Raises SettingsError naming file and field."""
    tasks = {file.stem: _load(file) for file in sorted(directory.glob("*.toml"))}
    unknown = sorted(set(names) - set(tasks))
    if unknown or not tasks:
        raise SettingsError(f"{directory}: no task {', '.join(unknown) or 'at all'}; there are {', '.join(tasks)}")
    return [task for name, task in tasks.items() if not names or name in names]


def _load(file: Path) -> Task:
    try:
        return Task.model_validate({**tomllib.loads(file.read_text(encoding="utf-8")), "name": file.stem})
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise SettingsError(f"{file}: {error}") from error
