"""Canonical answers: what clients change makes no difference, what the model said does."""

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.events.base import Message
from services.gateway.canonical import (
    MessageKeys,
    canonical_answer,
    canonical_arguments,
    message_text,
    without_reasoning,
)
from tests.fixtures.conversations import assistant, call

WORDS = st.text(alphabet=string.ascii_letters + " .é漢🙂\n", max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=10,
)
ARGUMENTS = st.dictionaries(WORDS, JSON, max_size=4)
KEYS = MessageKeys(b"k" * 32, "alice")


def answer_key(message: Message) -> str:
    return KEYS.answer(canonical_answer(message))


@st.composite
def rewritten(draw: st.DrawFn, text: str, arguments: dict[str, Any] | None) -> Message:
    """The same answer as some client would send it back."""
    padding = st.sampled_from(["", " ", "\n\n", "\t"])
    shown = draw(padding) + text + draw(padding)
    if draw(st.booleans()):
        shown = f"<think>{draw(WORDS)}</think>{shown}"
    content: Any = draw(st.sampled_from([shown, [{"type": "text", "text": shown}]]))
    if not text and draw(st.booleans()):
        content = draw(st.sampled_from([None, "", [], " "]))
    message: Message = {"role": "assistant", "content": content}
    if content is None and draw(st.booleans()):
        del message["content"]
    if draw(st.booleans()):
        message["reasoning_content"] = draw(WORDS)
    if arguments is not None:
        items = draw(st.permutations(list(arguments.items())))
        ascii_only, separators = draw(st.tuples(st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")])))
        serialised = json.dumps(dict(items), ensure_ascii=ascii_only, separators=separators)
        function: Any = {"name": "tool", "arguments": draw(st.sampled_from([serialised, f" {serialised}\n"]))}
        message["tool_calls"] = [
            {"id": draw(st.text(string.ascii_letters, max_size=5)), "type": "function", "function": function}
        ]
    elif draw(st.booleans()):
        message["tool_calls"] = draw(st.sampled_from([None, []]))
    return message


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), WORDS, st.none() | ARGUMENTS)
def test_an_echo_has_the_key_of_the_answer(data: st.DataObject, text: str, arguments: dict[str, Any] | None) -> None:
    assert answer_key(data.draw(rewritten(text, arguments))) == answer_key(data.draw(rewritten(text, arguments)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS, WORDS, st.none() | ARGUMENTS, st.none() | ARGUMENTS)
def test_another_answer_has_another_key(
    text: str, other_text: str, arguments: dict[str, Any] | None, other: dict[str, Any] | None
) -> None:
    def message(said: str, called: dict[str, Any] | None) -> Message:
        return assistant(said) if called is None else {**call("tool", json.dumps(called)), "content": said}

    def normal(called: dict[str, Any] | None) -> str | None:
        return None if called is None else canonical_arguments(called)

    same = text.strip() == other_text.strip() and normal(arguments) == normal(other)
    assert (answer_key(message(text, arguments)) == answer_key(message(other_text, other))) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 10.0}', '{"a":10}'),
        ('{"b":1,"a":2}', '{"a":2,"b":1}'),
        ('{"a":"\\u00e9"}', '{"a":"é"}'),
        ("", "{}"),
        (None, "{}"),
        ("12345678901234567890", "12345678901234567000"),
        ('{"a":-0.0}', '{"a":0}'),
        ('{"a":1e2}', '{"a":100}'),
        ({"a": 1}, '{"a":1}'),
        ('{"bad', '  {"bad '),
        ('"\\ud83d"', '"\\ud83d" '),
    ],
)
def test_spellings_of_the_same_arguments(one: Any, other: Any) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)
    KEYS.answer(canonical_answer(call("tool", one)))


@pytest.mark.parametrize(
    ("one", "other"),
    [('{"a":1}', '{"a":"1"}'), ('{"a":true}', '{"a":1}'), ("[1,2]", "[2,1]"), ('{"a":null}', "{}"), ("NaN", "null")],
)
def test_different_arguments(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


def test_deeply_nested_arguments_are_text() -> None:
    nested = "[" * 100_000
    assert canonical_arguments(nested) == nested


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>never closed", ""),
        ("before<think>x</think>after", "beforeafter"),
        ("<thinking>x</thinking>b", "b"),
        ("nothing to think < about", "nothing to think < about"),
    ],
)
def test_reasoning_is_cut(text: str, visible: str) -> None:
    assert without_reasoning(text) == visible


def test_parts_and_odd_content() -> None:
    image: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}],
    }
    other: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "y"}],
    }
    assert message_text({"role": "user", "content": [{"type": "text", "text": "a"}]}) == "a"
    assert message_text(image) != message_text(other)
    assert message_text({"role": "user", "content": 5}) == "5"
    assert message_text({"role": "user"}) == ""
    assert canonical_answer({"role": "assistant", "tool_calls": ["odd", {"function": 1}]}).tool_calls == (("", "{}"),)
    assert KEYS.message("user", "\ud83d") != KEYS.message("user", "")


def test_keys_depend_on_secret_principal_and_kind() -> None:
    answer = canonical_answer(assistant("hello"))
    keys = [
        MessageKeys(b"k" * 32, "alice").answer(answer),
        MessageKeys(b"k" * 32, "bob").answer(answer),
        MessageKeys(b"x" * 32, "alice").answer(answer),
    ]
    assert len(set(keys)) == 3
    assert KEYS.message("user", "hello") != KEYS.message("tool", "hello")
    assert KEYS.message("user", " hello\n") == KEYS.message("user", "hello")
