"""The agent's loop through the gateway's real surface, with scripted answers of the engine."""

import io
import re
import runpy
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from clawstream.chat_client import ChatAnswer, ChatClient
from examples.environments.terminal.agent import NO_COMMAND, Move, read_move, result_messages
from examples.environments.terminal.console import GatewayAway, print_reasons, run_shown
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.rollout import RolloutOptions, RolloutResult, run_rollout
from examples.environments.terminal.run import FailedRollout, plan_rollouts, run_all, summarise
from examples.environments.terminal.sandbox import Isolation
from examples.environments.terminal.step_judge import exit_codes, load_step_judge
from examples.environments.terminal.task import Task
from tests.fixtures.gateway_app import GatewayUnderTest
from tests.fixtures.stub_engine import StubAnswer

TASK = Task(name="make-a", instruction="Write hi to a.txt.", verifier="grep -qx hi a.txt", solution="echo hi > a.txt")
OPTIONS = RolloutOptions(
    max_steps=4,
    max_tokens=128,
    temperature=1.0,
    use_tool=False,
    isolation=Isolation.LIMITS_ONLY,
    limits=Limits(),
    step_judge=exit_codes,
)


def said(text: str) -> ChatAnswer:
    return ChatAnswer({"role": "assistant", "content": text}, "stop", 1)


def called(*calls: tuple[str, str]) -> ChatAnswer:
    tool_calls = [{"id": name, "function": {"name": "run_command", "arguments": given}} for name, given in calls]
    return ChatAnswer({"role": "assistant", "tool_calls": tool_calls}, "tool_calls", 1)


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        (said("I look.\n```bash\nls -l\n```\nDONE"), Move("ls -l", False)),
        (said("```\necho a\necho b\n```"), Move("echo a\necho b", False)),
        (said("```sh\n$ ls\n```"), Move("ls", False)),
        (said("```bash\ncut off"), Move("cut off", False)),
        (said("```bash\nls\n```\n```bash\nrm a\n```"), Move("ls", False)),
        (said("```python\nprint(1)\n```"), Move(None, False)),
        (said("```bash\n\n```"), Move(None, False)),
        (said("DONE"), Move(None, True)),
        (said("All is well.\n**DONE.**"), Move(None, True)),
        (said("I have DONE nothing"), Move(None, False)),
        (said(""), Move(None, False)),
        (called(("c1", '{"command": "ls"}')), Move("ls", False, "c1")),
        (called(("c1", "broken"), ("c2", '{"command": "ls"}')), Move("ls", False, "c2", ("c1",))),
        (called(("c1", '{"command": 5}')), Move(None, False, "c1")),
    ],
)
def test_what_an_answer_means(answer: ChatAnswer, move: Move) -> None:
    assert read_move(answer) == move


def test_every_tool_call_is_answered() -> None:
    messages = result_messages(Move("ls", False, "c2", ("c1",)), "exit code 0")
    assert {message["tool_call_id"] for message in messages} == {"c1", "c2"}
    assert result_messages(Move("ls", False), "exit code 0") == [{"role": "user", "content": "exit code 0"}]


def client_of(gateway: GatewayUnderTest, patience_seconds: float = 0.0) -> ChatClient:
    return ChatClient(f"{gateway.base_url}/v1", api_key="unused", model="policy", patience_seconds=patience_seconds)


def script(gateway: GatewayUnderTest, *texts: str) -> None:
    for text in texts:
        ids = [*gateway.renderer.encode(text), gateway.renderer.stop_token_ids[0]]
        gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "stop", "matched": ids[-1]}))


