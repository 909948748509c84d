"""qwen-code from npm, headless: `qwen -p`, `qwen --continue -p`, and a compression."""

import json
from pathlib import Path

import pytest

from schemas.events.base import TurnType
from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.errand import (
    ORDER,
    QUESTION,
    THANKS,
    UNKNOWN,
    check_errand,
    errand_policy,
    main_turns,
    tool_call,
    write_note,
)
from tests.clients.agents.installation import npm_folder

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]


ANALYSIS = "<analysis>\nThe user asked about a ferry.\n</analysis>"
"""qwen-code cuts it out of what it makes the beginning of the history."""
SNAPSHOT = (
    "<state_snapshot>\n<overall_goal>The hour of the ferry stands in answer.txt.</overall_goal>\n</state_snapshot>"
)


def run_command(command: str) -> str:
    arguments = {"command": command, "is_background": False, "description": "looks at the note"}
    return tool_call("run_shell_command", arguments, "I will look.")


def side(prompt: Prompt) -> str | None:
    if "managed memory extraction subagent" in prompt.text:
        return "Nothing of this will be worth knowing tomorrow."
    return f"{ANALYSIS}\n{SNAPSHOT}" if "You are the component that summarizes" in prompt.text else None


async def test_an_errand_and_a_compression(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    program = npm_folder("qwen-code") / "node_modules" / "@qwen-code" / "qwen-code" / "cli-entry.js"
    folder = tmp_path / "project"
    write_note(folder)
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": "policy"},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "telemetry": {"enabled": False},
        # A pseudo-terminal can lose the output of a command that ends at once.
        "tools": {"shell": {"enableInteractiveShell": False}},
    }
    (tmp_path / ".qwen").mkdir()
    (tmp_path / ".qwen" / "settings.json").write_text(json.dumps(settings))
    async with start_agent_gateway(errand_policy(run_command, side)) as gateway:
        environment = {
            **gateway.proxy.environment,
            "HOME": str(tmp_path),
            "OPENAI_BASE_URL": f"{gateway.url}/v1",
            "OPENAI_API_KEY": "unused",
            "OPENAI_MODEL": "policy",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }
        for flags, words in (
            ([], QUESTION),
            (["--continue"], ORDER),
            (["--continue"], "/compress"),
            (["--continue"], THANKS),
        ):
            await run_client(
                [str(node), str(program), "--yolo", *flags, "--prompt", words], folder=folder, environment=environment
            )
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(3)
    assert (folder / "answer.txt").read_text() == "9:00"
    gateway.check_capture(turns)
    check_errand(turns, states, "qwen-code")
    *_, written, thanked = main_turns(turns)
    reasons = [turn.turn_type_reason for turn in turns if turn.turn_type is TurnType.SIDE]
    assert reasons.count("compression-request") == 1
    assert set(reasons) <= {"compression-request", "memory-extraction"}
    assert (thanked.response_message["content"], thanked.parent_evidence.rule) == (UNKNOWN, "summary")
    assert (thanked.session_id, thanked.parent_turn_id) == (written.session_id, written.turn_id)
