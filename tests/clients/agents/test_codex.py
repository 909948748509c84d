"""codex from npm over /v1/responses, headless: `codex exec`, `codex exec resume --last`, and a compaction."""

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

CONFIGURATION = """
model = "policy"
model_provider = "clawstream"
check_for_update_on_startup = false

[analytics]
enabled = false

[feedback]
enabled = false

[features]
apps = false
plugins = false

[model_providers.clawstream]
name = "clawstream"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "CLAWSTREAM_KEY"
http_headers = {{ "X-Clawstream-Store" = "true" }}
"""
"""codex says `store: false` in every request, which opts out of the log; the header opts in again."""


COMPACT_AT_ONCE = "model_auto_compact_token_limit=1000"
SUMMARY = "The ferry leaves at nine in the morning; the hour stands in answer.txt."


def run_command(command: str) -> str:
    return tool_call("exec_command", {"cmd": command}, "I will look.")


def side(prompt: Prompt) -> str | None:
    return SUMMARY if "CONTEXT CHECKPOINT COMPACTION" in prompt.newest else None


async def test_an_errand_and_a_compaction(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    program = npm_folder("codex") / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
    folder, home = tmp_path / "project", tmp_path / "codex"
    write_note(folder)
    home.mkdir()
    async with start_agent_gateway(errand_policy(run_command, side)) as gateway:
        (home / "config.toml").write_text(CONFIGURATION.format(url=gateway.url))
        environment = {
            **gateway.proxy.environment,
            "HOME": str(tmp_path),
            "CODEX_HOME": str(home),
            "CLAWSTREAM_KEY": "unused",
        }
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        continued = ["resume", "--last"]
        for words in [QUESTION], [*continued, ORDER], ["--config", COMPACT_AT_ONCE, *continued, THANKS]:
            await run_client([str(node), str(program), "exec", *flags, *words], folder=folder, environment=environment)
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(3)
    assert (folder / "answer.txt").read_text() == "9:00"
    gateway.check_capture(turns)
    check_errand(turns, states, "codex")
    *_, written, thanked = main_turns(turns)
    [summary] = [turn for turn in turns if turn.turn_type is TurnType.SIDE]
    assert (summary.turn_type_reason, summary.response_message["content"]) == ("compaction-request", SUMMARY)
    assert thanked.response_message["content"] == UNKNOWN
    assert (thanked.session_id, thanked.parent_turn_id) == (written.session_id, written.turn_id)
    assert [message["role"] for message in thanked.request_messages if message["role"] == "assistant"] == []
