"""OpenClaw from npm, as its users run it, told nothing of clawstream: what the log holds of a conversation with it."""

from pathlib import Path

import pytest

from schemas.events import NextStateEvent, TurnEvent
from schemas.events.base import TurnType
from schemas.events.next_state import NextStateKind
from tests.clients.agents.agent_gateway import Cut, Prompt, StartAgentGateway
from tests.clients.agents.installation import npm_folder
from tests.clients.agents.openclaw import OpenClaw

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(900)]

CAPITAL, NOTE, CUT, FRANCE = (
    "What is the capital of Australia?",
    "Read note.txt, please.",
    "When was that decided?",
    "And what is the capital of France?",
)
ANSWERS = {
    CAPITAL: "Canberra is the capital of Australia.",
    NOTE: '<tool_call>\n{"name": "read", "arguments": {"path": "note.txt"}}\n</tool_call>',
    CUT: "It was decided in 1908, as a compromise between Sydney and Melbourne.",
    FRANCE: "Paris is the capital of France.",
}
TOOL_ANSWER = "The note says that the ferry leaves at nine in the morning."
SUMMARY = "## Goal\nCapitals and ferries.\n\n## Progress\nCanberra was named; the ferry leaves at nine."
MACHINERY = ("OPENCLAW", "Queued user message", "UTC]", "Runtime:", "memory flush", "compacted into")
COMPACTS_BELOW = 1.29
"""A context of this many times the tokens in use: three quarters of it, where OpenClaw compacts, are just exceeded."""


class ScriptedPolicy:
    """Answers by the newest user words; the first answer to `CUT` breaks off."""

    def __init__(self) -> None:
        self.cuts = 0

    def __call__(self, prompt: Prompt) -> str | Cut:
        if "memory flush" in prompt.newest:
            return "NO_REPLY"
        if "running inside OpenClaw" not in prompt.text:
            return SUMMARY
        if "<tool_response>" in prompt.newest:
            return TOOL_ANSWER
        asked = next(words for words in reversed(ANSWERS) if words in prompt.newest)
        if asked == CUT and not self.cuts:
            self.cuts += 1
            return Cut(ANSWERS[CUT])
        return ANSWERS[asked]


async def test_a_conversation(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    policy = ScriptedPolicy()
    async with start_agent_gateway(policy) as gateway:
        claw = new_claw(node, tmp_path, gateway.url)
        for words in (CAPITAL, NOTE, FRANCE):
            await claw.say(words, session="one")
        turns = await gateway.turns(len(gateway.prompts))
        states = await gateway.next_states(3)
    capital, call, tool_answer, france = delivered(turns)
    assert {turn.client_profile for turn in turns if turn.turn_type is TurnType.MAIN} == {"openclaw"}
    assert len({turn.session_id for turn in delivered(turns)}) == 1
    assert [turn.parent_turn_id for turn in delivered(turns)] == [
        None,
        capital.turn_id,
        call.turn_id,
        tool_answer.turn_id,
    ]
    check_next_states(states, [(capital, NOTE), (call, "The ferry leaves at 9:00."), (tool_answer, FRANCE)])
    assert not {turn.turn_id for turn in turns if turn.turn_type is TurnType.SIDE} & {
        turn.parent_turn_id for turn in (capital, call, tool_answer, france)
    }


async def test_a_cut_and_a_compaction(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    policy = ScriptedPolicy()
    async with start_agent_gateway(policy) as gateway:
        claw = new_claw(node, tmp_path, gateway.url)
        for words in (CAPITAL, NOTE, CUT):
            await claw.say(words, session="one")
        used = max(turn.prompt_ids.element_count for turn in await gateway.turns(4))
        await claw.say(FRANCE, session="one", context_tokens=int(used * COMPACTS_BELOW))
        turns = await gateway.turns(len(gateway.prompts) - policy.cuts)
        states = await gateway.next_states(4)
    assert policy.cuts == 1
    check_turns(turns)
    capital, call, tool_answer, decided, _ = delivered(turns)
    check_next_states(
        states, [(capital, NOTE), (call, "The ferry leaves at 9:00."), (tool_answer, CUT), (decided, FRANCE)]
    )


def new_claw(node: Path, folder: Path, url: str) -> OpenClaw:
    """With a note in its workspace."""
    claw = OpenClaw(node, npm_folder("openclaw"), folder / "openclaw", url)
    claw.workspace.mkdir(parents=True)
    (claw.workspace / "note.txt").write_text("The ferry leaves at 9:00.\n")
    return claw


def check_turns(turns: list[TurnEvent]) -> None:
    """One session whose delivered turns follow each other, and side turns that nothing follows."""
    assert {turn.client_profile for turn in turns if turn.turn_type is TurnType.MAIN} == {"openclaw"}
    capital, call, tool_answer, decided, france = delivered(turns)
    assert len({turn.session_id for turn in (capital, call, tool_answer, decided, france)}) == 1
    assert capital.parent_turn_id is None
    assert call.parent_turn_id == capital.turn_id
    assert tool_answer.parent_turn_id == call.turn_id
    assert decided.parent_turn_id == tool_answer.turn_id, "the retry in other words is a sibling of the cut attempt"
    assert france.parent_turn_id == decided.turn_id, "although the history is a summary now"
    assert "compacted into" in str(france.request_messages)
    assert CAPITAL not in str(france.request_messages)
    sides = [turn for turn in turns if turn.turn_type is TurnType.SIDE]
    assert {turn.turn_type_reason for turn in sides} >= {"memory-flush", "summary-request"}
    assert not {turn.turn_id for turn in sides} & {turn.parent_turn_id for turn in delivered(turns)}


def check_next_states(states: list[NextStateEvent], expected: list[tuple[TurnEvent, str]]) -> None:
    """What the user and the tool said, each about the answer before it, without a word of the machinery."""
    about = {state.turn_id: state for state in states}
    assert len(about) == len(states) == len(expected)
    for turn, words in expected:
        state = about[turn.turn_id]
        assert [str(message["content"]).strip() for message in state.following_messages] == [words]
        is_call = bool(turn.response_message.get("tool_calls"))
        assert (state.kind is NextStateKind.TOOL_RESULT) == is_call
        assert not [word for word in MACHINERY if word in str(state.following_messages)]


def delivered(turns: list[TurnEvent]) -> list[TurnEvent]:
    """The main turns that OpenClaw received whole."""
    texts = [*ANSWERS.values(), TOOL_ANSWER]
    return [
        turn
        for turn in turns
        if turn.turn_type is TurnType.MAIN
        and (turn.response_message["content"] in texts or turn.response_message.get("tool_calls"))
    ]
