"""Look-ups of turns that wait for the log, against a search of all of them."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events.base import RecordReference, RolloutPosition, TurnType
from services.gateway.known_turn import KnownTurn
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore

FEW = st.sampled_from(["a", "b", "c"])


@st.composite
def turns(draw: st.DrawFn) -> list[KnownTurn]:
    made: list[KnownTurn] = []
    for number in range(draw(st.integers(0, 8))):
        rollout = draw(st.none() | FEW)
        made.append(
            KnownTurn(
                turn_id=f"turn-{number}",
                session_id=draw(FEW),
                principal=draw(st.sampled_from(["alice", "bob"])),
                parent_turn_id=draw(st.none() | st.sampled_from([f"turn-{each}" for each in range(8)])),
                depth=0,
                turn_type=draw(st.sampled_from([TurnType.MAIN, TurnType.SIDE])),
                trainable=True,
                response_id=f"response-{number}",
                answer_key=draw(FEW),
                ancestor_answer_keys=(),
                message_keys=(),
                session_hint=draw(st.none() | FEW),
                trace_id=None,
                rollout=None
                if rollout is None
                else RolloutPosition(task_id="t", group_id="g", rollout_id=rollout, step_index=0),
                created_at=datetime(2026, 1, 1, 0, 0, number, tzinfo=UTC),
                turn_ref=None,
            )
        )
    return made


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> TurnIndexStore:
    return TurnIndexStore(Path(tmp_path_factory.mktemp("index")) / "index.sqlite", cache_bytes=1 << 20)


@given(made=turns(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_lookup_finds_what_a_search_finds(
    empty_store: TurnIndexStore, made: list[KnownTurn], data: st.DataObject
) -> None:
    index = TurnIndex(empty_store)
    place = RecordReference(topic="turns", partition=0, offset=1)
    left: dict[str, KnownTurn] = {}
    for turn in made:
        index.add(turn)
        index.add(turn)
        left[turn.turn_id] = turn
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(left)))
            del left[gone]
            data.draw(st.sampled_from([index.discard, lambda turn_id: index.stored([turn_id])]))(gone)
        if left and data.draw(st.booleans()):
            placed = data.draw(st.sampled_from(sorted(left)))
            index.placed(placed, place)
            left[placed] = left[placed].at(place)

    def are(found: list[KnownTurn], wanted: list[KnownTurn]) -> bool:
        return {turn.turn_id: turn for turn in found} == {turn.turn_id: turn for turn in wanted}

    waiting = list(left.values())
    for value in ("a", "b", "c"):
        assert are(index.pending_by_answer(value), [turn for turn in waiting if turn.answer_key == value])
        assert are(index.pending_by_session(value), [turn for turn in waiting if turn.session_id == value])
        assert are(index.pending_by_hint(value), [turn for turn in waiting if turn.session_hint == value])
        of_alice = [turn for turn in waiting if turn.principal == "alice" and turn.rollout is not None]
        of_rollout = [turn for turn in of_alice if turn.rollout and turn.rollout.rollout_id == value]
        assert are(index.by_rollout("alice", value), of_rollout)
    for number in range(8):
        children = [turn for turn in waiting if turn.parent_turn_id == f"turn-{number}"]
        assert are(index.pending_children_of(f"turn-{number}"), children)
        assert index.has_child(f"turn-{number}") == any(turn.is_main for turn in children)
    assert index.pending_turns == len(left)
    index.stored(list(left))
    assert index._by_key == {}, "nothing is kept of turns that left"  # pyright: ignore[reportPrivateUsage]
