"""A turn that was opted out leaves nothing behind: not on the log, not in the index, not on disk."""

import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.rendering.renderer import PackageRenderer
from clawstream.topics import NEXT_STATES, TURN_INDEX, TURNS
from tests.fixtures.conversations import create_topics, events_of
from tests.fixtures.conversations import running_gateway as running_conversations
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
}


def bytes_below(directory: Path) -> bytes:
    return b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())


def index_below(directory: Path) -> str:
    """The turn index as text."""
    (index,) = directory.rglob("*.sqlite")
    with sqlite3.connect(f"file:{index}?mode=ro", uri=True) as database:
        return "\n".join(database.iterdump())


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("store", "header", "recorded"),
    [(None, None, True), (True, None, True), (False, None, False), (None, "false", False), (False, "true", True)],
)
async def test_the_body_or_a_header_opts_out(
    gateway: GatewayUnderTest, path: str, stream: bool, store: bool | None, header: str | None, recorded: bool
) -> None:
    headers = {} if header is None else {"X-Clawstream-Store": header}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as client:
        answer = await client.post(path, json={**ROUTES[path], "stream": stream, "store": store})
    assert answer.status_code == 200
    assert (len(gateway.conversations.placed), len(gateway.conversations.turns)) == ((1, 1) if recorded else (0, 0))
    said = f"x-clawstream-recorded: {str(recorded).lower()}"
    assert said in (answer.text if stream else "\n".join(f"{name}: {value}" for name, value in answer.headers.items()))
    if not recorded:
        assert "clawstream_turns_opted_out_total 1.0" in gateway.metrics.exposition().decode()


async def test_a_header_that_says_neither_is_refused(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url, headers={"x-clawstream-store": "perhaps"}) as client:
        answer = await client.post("/v1/chat/completions", json=ROUTES["/v1/chat/completions"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-clawstream-store")


async def test_nothing_is_on_disk_or_on_the_log(tiny_renderer: PackageRenderer, tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    async with (
        running_conversations(bus, tmp_path) as conversations,
        running_gateway(tiny_renderer, real_conversations=conversations.conversations) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url) as client,
    ):
        first = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "PUBLIC-QUESTION"}]}
        )
        answered = first.json()["choices"][0]["message"]
        history: list[Any] = [{"role": "user", "content": "PUBLIC-QUESTION"}, answered]
        secret = await client.post(
            "/v1/chat/completions",
            json={"messages": [*history, {"role": "user", "content": "SECRET-REPLY"}], "store": False},
        )
        feedback = await client.post("/v1/feedback", json={"response_id": secret.json()["id"], "score": 1})
        written, dumped = bytes_below(tmp_path), index_below(tmp_path)
    assert b"PUBLIC-QUESTION" in written
    turn_id = secret.headers["x-clawstream-turn-id"]
    for trace in ("SECRET-REPLY", turn_id):
        assert trace.encode() not in written
        assert trace not in dumped
    assert first.headers["x-clawstream-turn-id"] in dumped
    assert feedback.status_code == 404
    assert len(events_of(bus, TURNS)) == 1
    assert len(events_of(bus, TURN_INDEX)) == 1
    assert events_of(bus, NEXT_STATES) == []
