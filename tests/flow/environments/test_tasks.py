"""Every shipped task: its known solution passes its verifier, and doing nothing or having nothing does not."""

import pytest

from clawstream.errors import SettingsError
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.sandbox import Isolation, open_sandbox
from examples.environments.terminal.task import Task, load_tasks

TASKS = load_tasks()


def test_there_are_tasks_enough() -> None:
    assert len(TASKS) >= 8


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
async def test_the_verifier_tells_solved_from_not_solved(task: Task) -> None:
    # The shipped commands are our own, so that limits are enough and any machine can run this.
    with open_sandbox(Isolation.LIMITS_ONLY, Limits()) as empty:
        assert (await empty.run(task.verifier)).exit_code != 0, "an empty folder passes"
    with open_sandbox(Isolation.LIMITS_ONLY, Limits()) as sandbox:
        task.set_up(sandbox)
        assert (await sandbox.run(task.verifier)).exit_code != 0, "passes before anything was done"
        solved = await sandbox.run(task.solution)
        assert solved.exit_code == 0, solved.report
        verified = await sandbox.run(task.verifier)
        assert verified.exit_code == 0, verified.report


def test_tasks_are_chosen_by_name_and_wrong_files_are_named(tmp_path: object) -> None:
    assert [task.name for task in load_tasks(names=["find_todo", "count_errors"])] == ["count_errors", "find_todo"]
    with pytest.raises(SettingsError, match="no task nonsense; there are change_port"):
        load_tasks(names=["nonsense"])


@pytest.mark.parametrize(
    ("content", "message"),
    [("instruction = 'x'\nverifier = 'true'", "solution"), ("instruction = ", "bad.toml"), ("colour = 1", "colour")],
)
def test_a_wrong_task_file_is_refused_with_its_field(
    content: str, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("tasks")
    (directory / "bad.toml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        load_tasks(directory)