async def test_a_solved_task_from_its_instruction_to_its_outcome(gateway: GatewayUnderTest) -> None:
    script(gateway, "I think.", "```bash\ncat a.txt\n```", "```bash\necho hi > a.txt\n```", "DONE")
    (plan,) = plan_rollouts([TASK], rollouts=1, repetitions=1, run_id="run", seed=5)
    async with client_of(gateway) as client:
        result = await run_rollout(client, plan, OPTIONS)

    assert (result.solved, result.ended_by, result.steps, result.commands) == (True, "done", 4, 2)
    assert result.failed_commands == 1
    assert result.recorded_turns == 4
    (outcome,) = gateway.conversations.outcomes
    assert (outcome.score, outcome.source, outcome.steps) == (1.0, "verifier", 4)
    assert outcome.step_scores == {0: -1.0, 1: -0.5}
    positions = [turn.rollout for turn in gateway.conversations.turns]
    assert [one.step_index for one in positions if one] == [0, 1, 2, 3]
    assert {(one.task_id, one.group_id, one.rollout_id) for one in positions if one} == {
        ("make-a", "run/make-a/0", "run/make-a/0/0")
    }
    assert {request.session_header for request in gateway.conversations.placed} == {"run/make-a/0/0"}
    history = list(gateway.conversations.placed[-1].messages)
    assert [message["role"] for message in history] == ["system", "user"] + ["assistant", "user"] * 3
    assert history[3]["content"] == NO_COMMAND
    assert re.match(r"exit code 1\ncat: .*No such file", str(history[5]["content"]))
    assert history[7]["content"] == "exit code 0\n(no output)"
    seeds = [request["sampling_params"]["sampling_seed"] for request in gateway.engine.requests]
    assert seeds == [plan.seed + step for step in range(4)]


async def test_an_unsolved_task_ends_after_its_steps(gateway: GatewayUnderTest) -> None:
    script(gateway, *["```bash\necho ho > a.txt\n```"] * 2)
    (plan,) = plan_rollouts([TASK], rollouts=1, repetitions=1, run_id="run", seed=5)
    async with client_of(gateway) as client:
        result = await run_rollout(client, plan, replace(OPTIONS, max_steps=2, step_judge=None))
    assert (result.solved, result.ended_by, result.steps) == (False, "max_steps", 2)
    (outcome,) = gateway.conversations.outcomes
    assert (outcome.score, outcome.step_scores) == (-1.0, {})


async def test_what_the_gateway_refuses_ends_the_attempt_with_its_outcome(gateway: GatewayUnderTest) -> None:
    script(gateway, "```bash\necho hi > a.txt; seq 1 3000\n```")
    (plan,) = plan_rollouts([TASK], rollouts=1, repetitions=1, run_id="run", seed=5)
    async with client_of(gateway) as client:
        result = await run_rollout(client, plan, OPTIONS)
    assert (result.solved, result.ended_by, result.steps) == (True, "refused", 1)
    assert "context" in result.detail
    assert [outcome.score for outcome in gateway.conversations.outcomes] == [1.0]


async def test_a_gateway_that_stays_away_gives_no_outcome(gateway: GatewayUnderTest) -> None:
    gateway.router.closed = True
    plans = plan_rollouts([TASK], rollouts=2, repetitions=1, run_id="run", seed=5)
    heard: list[Any] = []
    async with client_of(gateway) as client:
        results = await run_all(client, plans, OPTIONS, concurrent=2, on_end=heard.append)
    assert all(isinstance(result, FailedRollout) and "503" in result.error for result in results)
    assert len(heard) == 2
    assert gateway.conversations.outcomes == []
    (of_task, of_all) = summarise(results)
    assert (of_task.attempts, of_all.without_outcome, of_all.pass_rate) == (0, 2, 0.0)


async def test_what_is_left_is_not_begun_once_the_gateway_stays_away(gateway: GatewayUnderTest) -> None:
    gateway.router.closed = True
    plans = plan_rollouts([TASK], rollouts=5, repetitions=1, run_id="run", seed=5)
    async with client_of(gateway) as client:
        results = await run_all(client, plans, OPTIONS, concurrent=2, on_end=lambda result: None)
    errors = [result.error for result in results if isinstance(result, FailedRollout)]
    assert ["503" in error for error in errors] == [True, True, False, False, False]
    assert all("not begun" in error for error in errors[2:])


