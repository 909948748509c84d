"""aider from PyPI, headless: it edits a file and commits, and goes on from its chat history in a second run."""

import json
import shutil
from pathlib import Path

import pytest

from schemas.events.base import TurnType
from schemas.events.next_state import NextStateKind
from tests.clients.agents.agent_gateway import Prompt, StartAgentGateway, run_client
from tests.clients.agents.errand import main_turns, said_text
from tests.clients.agents.installation import python_environment
from tests.fixtures.broker import missing

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

FIRST = "Change the greeting to: good morning"
SECOND = "Now change it to: good night"
COMMIT_MESSAGE = "feat: change the greeting"
METADATA = {"openai/policy": {"max_input_tokens": 200_000, "max_output_tokens": 4_000, "mode": "chat"}}
MODEL_SETTINGS = "- name: openai/policy\n  use_temperature: false\n"
"""aider asks for temperature 0 by itself: turns that would never be trained."""


def edit(greeting: str) -> str:
    return (
        f"I change the whole of greeting.txt to the greeting that you asked for.\n\ngreeting.txt\n```\n{greeting}\n```"
    )


def policy(prompt: Prompt) -> str:
    if "one-line Git commit messages" in prompt.text:
        return COMMIT_MESSAGE
    return edit("good night" if SECOND in prompt.text else "good morning")


async def test_two_edits_in_two_runs(start_agent_gateway: StartAgentGateway, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        missing("git is not on the path: aider commits what it edits")
    python = python_environment("aider", newest=(3, 12))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "greeting.txt").write_text("good evening\n")
    (folder / ".aider.model.metadata.json").write_text(json.dumps(METADATA))
    (folder / ".aider.model.settings.yml").write_text(MODEL_SETTINGS)
    (tmp_path / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    environment = {"HOME": str(tmp_path)}
    for command in ["init", "--quiet"], ["add", "greeting.txt"], ["commit", "--quiet", "--message", "start"]:
        await run_client(["git", *command], folder=folder, environment=environment)
    flags = ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-release-notes", "--no-gitignore"]
    flags += ["--no-detect-urls", "--no-show-model-warnings", "--no-pretty", "--map-tokens", "0"]
    async with start_agent_gateway(policy) as gateway:
        model = ["--model", "openai/policy", "--openai-api-base", f"{gateway.url}/v1", "--openai-api-key", "unused"]
        environment |= {**gateway.proxy.environment, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "TERM": "dumb"}
        for more, words in ([], FIRST), (["--restore-chat-history"], SECOND):
            await run_client(
                [str(python), "-m", "aider", *flags, *model, *more, "--message", words, "greeting.txt"],
                folder=folder,
                environment=environment,
            )
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(1)
    assert (folder / "greeting.txt").read_text() == "good night\n"
    gateway.check_capture(turns)
    assert {turn.client_profile for turn in turns} == {"aider"}
    first, second = main_turns(turns)
    assert second.session_id == first.session_id
    assert [first.parent_turn_id, second.parent_turn_id] == [None, first.turn_id]
    [state] = states
    assert (state.turn_id, state.kind) == (first.turn_id, NextStateKind.REPLY)
    assert [said_text(message).strip() for message in state.following_messages] == [SECOND]
    sides = [turn for turn in turns if turn.turn_type is TurnType.SIDE]
    assert [turn.turn_type_reason for turn in sides] == ["commit-message", "commit-message"]
    assert all(turn.response_message["content"] == COMMIT_MESSAGE for turn in sides)
