"""Many attempts at many tasks: how they are numbered, run at a time, and summed up."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clawstream.chat_client import ChatClient
from clawstream.errors import EngineError, EngineUnavailable, SandboxError
from examples.environments.terminal.rollout import RolloutOptions, RolloutPlan, RolloutResult, run_rollout
from examples.environments.terminal.task import Task

_SEED_BITS = 31
_NOT_BEGUN = "not begun: the gateway stayed away"


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """An attempt that could not be brought to an end: it has no outcome."""

    task: str
    rollout_id: str
    error: str


def plan_rollouts(
    tasks: Sequence[Task], *, rollouts: int, repetitions: int, run_id: str, seed: int
) -> list[RolloutPlan]:
    """`rollouts` attempts per task make a group; `repetitions` groups per task. The same `seed` gives the same seeds.

    Attempts at one task follow each other, so that a group is complete early; all ids begin with `run_id`.
    """
    plans: list[RolloutPlan] = []
    for repetition in range(repetitions):
        for task in tasks:
            group = f"{run_id}/{task.name}/{repetition}"
            for number in range(rollouts):
                cause = f"{seed}/{task.name}/{repetition}/{number}"
                digest = int.from_bytes(hashlib.sha256(cause.encode()).digest()[:8], "big")
                plans.append(RolloutPlan(task, group, f"{group}/{number}", digest % 2**_SEED_BITS))
    return plans


async def run_all(
    client: ChatClient,
    plans: Sequence[RolloutPlan],
    options: RolloutOptions,
    *,
    concurrent: int,
    on_end: Callable[[RolloutResult | FailedRollout], None],
    on_answer: Callable[[str, int], None] = lambda rollout_id, tokens: None,
) -> list[RolloutResult | FailedRollout]:
    """Runs all plans, `concurrent` at a time, in order. `on_end` hears of each as it ends, `on_answer` of each answer.

    When as many attempts in a row as run at a time found the gateway away, for as long as the client is patient, the
    rest is not begun.
    """
    slots = asyncio.Semaphore(concurrent)
    unanswered = 0

    async def one(plan: RolloutPlan) -> RolloutResult | FailedRollout:
        nonlocal unanswered

        def answered(tokens: int) -> None:
            nonlocal unanswered
            unanswered = 0
            on_answer(plan.rollout_id, tokens)

        async with slots:
            if unanswered >= concurrent:
                ended: RolloutResult | FailedRollout = FailedRollout(plan.task.name, plan.rollout_id, _NOT_BEGUN)
            else:
                try:
                    ended = await run_rollout(client, plan, options, on_answer=answered)
                except (EngineError, SandboxError) as error:
                    unanswered += isinstance(error, EngineUnavailable)
                    ended = FailedRollout(plan.task.name, plan.rollout_id, str(error))
        on_end(ended)
        return ended

    return await asyncio.gather(*(one(plan) for plan in plans))


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """All attempts at one task, or at all of them."""

    task: str
    attempts: int
    solved: int
    mean_steps: float
    mean_tokens: float
    failed_commands: int
    commands: int
    recorded_turns: int
    without_outcome: int
    """Attempts that could not be brought to an end."""

    @property
    def pass_rate(self) -> float:
        """Share of solved among the attempts that ended."""
        return self.solved / self.attempts if self.attempts else 0.0


def summarise(results: Sequence[RolloutResult | FailedRollout]) -> list[TaskSummary]:
    """One per task, in order of name, and one over all of them, named `all`."""
    names = sorted({result.task for result in results})
    return [*(_summary(name, [one for one in results if one.task == name]) for name in names), _summary("all", results)]


def _summary(name: str, results: Sequence[RolloutResult | FailedRollout]) -> TaskSummary:
    ended = [result for result in results if isinstance(result, RolloutResult)]
    count = max(len(ended), 1)
    return TaskSummary(
        task=name,
        attempts=len(ended),
        solved=sum(one.solved for one in ended),
        mean_steps=sum(one.steps for one in ended) / count,
        mean_tokens=sum(one.tokens for one in ended) / count,
        failed_commands=sum(one.failed_commands for one in ended),
        commands=sum(one.commands for one in ended),
        recorded_turns=sum(one.recorded_turns for one in ended),
        without_outcome=len(results) - len(ended),
    )
