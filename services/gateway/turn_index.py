"""Finds turns: what was read from the log, and this gateway's own turns that are not there yet.

An own turn is found from the moment its answer is complete, long before it is on the log. It stays in memory, bounded
by the outbox, until the follower has read it back.
"""

import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum

from schemas.events.base import RecordReference
from services.gateway.known_turn import KnownTurn
from services.gateway.turn_index_store import TurnIndexStore


class _By(StrEnum):
    """What pending turns are looked up by."""

    ANSWER = "answer"
    SESSION = "session"
    HINT = "hint"
    PARENT = "parent"
    ROLLOUT = "rollout"


def _keys(turn: KnownTurn) -> Iterator[tuple[_By, str]]:
    yield _By.ANSWER, turn.answer_key
    yield _By.SESSION, turn.session_id
    if turn.session_hint is not None:
        yield _By.HINT, turn.session_hint
    if turn.parent_turn_id is not None:
        yield _By.PARENT, turn.parent_turn_id
    if turn.rollout is not None:
        yield _By.ROLLOUT, turn.rollout.rollout_id


class TurnIndex:
    """Thread-safe. No look-up takes longer the more turns wait for the log: after an outage there may be many."""

    def __init__(self, store: TurnIndexStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._pending: dict[str, KnownTurn] = {}
        self._by_key: dict[tuple[_By, str], dict[str, None]] = {}
        """Turn ids, in the order in which they came."""
        self._by_response: dict[str, str] = {}

    def add(self, turn: KnownTurn) -> None:
        """An own turn was finished; its place on the log is not known yet."""
        with self._lock:
            if turn.turn_id in self._pending:
                return
            self._pending[turn.turn_id] = turn
            for key in _keys(turn):
                self._by_key.setdefault(key, {})[turn.turn_id] = None
            self._by_response[turn.response_id] = turn.turn_id

    def placed(self, turn_id: str, turn_ref: RecordReference) -> None:
        """An own turn is on the log."""
        with self._lock:
            if turn_id in self._pending:
                self._pending[turn_id] = self._pending[turn_id].at(turn_ref)

    def stored(self, turn_ids: Sequence[str]) -> None:
        """These turns can be found in the store from now on."""
        with self._lock:
            for turn_id in turn_ids:
                self._drop(turn_id)

    def discard(self, turn_id: str) -> None:
        """An own turn was not recorded after all."""
        with self._lock:
            self._drop(turn_id)

    @property
    def pending_turns(self) -> int:
        """Own turns that the follower has not read back."""
        return len(self._pending)

    def turn_ref(self, turn_id: str) -> RecordReference | None:
        """Where a turn is on the log, if that is known."""
        with self._lock:
            pending = self._pending.get(turn_id)
        if pending is not None and pending.turn_ref is not None:
            return pending.turn_ref
        stored = self._store.by_turn(turn_id)
        return stored.turn_ref if stored is not None else None

    def by_response(self, principal: str, response_id: str) -> KnownTurn | None:
        """The principal's turn with a response id."""
        with self._lock:
            pending = self._pending.get(self._by_response.get(response_id, ""))
        if pending is not None and pending.principal == principal:
            return pending
        return next((turn for turn in self._store.by_response(response_id) if turn.principal == principal), None)

    def by_rollout(self, principal: str, rollout_id: str) -> list[KnownTurn]:
        """The principal's turns of a rollout, in no order."""
        # Pending before stored: a turn that the follower reads back meanwhile is found in one of them.
        pending = [turn for turn in self._pending_by(_By.ROLLOUT, rollout_id) if turn.principal == principal]
        found = {turn.turn_id: turn for turn in self._store.by_rollout(principal, rollout_id)}
        return list({**found, **{turn.turn_id: turn for turn in pending}}.values())

    def has_child(self, turn_id: str) -> bool:
        """Whether a main turn followed this one, here or at another gateway."""
        if any(turn.is_main for turn in self._pending_by(_By.PARENT, turn_id)):
            return True
        return any(turn.is_main for turn in self._store.children_of(turn_id))

    def for_principal(self, principal: str, session_id: str | None) -> "PrincipalLookup":
        """The index as the session tree sees it for one request."""
        return PrincipalLookup(self, self._store, principal, session_id)

    def pending_by_answer(self, answer_key: str) -> list[KnownTurn]:
        """Own turns with an answer that are not in the store yet."""
        return self._pending_by(_By.ANSWER, answer_key)

    def pending_by_session(self, session_id: str) -> list[KnownTurn]:
        """Own turns of a session that are not in the store yet."""
        return self._pending_by(_By.SESSION, session_id)

    def pending_by_hint(self, hint_key: str) -> list[KnownTurn]:
        """Own turns with a session hint that are not in the store yet."""
        return self._pending_by(_By.HINT, hint_key)

    def pending_children_of(self, turn_id: str) -> list[KnownTurn]:
        """Own turns that followed a turn and are not in the store yet."""
        return self._pending_by(_By.PARENT, turn_id)

    def _pending_by(self, by: _By, value: str) -> list[KnownTurn]:
        with self._lock:
            return [self._pending[turn_id] for turn_id in self._by_key.get((by, value), ())]

    def _drop(self, turn_id: str) -> None:
        turn = self._pending.pop(turn_id, None)
        if turn is None:
            return
        for key in _keys(turn):
            turn_ids = self._by_key[key]
            del turn_ids[turn_id]
            if not turn_ids:
                del self._by_key[key]
        if self._by_response.get(turn.response_id) == turn_id:
            del self._by_response[turn.response_id]


class PrincipalLookup:
    """`services.gateway.session_tree.TurnLookup` over pending and stored turns of one principal."""

    def __init__(self, index: TurnIndex, store: TurnIndexStore, principal: str, session_id: str | None) -> None:
        self._index = index
        self._store = store
        self._principal = principal
        self._session_id = session_id

    def by_answer(self, answer_key: str) -> Sequence[KnownTurn]:
        return self._merged(
            self._index.pending_by_answer(answer_key), self._store.by_answer(answer_key, self._session_id)
        )

    def by_session(self, session_id: str) -> Sequence[KnownTurn]:
        pending = self._index.pending_by_session(session_id)
        return self._merged(pending, self._store.by_session(self._principal, session_id))

    def by_hint(self, hint_key: str) -> Sequence[KnownTurn]:
        pending = self._index.pending_by_hint(hint_key)
        return self._merged(pending, self._store.by_hint(hint_key))

    def children_of(self, turn_id: str) -> Sequence[KnownTurn]:
        pending = self._index.pending_children_of(turn_id)
        return self._merged(pending, self._store.children_of(turn_id))

    def _merged(self, pending: Sequence[KnownTurn], stored: Sequence[KnownTurn]) -> list[KnownTurn]:
        found = {turn.turn_id: turn for turn in (*pending, *stored) if turn.principal == self._principal}
        return sorted(found.values(), key=lambda turn: (turn.created_at, turn.turn_id), reverse=True)
