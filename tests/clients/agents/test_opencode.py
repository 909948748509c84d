"""opencode from npm, headless: `opencode run` and its `--continue`, over chat completions and over messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.events.base import TurnType
from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.errand import ORDER, QUESTION, check_errand, errand_policy, tool_call, write_note
from tests.clients.agents.installation import npm_folder

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

TITLE = "A ferry and its hour"


def run_command(command: str) -> str:
    return tool_call("bash", {"command": command, "description": "looks at the note"}, "I will look.")


def side(prompt: Prompt) -> str | None:
    return TITLE if "You are a title generator" in prompt.text else None


def configuration(url: str, package: str) -> dict[str, Any]:
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": "clawstream/policy",
        "small_model": "clawstream/policy",
        "permission": "allow",
        "provider": {
            "clawstream": {
                "npm": package,
                "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
                "models": {"policy": {"tool_call": True, "limit": {"context": 200_000, "output": 4_000}}},
            }
        },
    }


def claim_plugin_types(home: Path) -> None:
    """opencode would fetch them from npm into every folder of settings; no setting switches that off."""
    settings = home / ".config" / "opencode"
    (settings / "node_modules").mkdir(parents=True)
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    (settings / "package-lock.json").write_text(json.dumps(lock))


@pytest.mark.parametrize("package", ["@ai-sdk/openai-compatible", "@ai-sdk/anthropic"])
async def test_an_errand_in_two_runs(
    start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path, package: str
) -> None:
    program = npm_folder("opencode", ()) / "node_modules" / "opencode-ai" / "bin" / "opencode.exe"
    folder = tmp_path / "project"
    write_note(folder)
    claim_plugin_types(tmp_path)
    async with start_agent_gateway(errand_policy(run_command, side)) as gateway:
        environment = {
            **gateway.proxy.environment,
            "HOME": str(tmp_path),
            "OPENCODE_CONFIG_CONTENT": json.dumps(configuration(gateway.url, package)),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        for flags, words in ([], QUESTION), (["--continue"], ORDER):
            await run_client([str(program), "run", *flags, words], folder=folder, environment=environment)
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(3)
    assert (folder / "answer.txt").read_text() == "9:00"
    gateway.check_capture(turns)
    check_errand(turns, states, "opencode")
    titles = [turn for turn in turns if turn.response_message["content"] == TITLE]
    assert [(turn.turn_type, turn.turn_type_reason) for turn in titles] == [(TurnType.SIDE, "title-request")]
