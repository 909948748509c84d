"""Chat logs to conversations and turns, without log or engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from clawstream.errors import DecodeError, SettingsError
from clawstream.importing.conversations import is_evidence, turns_of
from clawstream.importing.openai_log import parse_openai_line
from clawstream.importing.openclaw_log import parse_openclaw_session
from clawstream.importing.reading import LogFormat, log_files, read_conversations

SESSION = {"type": "session", "version": 3, "id": "s-1", "timestamp": "2026-03-01T09:00:00.000Z", "cwd": "/home/me"}


def entry(identity: str, parent: str | None, role: str, content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": role, "content": content, **fields}
    return {
        "type": "message",
        "id": identity,
        "parentId": parent,
        "timestamp": "2026-03-01T09:01:00Z",
        "message": message,
    }


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def session(*entries: dict[str, Any]) -> list[bytes]:
    return [json.dumps(each).encode() for each in (SESSION, *entries)]


def line(*messages: tuple[str, str], **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": words} for role, words in messages], **fields}).encode()


def test_every_answer_is_a_turn_with_what_stands_before_and_after_it() -> None:
    logged = parse_openai_line(
        line(("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"), ("assistant", "A2")), "log:1"
    )
    first, second = turns_of(logged)
    assert [each.message["content"] for each in first.request] == ["S", "U1"]
    assert [each.message["content"] for each in first.following] == ["U2"]
    assert [each.message["content"] for each in second.request] == ["S", "U1", "A1", "U2"]
    assert not is_evidence(second.following)
    greeting = parse_openai_line(line(("assistant", "Hello!"), ("user", "U"), ("assistant", "A")), "log:1")
    assert [turn.answer.message["content"] for turn in turns_of(greeting)] == ["A"], "a greeting answers nothing"


def test_ids_are_those_of_the_content_unless_the_log_names_it() -> None:
    unnamed = parse_openai_line(line(("user", "U"), ("assistant", "A")), "log:1")
    again = parse_openai_line(line(("user", "U"), ("assistant", "A")), "elsewhere:7")
    other = parse_openai_line(line(("user", "U"), ("assistant", "B")), "log:1")
    assert unnamed.session_id("p") == again.session_id("p") != other.session_id("p")
    assert unnamed.session_id("p") != unnamed.session_id("q")
    named = [parse_openai_line(line(("user", "U"), ("assistant", words), id=7), "log:1") for words in "AB"]
    assert named[0].session_id("p") == named[1].session_id("p")
    assert named[0].content_sha256 != named[1].content_sha256


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (b"{", "log:1: not JSON"),
        (b"[]", "no list of messages"),
        (b'{"messages": []}', "no list of messages"),
        (b'{"messages": [{"role": "narrator", "content": "x"}]}', r"messages\[0\] is no message"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": "all"}', "tools is no list"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(broken: bytes, problem: str) -> None:
    with pytest.raises(DecodeError, match=problem):
        parse_openai_line(broken, "log:1")


def test_a_session_file_is_the_branch_that_ends_at_its_last_message() -> None:
    lines = session(
        {"type": "model_change", "id": "m", "parentId": None, "provider": "p", "modelId": "x"},
        entry("u1", "m", "user", "Hi"),
        entry("a1", "u1", "assistant", text("Hello.")),
        entry("u2", "a1", "user", text("List files")),
        entry("a2", "u2", "assistant", text("I would rather not.")),
        entry("u3", "a1", "user", text("List all files")),
        entry(
            "a3",
            "u3",
            "assistant",
            [
                {"type": "thinking", "thinking": "hidden"},
                {"type": "toolCall", "id": "c1", "name": "ls", "arguments": {"all": True}},
            ],
        ),
        entry("t1", "a3", "toolResult", text("a b"), toolCallId="c1", toolName="ls", isError=False),
        entry("a4", "t1", "assistant", text("a and b")),
    )
    found = parse_openclaw_session(lines, "s.jsonl")
    assert (found.name, found.left_out) == ("s-1", 3)
    assert [each.message["content"] for each in found.messages] == [
        "Hi",
        "Hello.",
        "List all files",
        None,
        "a b",
        "a and b",
    ]
    call = found.messages[3].message["tool_calls"]
    assert call == [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"all":true}'}}]
    assert found.messages[4].message == {"role": "tool", "tool_call_id": "c1", "content": "a b"}
    assert found.messages[0].at is not None
    first, second, third = turns_of(found)
    assert is_evidence(first.following)
    assert [each.role for each in second.following] == ["tool"]
    assert third.following == ()


def test_after_a_compaction_the_summary_stands_for_what_it_summed_up() -> None:
    lines = session(
        entry("u1", None, "user", "one"),
        entry("a1", "u1", "assistant", text("two")),
        entry("u2", "a1", "user", "three"),
        entry("a2", "u2", "assistant", text("four")),
        {"type": "compaction", "id": "c", "parentId": "a2", "summary": "one to two", "firstKeptEntryId": "u2"},
        entry("u3", "c", "user", "five"),
        entry("a3", "u3", "assistant", text("six")),
    )
    found = parse_openclaw_session(lines, "s.jsonl")
    assert [each.message["content"] for each in found.messages] == ["one to two", "three", "four", "five", "six"]


def test_a_file_without_a_header_is_no_session() -> None:
    with pytest.raises(DecodeError, match="no session header"):
        parse_openclaw_session([json.dumps(entry("u", None, "user", "x")).encode()], "s.jsonl")


def test_files_are_read_one_after_the_other_and_bad_lines_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(line(("user", "U"), ("assistant", "B")))
    (tmp_path / "a.jsonl").write_bytes(line(("user", "U"), ("assistant", "A")) + b"\n\n{\n")
    files = log_files([tmp_path])
    sizes: list[int] = []
    found = list(read_conversations(files, LogFormat.OPENAI, sizes.append))
    assert [isinstance(each, DecodeError) for each in found] == [False, True, False]
    assert sizes[-1] == sum(file.stat().st_size for file in files)
    with pytest.raises(SettingsError, match="no such file"):
        log_files([tmp_path / "c.jsonl"])