async def test_a_gateway_that_comes_back_is_heard_of(gateway: GatewayUnderTest) -> None:
    script(gateway, *["```bash\necho ho > a.txt\n```"] * 4)
    plans = plan_rollouts([TASK], rollouts=2, repetitions=1, run_id="run", seed=5)
    waited_for: list[str] = []
    answered: list[str] = []

    async def sleep(seconds: float) -> None:
        gateway.router.closed = False

    gateway.router.closed = True
    url = f"{gateway.base_url}/v1"
    async with ChatClient(
        url,
        api_key="unused",
        model="policy",
        patience_seconds=60,
        sleep=sleep,
        on_wait=lambda problem: waited_for.append(str(problem)),
    ) as client:
        results = await run_all(
            client,
            plans,
            replace(OPTIONS, max_steps=2),
            concurrent=1,
            on_end=lambda result: None,
            on_answer=lambda rollout_id, tokens: answered.append(rollout_id),
        )
    assert all(isinstance(result, RolloutResult) for result in results)
    assert ["503" in problem for problem in waited_for] == [True]
    assert answered == [plan.rollout_id for plan in plans for _ in range(2)]


async def test_what_the_gateway_refuses_is_told_with_its_reason(gateway: GatewayUnderTest) -> None:
    plans = plan_rollouts([TASK], rollouts=2, repetitions=1, run_id="run", seed=5)
    said = io.StringIO()
    console = Console(file=said, width=400)
    client = ChatClient(f"{gateway.base_url}/v1", api_key="unused", model="another", patience_seconds=0)
    results: list[Any] = []
    await run_shown(client, plans, OPTIONS, 2, console, GatewayAway(console, 0), results)
    print_reasons(console, "refused", [one.detail for one in results if isinstance(one, RolloutResult)])
    assert re.search(r"2 attempts refused: .*404.*another", said.getvalue())


@pytest.mark.parametrize("module", ["examples.environments.terminal", "examples.homework"])
def test_the_command_tells_of_a_gateway_that_is_away(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = {"examples.homework": "--endpoint"}.get(module, "--gateway")
    arguments = [module, address, "http://127.0.0.1:9/v1", "--patience-seconds", "0"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--allow-unsandboxed"] if address == "--gateway" else arguments)
    with pytest.raises(SystemExit) as ended:  # what `python -m` does, without another interpreter
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert "127.0.0.1:9" in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_plans_are_grouped_and_their_seeds_repeat() -> None:
    plans = plan_rollouts([TASK], rollouts=3, repetitions=2, run_id="one", seed=5)
    assert [plan.rollout_id for plan in plans][:4] == [f"one/make-a/0/{n}" for n in range(3)] + ["one/make-a/1/0"]
    assert len({plan.group_id for plan in plans}) == 2
    assert len({plan.seed for plan in plans}) == 6
    again = plan_rollouts([TASK], rollouts=3, repetitions=2, run_id="two", seed=5)
    other = plan_rollouts([TASK], rollouts=3, repetitions=2, run_id="one", seed=6)
    assert [plan.seed for plan in again] == [plan.seed for plan in plans]
    assert not {plan.seed for plan in other} & {plan.seed for plan in plans}


def test_the_summary_counts_by_task() -> None:
    def result(task: str, solved: bool, steps: int) -> RolloutResult:
        return RolloutResult(task, "r", "g", 0, solved=solved, steps=steps, tokens=10 * steps, recorded_turns=steps)

    summaries = summarise([result("b", True, 2), result("a", False, 4), result("b", False, 3), result("b", True, 4)])
    assert [(one.task, one.attempts, one.solved) for one in summaries] == [("a", 1, 0), ("b", 3, 2), ("all", 4, 2)]
    assert summaries[1].mean_steps == 3.0
    assert summaries[2].recorded_turns == 13
    assert summaries[2].pass_rate == 0.5


async def test_a_step_judge_of_ones_own_is_loaded_by_its_path() -> None:
    assert load_step_judge("examples.environments.terminal.step_judge:exit_codes") is exit_codes
    with pytest.raises(ValueError, match=r"package\.module:name"):
        load_step_judge("no.such.module:name")
