"""Groups of real attempts, trained: SmolLM2 gives commands, the sandbox runs them, the verifier decides, and the
trainer compares the attempts at a task with each other."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawstream.chat_client import ChatClient
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.rollout import RolloutOptions, RolloutResult
from examples.environments.terminal.run import plan_rollouts, run_all
from examples.environments.terminal.sandbox import Isolation
from examples.environments.terminal.task import Task
from services.trainer.batch_archive import read_batch
from tests.fixtures.system import RunningSystem, wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.model, pytest.mark.slow]

ROLLOUTS = 4
GROUPS = 3
# What a model of 135M parameters does sometimes, and sometimes not.
TASK = Task(
    name="make_file",
    instruction="Create an empty file called done.txt. The command for it is: touch done.txt",
    verifier="test -f done.txt",
    solution="touch done.txt",
)


def test_attempts_at_a_task_are_trained_against_one_another(
    start_system: Callable[..., RunningSystem], smollm2_directory: Path, isolation: Isolation
) -> None:
    system = start_system(
        model=smollm2_directory,
        batch_size=1,
        workers=("judge", "teacher", "trainer"),
        trainer=f'advantage = {{ mode = "group", group_size = {ROLLOUTS} }}',
    )
    options = RolloutOptions(
        max_steps=2,
        max_tokens=40,
        temperature=1.0,
        use_tool=False,
        isolation=isolation,
        limits=Limits(),
        step_judge=None,
    )
    plans = plan_rollouts([TASK], rollouts=ROLLOUTS, repetitions=GROUPS, run_id="attempt", seed=1)

    async def run() -> list[Any]:
        url = f"http://127.0.0.1:{system.layout.gateways[0]}/v1"
        async with ChatClient(url, api_key="unused", model="tiny", patience_seconds=120) as client:
            return await run_all(client, plans, options, concurrent=ROLLOUTS, on_end=lambda result: None)

    results = asyncio.run(run())
    assert all(isinstance(result, RolloutResult) for result in results), results
    outcome = {result.rollout_id: 1.0 if result.solved else -1.0 for result in results}
    turns = {turn["turn_id"]: turn for turn in system.events("turns.v1")}
    trainable = {turn_id for turn_id, turn in turns.items() if turn["trainable"]}
    assert len(turns) == sum(result.steps for result in results)

    def steps() -> list[dict[str, Any]] | None:
        found = system.events("train-steps.v1")
        settled = {one["turn_id"] for step in found for one in step["samples"] + step["drops"]}
        return found if settled >= trainable else None

    found = wait_for(steps, "every trainable turn is in a step, trained or dropped")

    # The reference, from the outcomes alone: attempts that took a step, compared at that step.
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn_id in trainable:
        position = turns[turn_id]["rollout"]
        rewards[position["group_id"], position["step_index"]].append(outcome[position["rollout_id"]])

    def expected(turn_id: str) -> float | None:
        position = turns[turn_id]["rollout"]
        values = rewards[position["group_id"], position["step_index"]]
        mean = math.fsum(values) / len(values)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        reward = outcome[position["rollout_id"]]
        return reward if len(values) == 1 else None if deviation == 0 else (reward - mean) / (deviation + 1e-6)

    trained = {one["turn_id"]: (step, one) for step in found for one in step["samples"]}
    dropped = {
        one["turn_id"]: one["reason"] for step in found for one in step["drops"] if one["reason"] != "superseded"
    }
    mixed = {
        plan.group_id
        for plan in plans
        if len({outcome[p.rollout_id] for p in plans if p.group_id == plan.group_id}) == 2
    }
    assert mixed, f"no group of {ROLLOUTS} had both outcomes: {outcome}"
    assert set(trained) == {turn_id for turn_id in trainable if expected(turn_id) is not None}
    assert {turn_id for turn_id, reason in dropped.items() if reason == "zero_advantage"} == trainable - set(trained)
    for turn_id, (_, sample) in trained.items():
        assert sample["reward"] == outcome[turns[turn_id]["rollout"]["rollout_id"]]
        assert sample["advantage"] == pytest.approx(expected(turn_id), abs=1e-6)
    for group in mixed:  # together: a group is never torn apart
        of_group = {
            step["step"] for turn_id, (step, _) in trained.items() if turns[turn_id]["rollout"]["group_id"] == group
        }
        assert len(of_group) == 1, (group, of_group)

    # And what the optimizer saw is what the log says.
    for step in found:
        if step["samples"]:
            assert step["weight_version"] is not None, step["unchanged_reason"]
            archived = read_batch(Path(step["batch_uri"].removeprefix("file://")), step["batch_sha256"])
            assert [one.advantage for one in archived] == pytest.approx([one["advantage"] for one in step["samples"]])
