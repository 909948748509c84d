"""OpenClaw from npm, as its users run it: nothing in it knows of clawstream."""

from pathlib import Path

import pytest

from tests.clients.agents.conftest import Cut, Prompt, StartAgentGateway
from tests.clients.agents.installation import npm_folder
from tests.clients.agents.openclaw import OpenClaw

pytestmark = [pytest.mark.kafka, pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_explore(start_agent_gateway: StartAgentGateway, node: Path, tmp_path: Path) -> None:
    seen = []

    def policy(prompt: Prompt) -> str | Cut:
        seen.append(prompt.newest)
        new = prompt.newest
        if "memory flush" in new:
            return "NO_REPLY"
        if "summar" in new.lower() or "summar" in prompt.text[:500].lower():
            return "## Goal\nCities.\n## Progress\nCanberra was named."
        if "<tool_response>" in new:
            return "The note says that the ferry leaves at nine in the morning."
        if "Read note.txt" in new:
            return '<tool_call>\n{"name": "read", "arguments": {"path": "note.txt"}}\n</tool_call>'
        if "Cut me" in new:
            if not any("Cut me" in one for one in seen[:-1]):
                return Cut("This answer breaks off before it has said what it wanted to say.")
            return "This answer was not cut, and it is here in full length."
        return f"An answer of its own, number {len(seen)}, long enough to be told from others."

    async with start_agent_gateway(policy) as gateway:
        claw = OpenClaw(node, npm_folder("openclaw"), tmp_path / "claw", gateway.url)
        (tmp_path / "claw" / "workspace").mkdir(parents=True)
        (tmp_path / "claw" / "workspace" / "note.txt").write_text("The ferry leaves at 9:00.\n")
        import time

        start = time.time()
        for words in ("What is the capital of Australia?", "Read note.txt, please.", "Cut me short, please."):
            try:
                print(words, (await claw.say(words, session="s1"))[-1500:])
            except Exception as e:
                print("FAILED", e)
            print("seconds", time.time() - start)
        turns = await gateway.turns(3)
        last = turns[-1].prompt_ids.element_count
        print("LAST", last)
        for context in (last + 20000 + 2000,):
            print(
                "COMPACT",
                context,
                (await claw.say("And what is the capital of France?", session="s1", context_tokens=context))[-1500:],
            )
            print("seconds", time.time() - start)
        turns = await gateway.turns(5)
        for t in turns:
            print(
                "TURN",
                t.turn_id[:8],
                (t.parent_turn_id or "")[:8],
                t.session_id[:8],
                t.turn_type,
                t.turn_type_reason,
                t.client_profile,
                t.finish_reason,
                t.prompt_ids.element_count,
                t.parent_evidence,
                str(t.response_message)[:150],
            )
            for m in t.request_messages:
                print(
                    "    ",
                    m["role"],
                    len(str(m.get("content"))),
                    repr(str(m.get("content")))[:230],
                    str(m.get("tool_calls") or "")[:100],
                )
        for s in await gateway.next_states(1):
            print("STATE", s.turn_id[:8], s.kind, s.following_messages)
    assert False
