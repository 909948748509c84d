"""What clients send becomes what templates can render."""

from typing import Any

import pytest

from clawstream.errors import ContractError
from clawstream.rendering.messages import hoist_system_messages, to_template_messages
from schemas.events.base import Message


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_developer_messages_join_the_leading_system_message_in_order() -> None:
    found = to_template_messages(
        [
            {"role": "developer", "content": "first"},
            {"role": "system", "content": "second"},
            {"role": "user", "content": "hi"},
        ]
    )
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("system", "first\n\nsecond"),
        ("user", "hi"),
    ]
    assert found.repaired == ""


def test_a_later_developer_message_stays_in_its_place() -> None:
    messages: list[Message] = [{"role": role, "content": role} for role in ("system", "user", "developer", "user")]
    found = to_template_messages(messages).messages
    assert [message["role"] for message in found] == ["system", "user", "system", "user"]
    assert hoist_system_messages(found)[0]["content"] == "system\n\ndeveloper"
    assert [message["role"] for message in hoist_system_messages(found)] == ["system", "user", "user"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([{"type": "text", "text": "x"}], "x"),
        ([{"type": "text", "text": "x"}, {"type": "input_text", "text": "y"}, "z"], "xyz"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ("cut \ud83d here", "cut \ufffd here"),
    ],
)
def test_content_in_every_form_is_text(content: Any, text: str) -> None:
    assert to_template_messages([{"role": "user", "content": content}]).messages[0]["content"] == text


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 7])
def test_what_is_not_text_is_refused_with_its_place(part: Any) -> None:
    with pytest.raises(ContractError, match=r"messages\[1\]\.content\[0\]"):
        to_template_messages([{"role": "user", "content": "a"}, {"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("arguments", "parsed", "is_repaired"),
    [
        ('{"a": 1}', {"a": 1}, False),
        ({"a": 1}, {"a": 1}, False),
        ("", {}, False),
        (None, {}, False),
        ("{bad", {"raw": "{bad"}, True),
        ("[1]", {"raw": "[1]"}, True),
        ([1], {"raw": "[1]"}, True),
    ],
)
def test_tool_arguments_become_objects(arguments: Any, parsed: dict[str, Any], is_repaired: bool) -> None:
    found = to_template_messages([{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}])
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == parsed
    assert ("messages[0].tool_calls[0]" in found.repaired) == is_repaired


def test_the_clients_own_messages_are_not_changed() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call("{}")]}
    to_template_messages([message])
    assert message == {"role": "assistant", "content": None, "tool_calls": [call("{}")]}


def test_nothing_to_answer_is_refused() -> None:
    with pytest.raises(ContractError, match="empty"):
        to_template_messages([])
