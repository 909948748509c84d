"""mini-swe-agent from PyPI solves a task in a folder; every command's result is its next state."""

import os
from pathlib import Path

import pytest

from schemas.events.next_state import NextStateKind
from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.installation import python_environment

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = ("cat greeting.txt", "printf 'good morning' > greeting.txt", SUBMIT)
SCRIPT = """
import sys
from pathlib import Path
import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(package_dir) / "config" / "mini.yaml").read_text())
model = {
    **config.get("model", {}),
    "model_name": "openai/policy",
    "model_kwargs": {"api_base": sys.argv[1], "api_key": "unused", "drop_params": True},
    "cost_tracking": "ignore_errors",
}
agent_settings = {
    name: value
    for name, value in config["agent"].items()
    if name in ("system_template", "instance_template", "step_limit", "cost_limit")
}
agent = DefaultAgent(LitellmModel(**model), LocalEnvironment(cwd=sys.argv[2]), **agent_settings)
print(agent.run("Change the greeting in greeting.txt to: good morning"))
"""


def policy(prompt: Prompt) -> str:
    number = prompt.text.count("<tool_response>")
    command = COMMANDS[number]
    return (
        f"Step {number + 1} of the task.\n"
        f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
    )


async def test_a_task(start_agent_gateway: StartAgentGateway, tmp_path: Path) -> None:
    python = python_environment("mini-swe-agent")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "greeting.txt").write_text("good evening")
    async with start_agent_gateway(policy) as gateway:
        environment = {
            "HOME": str(tmp_path),
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_CONFIGURED": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "TERM": os.environ.get("TERM", "dumb"),
        }
        printed = await run_client(
            [str(python), "-c", SCRIPT, f"{gateway.url}/v1", str(folder)], folder=folder, environment=environment
        )
        turns = await gateway.turns(len(COMMANDS))
        states = await gateway.next_states(len(COMMANDS) - 1)
    assert "Submitted" in printed
    assert (folder / "greeting.txt").read_text() == "good morning"
    assert len({turn.session_id for turn in turns}) == 1
    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [state.turn_id for state in states] == [turn.turn_id for turn in turns[:-1]]
    assert {state.kind for state in states} == {NextStateKind.TOOL_RESULT}
    assert "good evening" in str(states[0].following_messages)
