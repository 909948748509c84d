"""The Vercel AI SDK from npm: a text, a stream and a tool loop, of which the log holds one session."""

import json
import shutil
from pathlib import Path

import pytest

from schemas.events.next_state import NextStateKind
from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.installation import npm_folder

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def policy(prompt: Prompt) -> str:
    if "<tool_response>" in prompt.newest:
        return "It is 21 degrees in Paris."
    if "weather" in prompt.newest:
        return CALL
    return "It is certain." if "certain" in prompt.newest else "The capital of Australia is Canberra."


async def test_quickstart(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    installation = npm_folder("vercel-ai-sdk")
    script = tmp_path / "chat.mjs"
    shutil.copy(Path(__file__).with_name("ai_sdk_chat.mjs"), script)
    (tmp_path / "node_modules").symlink_to(installation / "node_modules")
    async with start_agent_gateway(policy) as gateway:
        environment = {"BASE_URL": f"{gateway.url}/v1", "AI_SDK_LOG_WARNINGS": "false"}
        printed = await run_client([str(node), str(script)], folder=tmp_path, environment=environment)
        turns = await gateway.turns(4)
        states = await gateway.next_states(3)
    said = json.loads(printed.splitlines()[-1])
    assert said["first"] == "The capital of Australia is Canberra."
    assert said["streamed"] == "It is certain."
    assert said["usage"] == turns[1].response_ids.element_count
    assert (said["last"], said["steps"]) == ("It is 21 degrees in Paris.", 2)

    assert len({turn.session_id for turn in turns}) == 1
    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert all(turn.trainable for turn in turns)
    assert [state.turn_id for state in states] == [turn.turn_id for turn in turns[:-1]]
    assert [state.kind for state in states] == [NextStateKind.REPLY, NextStateKind.REPLY, NextStateKind.TOOL_RESULT]
    assert "21 degrees" in str(states[2].following_messages)
