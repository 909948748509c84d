"""One errand for agents with a shell: two messages of a user in two processes, each of which takes a command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.events import NextStateEvent, TurnEvent
from schemas.events.base import TurnType
from schemas.events.next_state import NextStateKind
from tests.clients.agents.agent_gateway import Policy, Prompt

QUESTION = "When does the ferry leave? It stands in note.txt."
ORDER = "Write the hour into answer.txt, please."
NOTE = "The ferry leaves at 9:00."
FOUND = "The note says that the ferry leaves at nine in the morning."
WRITTEN = "I wrote the hour, nine in the morning, into answer.txt for you."
THANKS = "Thank you. And when does the next one leave?"
UNKNOWN = "The note names one ferry alone, so I cannot say when the next one leaves."
READ_COMMAND = "cat note.txt"
WRITE_COMMAND = "printf 9:00 > answer.txt && cat answer.txt"


def tool_call(name: str, arguments: dict[str, Any], words: str = "") -> str:
    """What a policy says to call a tool, after some words."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{words}\n<tool_call>\n{call}\n</tool_call>".lstrip()


def errand_policy(command: Callable[[str], str], side: Callable[[Prompt], str | None]) -> Policy:
    """`command` calls the agent's shell; `side` answers side requests and gives None for the errand's own."""

    def policy(prompt: Prompt) -> str:
        if (said := side(prompt)) is not None:
            return said
        if THANKS in prompt.newest:
            return UNKNOWN
        is_order = ORDER in prompt.text
        if "<tool_response>" in prompt.newest:
            return WRITTEN if is_order else FOUND
        return command(WRITE_COMMAND if is_order else READ_COMMAND)

    return policy


def write_note(folder: Path) -> None:
    """Makes the folder in which the agent works."""
    folder.mkdir(parents=True)
    (folder / "note.txt").write_text(f"{NOTE}\n")


def main_turns(turns: list[TurnEvent]) -> list[TurnEvent]:
    """Those of the conversation itself."""
    return [turn for turn in turns if turn.turn_type is TurnType.MAIN]


def check_errand(turns: list[TurnEvent], states: list[NextStateEvent], profile: str) -> None:
    """Four turns of one session, each the parent of the next; three next states: result, message, result.

    What follows the errand's own four turns is the test's business, but it must not be about them.
    """
    question, found, order, written = main = main_turns(turns)[:4]
    assert {turn.client_profile for turn in turns} == {profile}
    assert len({turn.session_id for turn in main}) == 1
    assert [turn.parent_turn_id for turn in main] == [None, *(turn.turn_id for turn in main[:-1])]
    assert not any(turn.parent_evidence.ambiguous for turn in main)
    assert [turn.finish_reason for turn in main] == ["tool_calls", "stop", "tool_calls", "stop"]
    assert [found.response_message["content"], written.response_message["content"]] == [FOUND, WRITTEN]
    sides = {turn.turn_id for turn in turns if turn.turn_type is TurnType.SIDE}
    about = {state.turn_id: state for state in states}
    assert len(states) == len(about) == 3, [state.following_messages for state in states]
    assert not sides & about.keys()
    result, message, last = (about[turn.turn_id] for turn in (question, found, order))
    assert [result.kind, message.kind, last.kind] == [
        NextStateKind.TOOL_RESULT,
        NextStateKind.REPLY,
        NextStateKind.TOOL_RESULT,
    ]
    assert NOTE in str(result.following_messages), result.following_messages
    # `opencode run` quotes an argument that has spaces.
    assert [said_text(said).strip().strip('"') for said in message.following_messages] == [ORDER]
    assert "9:00" in str(last.following_messages)


def said_text(message: dict[str, Any]) -> str:
    """The text of a message, whether a string or parts."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
