"""codex from npm over /v1/responses, headless: `codex exec` and `codex exec resume --last`."""

from pathlib import Path

import pytest

from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.errand import ORDER, QUESTION, check_errand, errand_policy, tool_call, write_note
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


def run_command(command: str) -> str:
    return tool_call("exec_command", {"cmd": command}, "I will look.")


def side(prompt: Prompt) -> str | None:
    return None


async def test_an_errand_in_two_runs(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
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
        for words in [QUESTION], ["resume", "--last", ORDER]:
            await run_client([str(node), str(program), "exec", *flags, *words], folder=folder, environment=environment)
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(3)
    assert (folder / "answer.txt").read_text() == "9:00"
    gateway.check_capture(turns)
    check_errand(turns, states, "codex")
