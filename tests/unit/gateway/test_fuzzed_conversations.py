"""Requests of real agents, mutated: served or refused in the API's own form, and never a failure of our own."""

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.errors import ContractError, RequestRefused
from clawstream.rendering.renderer import PackageRenderer, load_renderer
from services.gateway.request_json import parse_json_object
from services.gateway.surfaces.chat.surface import ChatSurface
from services.gateway.surfaces.messages.surface import MessagesSurface
from services.gateway.surfaces.responses.surface import ResponsesSurface
from services.gateway.surfaces.surface import Surface
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.model_families import MODEL_FAMILIES, write_family_model
from tests.unit.gateway.transcripts import TRANSCRIPTS

ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    "",
    "x",
    "\ud83d",
    "\x00",
    "{bad",
    "[1]",
    "long " * 3000,
    [],
    {},
    [[]],
    [None],
    [{}],
    ["text"],
    {"type": "text"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"role": "tool", "tool_call_id": "unknown", "content": "orphan"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "tool_calls": [{"function": None}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}, None, 7]},
    {"function": 5, "type": "function"},
    {"type": "function", "function": {"name": 7, "parameters": "x"}},
    json.loads("[" * 60 + "]" * 60),
]


SURFACES: dict[str, Surface] = {
    "/v1/chat/completions": ChatSurface(lambda token_ids: ""),
    "/v1/responses": ResponsesSurface(),
    "/v1/messages": MessagesSurface(),
    "/v1/messages/count_tokens": MessagesSurface(),
}


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside `value`."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, child in items for found in ((*path, key), *nodes(child, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and an agent's request with some things changed, lost, repeated or put elsewhere."""
    path, original = draw(st.sampled_from(TRANSCRIPTS))
    body: Any = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 5))):
        if not (places := nodes(body)):
            break
        *parents, key = draw(st.sampled_from(places))
        holder = body
        for parent in parents:
            holder = holder[parent]
        match draw(st.sampled_from(("replace", "replace", "delete", "repeat", "swap", "wrap"))):
            case "replace":
                holder[key] = copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
            case "delete":
                del holder[key]
            case "repeat":
                if isinstance(holder, list):
                    holder.insert(key, copy.deepcopy(holder[key]))
                else:
                    holder[f"{key}_again"] = copy.deepcopy(holder[key])
            case "swap":
                other = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
                holder[key], holder[other] = holder[other], holder[key]
            case "wrap":
                holder[key] = [holder[key]]
    return path, body


@pytest.fixture(scope="module")
def served(tagged_renderer: PackageRenderer) -> Iterator[tuple[asyncio.Runner, GatewayUnderTest]]:
    """One gateway for all examples."""
    with asyncio.Runner() as runner:
        running = running_gateway(tagged_renderer)
        yield runner, runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def family_renderers(tmp_path_factory: pytest.TempPathFactory) -> list[PackageRenderer]:
    return [
        load_renderer(write_family_model(tmp_path_factory.mktemp("family"), family), family.name)
        for family in MODEL_FAMILIES
    ]


@given(request=mutated())
@settings(max_examples=15, deadline=None)
def test_every_family_renders_a_mutated_request_or_refuses_it(
    family_renderers: list[PackageRenderer], request: tuple[str, dict[str, Any]]
) -> None:
    path, body = request
    try:
        asked = SURFACES[path].read(parse_json_object(json.dumps(body).encode())).answer
    except RequestRefused:
        return
    for renderer in family_renderers:
        try:
            prompt = renderer.render(asked.messages, asked.tools)
        except ContractError:
            continue
        opened = renderer.open_answer(prompt.token_ids, tools=asked.tools)
        opened.push(prompt.token_ids)
        opened.finish()
        assert prompt.token_ids


@given(request=mutated())
@settings(max_examples=60, deadline=None)
def test_a_mutated_request_is_served_or_refused(
    served: tuple[asyncio.Runner, GatewayUnderTest], request: tuple[str, dict[str, Any]]
) -> None:
    runner, gateway = served
    path, body = request

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=120, verify=False) as client:
            return await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    answer = runner.run(post())
    assert answer.status_code in (200, 400, 404), answer.text
    answer.content.decode("utf-8")
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [block for block in answer.text.split("\n\n") if "data: {" in block]
        assert events
        for event in events:
            data = orjson.loads(event[event.index("data: ") + 6 :])
            assert data.get("error") is None
        ends = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.completed", "/v1/messages": "message_stop"}
        assert ends[path] in answer.text
    for turn in gateway.conversations.turns:
        assert turn.model_dump_json().encode()
    gateway.conversations.turns.clear()
