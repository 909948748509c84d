"""Large arrays of a turn travel as blobs that are durable before the log hears of them."""

import os
from pathlib import Path

import numpy as np
import pytest

from clawstream.blobs import BlobReader, BlobStore
from clawstream.bus.memory import MemoryBus
from clawstream.clock import SystemClock
from clawstream.errors import SettingsError
from clawstream.topics import TURNS
from schemas.arrays import MAX_INLINE_BYTES, float32_array, int32_array
from schemas.events import TurnEvent
from schemas.events.base import TurnType, VersionSpan
from schemas.events.turn import ParentEvidence
from services.gateway.ports import Placement
from services.gateway.turn_blobs import with_blobs
from tests.fixtures.conversations import (
    GatewayUnderTest,
    assistant,
    events_of,
    request,
    running_gateway,
    turn_event,
    user,
)

PROMPT = np.arange(MAX_INLINE_BYTES // 4 + 1, dtype=np.int32)
RESPONSE = np.arange(2 * PROMPT.size, dtype=np.int32)[::-1].copy()
LOGPROBS = -np.linspace(0, 20, RESPONSE.size, dtype=np.float32)


async def answer_long(gateway: GatewayUnderTest) -> bool:
    asked = request([user("a long question")], clock=gateway.clock)
    placement = await gateway.conversations.place(asked)
    turn = turn_event(asked, placement, assistant("a long answer"), SystemClock()).model_copy(
        update={
            "prompt_ids": int32_array(PROMPT),
            "response_ids": int32_array(RESPONSE),
            "response_logprobs": float32_array(LOGPROBS),
            "version_spans": [VersionSpan(weight_version=0, start=0, end=RESPONSE.size)],
        }
    )
    return await gateway.conversations.finish(asked, placement, turn)


def turn_on_the_log(bus: MemoryBus) -> TurnEvent:
    (turn,) = events_of(bus, TURNS)
    assert isinstance(turn, TurnEvent)
    np.testing.assert_array_equal(BlobReader().resolve(turn.prompt_ids), PROMPT)
    np.testing.assert_array_equal(BlobReader().resolve(turn.response_ids), RESPONSE)
    np.testing.assert_array_equal(BlobReader().resolve(turn.response_logprobs), LOGPROBS)
    return turn


async def test_a_long_turn_refers_to_its_arrays(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        assert await answer_long(gateway)
    turn = turn_on_the_log(bus)
    for array in (turn.prompt_ids, turn.response_ids, turn.response_logprobs):
        assert array.blob is not None
        assert array.blob.uri.startswith((tmp_path / "blobs").as_uri())
    assert len(turn.model_dump_json()) < 10_000
    assert turn.trainable


async def test_blobs_go_where_the_settings_say(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path, blob_store_url="memory://gateway-blobs") as gateway:
        assert await answer_long(gateway)
    blob = turn_on_the_log(bus).prompt_ids.blob
    assert blob is not None
    assert blob.uri.startswith("memory://")


async def test_a_store_that_nothing_can_write_to_is_a_mistake_in_the_settings(bus: MemoryBus, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nosuch://bucket"):
        async with running_gateway(bus, tmp_path, blob_store_url="nosuch://bucket"):
            pass


async def test_arrays_stay_inside_the_event_when_the_store_refuses(bus: MemoryBus, tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file where the folder should be")
    async with running_gateway(bus, tmp_path) as gateway:
        assert await answer_long(gateway)
        assert b"clawstream_blob_errors_total 1.0" in gateway.conversations.metrics.exposition()
    assert turn_on_the_log(bus).prompt_ids.blob is None


def test_a_blob_and_its_name_are_synced_before_anyone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def remember(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    store = BlobStore(str(tmp_path / "blobs"))
    first = store.write(b"some bytes")
    folder = tmp_path / "blobs" / first.sha256[:2]
    assert Path(synced[0]).parent == folder
    assert [Path(name) for name in synced[1:]] == [folder, folder.parent, tmp_path]
    synced.clear()
    assert store.write(b"some bytes") == first
    assert Path(synced[0]) == folder, "whoever put it there may not have synced its name yet"


def test_a_turn_that_is_packed_already_is_left_alone(tmp_path: Path) -> None:
    asked = request([user("a")], clock=SystemClock())
    store = BlobStore(str(tmp_path))
    array = store.pack(PROMPT)
    turn = turn_event(asked, placement_of(), assistant("b"), SystemClock()).model_copy(update={"prompt_ids": array})
    assert with_blobs(turn, store) == turn


def placement_of() -> Placement:
    return Placement(
        turn_id="turn",
        session_id="session",
        parent_turn_id=None,
        parent_evidence=ParentEvidence(rule="none"),
        depth=0,
        turn_type=TurnType.MAIN,
        turn_type_reason="default",
        client_profile="generic",
    )
