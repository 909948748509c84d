"""Turns as the real gateway records them can be hinted: the teacher's rendering gives the engine's own prompt ids."""

from typing import Any

import pytest

from clawstream.rendering.renderer import PackageRenderer
from schemas.events.score import Hint
from services.teacher.hints import HINT_HEADER
from services.teacher.settings import HintSettings
from services.teacher.signals import HintedPrompts
from tests.fixtures.gateway_app import running_gateway
from tests.fixtures.stub_engine import StubAnswer

TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
ASK = {"role": "user", "content": "List the files."}
TOOL_TURN = [
    {"role": "system", "content": "You are terse."},
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "one.txt"},
]
HINT = Hint(text="Answer in one short sentence.", source="user")
END = 2


@pytest.mark.parametrize("family", ["tiny", "tagged"])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([ASK], {}),
        ([{"role": "developer", "content": "Be brief."}, ASK], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "List "}, {"type": "text", "text": "files."}]}], {}),
        ([ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWhich?"}, ASK], {}),
        (TOOL_TURN, {"tools": [TOOL]}),
        ([ASK], {"tools": [TOOL], "tool_choice": "none"}),
    ],
    ids=["plain", "developer", "parts", "thinking", "tools", "tools-not-shown"],
)
async def test_a_recorded_turn_is_rendered_again_to_its_own_ids(
    family: str,
    messages: Any,
    options: dict[str, Any],
    tiny_renderer: PackageRenderer,
    tagged_renderer: PackageRenderer,
) -> None:
    renderer = {"tiny": tiny_renderer, "tagged": tagged_renderer}[family]
    async with running_gateway(renderer) as gateway:
        gateway.engine.enqueue(StubAnswer(token_ids=[*renderer.encode("Here."), END]))
        async with gateway.openai() as client:
            await client.chat.completions.create(model="policy", messages=messages, **options)
        (turn,) = gateway.conversations.turns
    prompts = HintedPrompts(renderer, HintSettings(), context_tokens=2048).of(turn, [HINT], turn.response_ids.shape[0])
    assert isinstance(prompts, list), prompts
    (prompt,) = prompts
    own = renderer.decode(turn.prompt_ids.to_numpy().tolist())
    assert renderer.decode(prompt.prompt_ids).replace(f"\n\n{HINT_HEADER}\n{HINT.text}", "") == own
