"""The terminal environment against the system without its trainer: rollouts, outcomes and samples on a real log."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from clawstream.chat_client import ChatClient
from examples.environments.terminal.limits import Limits
from examples.environments.terminal.rollout import RolloutOptions, RolloutResult
from examples.environments.terminal.run import plan_rollouts, run_all
from examples.environments.terminal.sandbox import Isolation
from examples.environments.terminal.step_judge import exit_codes
from examples.environments.terminal.task import load_tasks
from tests.fixtures.system import RunningSystem, wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 2
OPTIONS = RolloutOptions(
    max_steps=STEPS,
    max_tokens=8,
    temperature=1.0,
    use_tool=False,
    isolation=Isolation.LIMITS_ONLY,  # The tiny model speaks nonsense: no command of it is ever run.
    limits=Limits(),
    step_judge=exit_codes,
)


def test_every_turn_of_a_rollout_carries_its_place_and_learns_the_outcome(
    start_system: Callable[..., RunningSystem],
) -> None:
    system = start_system(workers=("judge", "teacher"))
    plans = plan_rollouts(
        load_tasks(names=["count_errors", "change_port"]), rollouts=2, repetitions=1, run_id="t", seed=1
    )

    async def run() -> list[Any]:
        url = f"http://127.0.0.1:{system.layout.gateways[0]}/v1"
        async with ChatClient(url, api_key="unused", model="tiny", patience_seconds=120) as client:
            return await run_all(client, plans, OPTIONS, concurrent=4, on_end=lambda result: None)

    results = asyncio.run(run())
    assert all(isinstance(result, RolloutResult) for result in results), results
    steps = {result.rollout_id: result.steps for result in results}
    assert [result.recorded_turns for result in results] == list(steps.values())
    total = sum(steps.values())

    def outcomes() -> list[dict[str, Any]] | None:
        found = [state for state in system.events("next-states.v1") if state["kind"] == "outcome"]
        return found if len(found) >= total else None

    found = wait_for(outcomes, "an outcome of every turn")
    turns = {turn["turn_id"]: turn for turn in system.events("turns.v1")}
    assert len(turns) == total
    by_rollout: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for turn in turns.values():
        by_rollout[turn["rollout"]["rollout_id"]].append(turn)
    for plan in plans:
        of_rollout = sorted(by_rollout[plan.rollout_id], key=lambda turn: turn["rollout"]["step_index"])
        assert [turn["rollout"]["step_index"] for turn in of_rollout] == list(range(steps[plan.rollout_id]))
        assert {turn["session_id"] for turn in of_rollout} == {plan.rollout_id}
        assert {(turn["rollout"]["task_id"], turn["rollout"]["group_id"]) for turn in of_rollout} == {
            (plan.task.name, plan.group_id)
        }
        for parent, child in pairwise(of_rollout):
            assert child["parent_turn_id"] == parent["turn_id"]

    assert {state["turn_id"] for state in found} == set(turns)
    for state in found:
        turn, rollout = turns[state["turn_id"]], state["rollout"]
        trainable = sum(one["trainable"] for one in by_rollout[rollout["rollout_id"]])
        assert (state["feedback"]["score"], state["feedback"]["source"]) == (-1.0, "verifier")
        assert rollout["step_index"] == turn["rollout"]["step_index"]
        assert rollout["last_step_index"] == steps[rollout["rollout_id"]] - 1
        assert rollout["trainable_turns"] == trainable

    learnable = {turn_id for turn_id, turn in turns.items() if turn["trainable"]}

    def samples() -> list[dict[str, Any]] | None:
        of_outcomes = [one for one in system.events("samples.v1") if one["reward"] is not None]
        return of_outcomes if {one["turn_id"] for one in of_outcomes} >= learnable else None

    assert learnable, "the tiny model's turns are trainable"
    for sample in wait_for(samples, "a sample of every trainable turn's outcome"):
        assert (sample["reward"], sample["revision"]["explicit"]) == (-1.0, True)
        assert sample["step_reward"] in (-1.0, None)
        assert sample["rollout"]["last_step_index"] is not None
