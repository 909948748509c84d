"""One attempt at one task: the policy gives commands, the sandbox runs them, the verifier decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from clawstream.chat_client import ChatAnswer, ChatClient
from clawstream.errors import EngineRejected
from examples.environments.gateway_client import Step, is_recorded, post_outcome
from examples.environments.terminal.agent import (
    NO_COMMAND,
    SYSTEM,
    SYSTEM_WITH_TOOL,
    TOOL,
    Move,
    read_move,
    result_messages,
)
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.sandbox import CommandResult, Isolation, Sandbox, open_sandbox
from examples.environments.terminal.step_judge import StepJudge
from examples.environments.terminal.task import Task

SOLVED: Final = 1.0
FAILED: Final = -1.0
VERIFIER: Final = "verifier"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One attempt."""

    task: Task
    group_id: str
    rollout_id: str
    seed: int
    """Of the policy's random numbers; every step adds its index."""


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What all attempts have in common."""

    max_steps: int
    max_tokens: int
    """Of one answer."""
    temperature: float | None
    """None leaves it to the gateway."""
    use_tool: bool
    """Commands as tool calls instead of code blocks."""
    isolation: Isolation
    limits: Limits
    step_judge: StepJudge | None


@dataclass(slots=True)
class RolloutResult:
    """How an attempt went."""

    task: str
    rollout_id: str
    group_id: str
    seed: int
    solved: bool = False
    """The verifier's exit code was 0."""
    ended_by: str = ""
    """`done`, `max_steps`, `refused` (by the gateway, for example a full context) or `folder_too_large`."""
    steps: int = 0
    """Answers of the policy."""
    recorded_turns: int = 0
    """Turns that learned of the outcome."""
    tokens: int = 0
    commands: int = 0
    failed_commands: int = 0
    step_scores: list[float | None] = field(default_factory=list[float | None])
    detail: str = ""
    """What the gateway refused, if it did."""


async def run_rollout(
    client: ChatClient,
    plan: RolloutPlan,
    options: RolloutOptions,
    *,
    on_answer: Callable[[int], None] = lambda tokens: None,
) -> RolloutResult:
    """Runs an attempt from its files to the outcome on the log. `on_answer` hears the tokens of each answer.

    Raises EngineUnavailable when the gateway stays away, and SandboxError; such an attempt has no outcome.
    """
    result = RolloutResult(plan.task.name, plan.rollout_id, plan.group_id, plan.seed)
    with open_sandbox(options.isolation, options.limits) as sandbox:
        plan.task.set_up(sandbox)
        unrecorded = await _act(client, plan, options, sandbox, result, on_answer)
        result.solved = (await sandbox.run(plan.task.verifier)).exit_code == 0
    recorded = result.steps - unrecorded
    if recorded > 0:
        result.recorded_turns = await post_outcome(
            client,
            plan.rollout_id,
            SOLVED if result.solved else FAILED,
            source=VERIFIER,
            steps=recorded,
            step_scores=result.step_scores,
        )
    return result


async def _act(
    client: ChatClient,
    plan: RolloutPlan,
    options: RolloutOptions,
    sandbox: Sandbox,
    result: RolloutResult,
    on_answer: Callable[[int], None],
) -> int:
    """The loop of the agent. Returns how many turns are not on the log."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_WITH_TOOL if options.use_tool else SYSTEM},
        {"role": "user", "content": plan.task.instruction},
    ]
    unrecorded = 0
    result.ended_by = "max_steps"
    while result.steps < options.max_steps:
        try:
            answer = await _ask(client, messages, plan, options, result.steps)
        except EngineRejected as error:
            result.ended_by, result.detail = "refused", str(error)
            break
        result.steps += 1
        result.tokens += answer.tokens
        unrecorded += not is_recorded(answer)
        on_answer(answer.tokens)
        move = read_move(answer)
        ran = await sandbox.run(move.command) if move.command is not None else None
        result.commands += ran is not None
        result.failed_commands += ran is not None and ran.exit_code != 0
        result.step_scores.append(await _judge(plan.task, move, ran, options.step_judge))
        if move.done:
            result.ended_by = "done"
            break
        if sandbox.is_too_large():
            result.ended_by = "folder_too_large"
            break
        messages += [answer.message, *result_messages(move, ran.report if ran is not None else NO_COMMAND)]
    return unrecorded


async def _ask(
    client: ChatClient,
    messages: Sequence[Mapping[str, Any]],
    plan: RolloutPlan,
    options: RolloutOptions,
    index: int,
) -> ChatAnswer:
    step = Step(plan.task.name, plan.group_id, plan.rollout_id, index)
    sampling: dict[str, Any] = {"max_completion_tokens": options.max_tokens, "seed": plan.seed + index}
    if options.temperature is not None:
        sampling["temperature"] = options.temperature
    if options.use_tool:
        sampling["tools"] = [TOOL]
    return await client.chat(messages, headers=step.headers, **sampling)


async def _judge(task: Task, move: Move, ran: CommandResult | None, judge: StepJudge | None) -> float | None:
    if judge is None or move.done:
        return None
    return await judge(task, move.command, ran)
